scheme q4_1(act: type = f16)
    "GGUF Q4_1: 20-byte records, an f16 scale, an f16 minimum, then 32 nibbles."

# ggml, block_q4_1 and quantize_row_q4_1.
weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    param o[n, k // 32] : f16
    w ~ q * s + o
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = (amax(w) - amin(w)) / 15
    o = amin(w)
    q = (w - o) / s
}

layout gguf record 20 {
    s[n, b]            = "weight"[n, b]        @ 0 : f16
    o[n, b]            = "weight"[n, b]        @ 2 : f16
    q[n, (b l:2 j:16)] = "weight"[n, b, j {l}] @ 4 : u8
}
