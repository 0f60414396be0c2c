scheme bad_half_missing

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    y = acc[r = 0]
}
