scheme bad_index_group

weight {
    code  q[n, k]      : u4
    scale s[n, k // 0] : f16
    w ~ q * s
}

compute f16 -> f32
output f16
