scheme bad_type_wide_code

weight {
    code q[n, k] : f16
    w ~ q
}

compute f16 -> f32
output f16
