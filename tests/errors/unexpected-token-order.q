scheme unexpected_token_order

weight {
    w ~ q
    code q[n, k] : u4
}

compute f16 -> f32
output f16
