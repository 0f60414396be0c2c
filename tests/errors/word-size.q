scheme word_size

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:3)] = "weight"[n, b {l}] : u8
}
