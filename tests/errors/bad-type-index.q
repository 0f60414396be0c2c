scheme bad_type_index

weight {
    code  q[n, k] : u4
    index g[k]    : i32
    w ~ q
}

compute f16 -> f32
output f16
