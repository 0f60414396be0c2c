scheme bad_type_wide_scale

weight {
    code  q[n, k] : u4
    scale s[n]    : i16
    w ~ q * s
}

compute f16 -> f32
output f16
