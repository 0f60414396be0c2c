scheme open_extent_word

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b:4 l)] = "weight"[n, b {l}] : u8
}
