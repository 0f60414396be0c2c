scheme bad_type_argument

weight {
    code q[n, k] : f16(4)
    w ~ q
}

compute f16 -> f32
output f16
