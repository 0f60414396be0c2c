scheme bad_index

weight {
    code  q[n, k] : u4
    scale s[n, kk] : f16
    w ~ q * s
}

compute f16 -> f32
output f16
