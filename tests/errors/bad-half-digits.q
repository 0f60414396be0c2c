scheme bad_half_digits

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    half n = (r j)
    y = acc
}
