scheme q8_0(act: type = f16)
    "GGUF Q8_0: 34-byte records, an f16 scale then 32 signed bytes."

# ggml, block_q8_0 and quantize_row_q8_0.
weight {
    code  q[n, k]       : i8
    scale s[n, k // 32] : f16
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 127
    q = w / s
}

layout gguf record 34 {
    s[n, b]        = "weight"[n, b]    @ 0 : f16
    q[n, (b j:32)] = "weight"[n, b, j] @ 2 : i8
}
