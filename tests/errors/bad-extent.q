scheme bad_extent

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:1000000000)] = "weight"[n, b {l}] : i32
}
