scheme bad_type

weight {
    code q[n, k] : u(12)
    w ~ q
}

compute f16 -> f32
output f16
