scheme bad_extent_zero

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:0)] = "weight"[n, b {l}] : u8
}
