scheme bad_table

weight {
    code  q[n, k] : u4
    table c[4]  : f16 = { 1.0, 2.0, 4.0, 100000.0 }
    w ~ c[q]
}

compute f16 -> f32
output f16
