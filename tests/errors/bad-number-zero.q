scheme bad_number_zero

weight {
    code q[n, k] : u4
    w ~ q / 0
}

compute f16 -> f32
output f16
