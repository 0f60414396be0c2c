scheme bad_index_quantize

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

quantize {
    q[n, k] = w
}
