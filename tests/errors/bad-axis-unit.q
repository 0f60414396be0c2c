scheme bad_axis_unit

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, k] = "weight"[n, k, 2] : u8
}
