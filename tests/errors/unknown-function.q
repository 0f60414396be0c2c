scheme unknown_function

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

quantize {
    q = rond(w)
}
