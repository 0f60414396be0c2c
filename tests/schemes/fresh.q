scheme fresh(act: type = bf16)
    "5-bit codes of a table of 24 numbers, groups of 48 with a scale and an offset."

weight {
    code  q[n, k]       : u5
    scale s[n, k // 48] : f16
    param o[n, k // 48] : f16
    table c[24]         : f32 = {
        -1.0, -0.8, -0.65, -0.52, -0.42, -0.33, -0.26, -0.2, -0.15, -0.11, -0.07,
        -0.03, 0.0, 0.04, 0.08, 0.13, 0.18, 0.24, 0.31, 0.4, 0.5, 0.63, 0.79, 1.0
    }
    w ~ c[q] * s + o
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = gelu(acc + b)
}
