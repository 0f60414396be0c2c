scheme unknown_type

weight {
    code  q[n, k] : u4
    scale s[n]    : fp16
    w ~ q * s
}

compute f16 -> f32
output f16
