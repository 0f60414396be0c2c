scheme bad_number

weight {
    code q[n, k] : u4
    w ~ q * 99999999999999999999999999
}

compute f16 -> f32
output f16
