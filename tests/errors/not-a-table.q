scheme not_a_table

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ s[q]
}

compute f16 -> f32
output f16
