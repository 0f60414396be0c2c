scheme bad_axis

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:2)] = "weight"[n, {l} b] : u8
}
