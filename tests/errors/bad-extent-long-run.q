scheme bad_extent_long_run

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:65536)] = "weight"[n, b {l}] : i32
}
