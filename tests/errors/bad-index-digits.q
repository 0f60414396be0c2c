scheme bad_index_digits

weight {
    code  q[n, k] : u4
    table c[16] : f16
    w ~ c[(a b)]
}

compute f16 -> f32
output f16
