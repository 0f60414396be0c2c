scheme digit_unknown

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:2)] = "weight"[n, b {j}] : u8
}
