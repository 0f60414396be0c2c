scheme bad_record_offset

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ q * s
}

compute f16 -> f32
output f16

layout gguf record 18 {
    s[n, b] = "weight"[n, b] @ 18 : f16
    q[n, (b l:2 j:16)] = "weight"[n, b, j {l}] @ 2 : u8
}
