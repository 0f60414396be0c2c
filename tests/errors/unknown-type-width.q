scheme wide
weight {
    code q[n, k] : u9
    w ~ q
}
compute f16 -> f32
output f16
