scheme bad_table_extent

weight {
    code  q[n, k] : u4
    table c[n]  : f16 = { 1.0, 2.0 }
    w ~ c[q]
}

compute f16 -> f32
output f16
