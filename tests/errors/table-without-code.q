scheme table_without_code

weight {
    code  q[n, k] : u2
    table c[2]  : f16 = { 0.0, 1.0 }
    w ~ c * q
}

compute f16 -> f32
output f16
