scheme unexpected_character_quote

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q = "weight : u8
}
