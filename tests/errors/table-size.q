scheme table_size

weight {
    code  q[n, k] : u2
    table c[4]  : f16 = { 0.0, 1.0, 2.0 }
    w ~ c[q]
}

compute f16 -> f32
output f16
