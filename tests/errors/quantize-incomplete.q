scheme quantize_incomplete

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ q * s
}

compute f16 -> f32
output f16

quantize {
    q = w / 2
}
