scheme bad_index_tokens

weight {
    code  q[n, k] : u4
    scale s[m] : f16
    w ~ q * s
}

compute f16 -> f32
output f16
