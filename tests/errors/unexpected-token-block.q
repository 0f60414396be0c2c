scheme unexpected_token_block

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

7
