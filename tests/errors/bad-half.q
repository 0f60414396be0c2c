scheme bad_half

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    half n = (r:2 j)
    y = silu(acc) * acc[r = 1]
}
