scheme bad_index_code

weight {
    code q[k, n] : u4
    w ~ q
}

compute f16 -> f32
output f16
