scheme bad_index_output

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    y[n, m] = acc
}
