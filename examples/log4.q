scheme log4(act: type = f16)
    "Sign and power of two in 4 bits, one scale for 64 weights, GELU."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 64] : f16
    w ~ (1 - 2 * (q // 8)) * exp2(-(q % 8)) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = gelu(acc + b)
}

quantize {
    s = amax(abs(w))
    negative = round((1 - w / abs(w)) / 2)
    step = min(round(-log2(abs(w) / s)), 7)
    q = 8 * negative + step
}

layout plain {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "scale"            : f16
    b             = "bias"             : act
}
