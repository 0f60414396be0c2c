scheme bad_table_computed

weight {
    code  q[n, k] : u4
    table c[16] : f16 = 2 * 8
    w ~ c[q]
}

compute f16 -> f32
output f16
