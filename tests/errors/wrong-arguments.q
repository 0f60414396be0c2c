scheme wrong_arguments

weight {
    code q[n, k] : u4
    w ~ max(q)
}

compute f16 -> f32
output f16
