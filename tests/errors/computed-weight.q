scheme computed_weight

weight {
    code  q[n, k] : u4
    scale s[n]    : f16 = 2.0
    w ~ q * s
}

compute f16 -> f32
output f16
