scheme bad_number_infinite

weight {
    code q[n, k] : u4
    w ~ q * exp2(2000)
}

compute f16 -> f32
output f16
