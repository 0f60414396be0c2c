scheme reserved_name_quantize

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

quantize {
    acc = w
    q = acc
}
