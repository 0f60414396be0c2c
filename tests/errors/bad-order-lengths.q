scheme bad_order_lengths

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l)] = "weight"[n, b {l: 1 0}.0:2 {l: 3 2 1 0}.2:2] : u8
}
