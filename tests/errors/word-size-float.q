scheme word_size_float

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ q * s
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:4)] = "weight"[n, b {l}] : f16
    s = "scales" : f16
}
