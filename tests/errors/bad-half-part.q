scheme bad_half_part

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    half n = (r:2 j)
    y = acc[r = 0] * acc[r = 2]
}
