scheme awq4(act: type = f16, group: dim = 128, scale_type: type = f16)
    "AWQ: 4-bit weights with a zero point, one scale per group along k."

# Lin et al., AWQ: Activation-aware Weight Quantization (2023); the files are AutoAWQ's, version "gemm".
weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : scale_type
    zero  z[n, k // group] : u4
    w ~ (q - z) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    top = max(amax(w), 0)
    bottom = min(amin(w), 0)
    s = (top - bottom) / 15
    z = -bottom / s
    q = w / s + z
}

layout autoawq {
    q[(c l), k] = "qweight"[k, c {l: 0 2 4 6 1 3 5 7}] : i32
    z[(c l), g] = "qzeros"[g, c {l: 0 2 4 6 1 3 5 7}]  : i32
    s[n, g]     = "scales"[g, n]                       : scale_type
    b           = "bias"                               : act
}

layout autoawq_gemv {  # codes lie along k, groups padded to whole words
    q[n, (r l:8)] = "qweight"[n, r {l}] : i32
    z[n, (g l:8)] = "qzeros"[n, g {l}]  : i32
    s[n, g]       = "scales"[n, g]      : scale_type
    b             = "bias"              : act
}
