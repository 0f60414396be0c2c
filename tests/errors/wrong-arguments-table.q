scheme wrong_arguments_table

weight {
    code  q[n, k] : u4
    table c[16] : f16
    w ~ c[q, q]
}

compute f16 -> f32
output f16
