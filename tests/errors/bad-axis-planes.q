scheme bad_axis_planes

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[(a h:8), (b l:8)] = "weight"[a, b {l}.0:2 {h}.2:2] : u8
}
