scheme bad_type_idx

weight {
    code  q[n, k] : u4
    index g[k]    : idx
    w ~ q
}

compute f16 -> f32
output f16
