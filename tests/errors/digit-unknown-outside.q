scheme digit_unknown_outside

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:2)] = "weight"[n, c {l}] : u8
}
