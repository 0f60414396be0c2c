scheme not_a_value

weight {
    code  q[n, k] : u4
    index g[k]    : idx(k // 128)
    w ~ q * g
}

compute f16 -> f32
output f16
