scheme bad_index_below

weight {
    code  q[n, k] : u4
    scale s[n, g] : f16
    index g[k]    : idx(k // 128)
    w ~ q * s
}

compute f16 -> f32
output f16
