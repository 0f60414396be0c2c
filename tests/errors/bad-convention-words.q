scheme bad_convention_words

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:8)] = words("weight" * 2)[n, b {l}] : i32
}
