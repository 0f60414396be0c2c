scheme scale_and_min(act: type = f16)
    "GGUF Q4_1: a scale and a minimum per 32, in records of 20 bytes."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    param o[n, k // 32] : f16
    w ~ q * s + o
}

compute act -> f32
output act

quantize {
    o = amin(w)
    s = (amax(w) - o) / 15
    q = (w - o) / s
}

layout gguf record 20 {
    s[n, b]            = "weight"[n, b]        @ 0 : f16
    o[n, b]            = "weight"[n, b]        @ 2 : f16
    q[n, (b l:2 j:16)] = "weight"[n, b, j {l}] @ 4 : u8
}
