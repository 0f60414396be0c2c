scheme bad_convention_words_inside

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:8)] = words("weight"[n, b {l}] + 1) : i32
}
