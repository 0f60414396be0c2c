scheme bad_order

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:2)] = "weight"[n, b {l: 1 1}] : u8
}
