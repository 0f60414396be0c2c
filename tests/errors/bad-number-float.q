scheme bad_number_float

weight {
    code q[n, k] : u4
    w ~ q * 1e999
}

compute f16 -> f32
output f16
