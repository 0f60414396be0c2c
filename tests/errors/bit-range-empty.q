scheme bit_range_empty

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:16)] = "weight"[n, b {l}.0:4 {l}.4:0] : u8
}
