scheme wrong_arguments_cast

weight {
    code q[n, k] : u4
    w ~ i8(q, 2)
}

compute f16 -> f32
output f16
