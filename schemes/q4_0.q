scheme q4_0(act: type = f16)
    "GGUF Q4_0: 18-byte records, an f16 scale then 32 nibbles."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    w ~ (q - 8) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout gguf record 18 {
    s[n, b]            = "weight"[n, b]        @ 0 : f16
    q[n, (b l:2 j:16)] = "weight"[n, b, j {l}] @ 2 : u8
}
