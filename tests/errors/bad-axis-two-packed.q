scheme bad_axis_two_packed

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[(a h:2), (b l:4)] = "weight"[a {h}, b {l}] : u8
}
