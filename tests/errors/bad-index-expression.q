scheme bad_index_expression

weight {
    code  q[n, k]   : u4
    scale s[n, k*2] : f16
    w ~ q * s
}

compute f16 -> f32
output f16
