scheme hqq(bits: int = 4, group: dim = 64, act: type = f16, scale_type: type = f16)
    "HQQ: integer codes with a float zero point, one scale and one zero per group along k."

# Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models (2023); axis 1.  The block below is
# where HQQ starts; it goes on to improve the zeros.
weight {
    code  q[n, k]          : u(bits)
    scale s[n, k // group] : scale_type
    zero  z[n, k // group] : scale_type
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
    s = (top - bottom) / (exp2(bits) - 1)
    z = -bottom / s
    q = w / s + z
}

# Rows of one group each, cut in as many parts as a byte holds codes; the first part is in the high bits.
layout hqq when bits == 8 {
    q[n, (g j:group)] = "W_q"[n g, j]   : u8
    s[n, g]           = "scale"[n g, 1] : scale_type
    z[n, g]           = "zero"[n g, 1]  : scale_type
    b                 = "bias"          : act
}

layout hqq when bits == 4 {
    q[(l c), (g j:group)] = "W_q"[c g {l: 1 0}, j] : u8
    s[n, g]               = "scale"[n g, 1]        : scale_type
    z[n, g]               = "zero"[n g, 1]         : scale_type
    b                     = "bias"                 : act
}

layout hqq when bits == 2 {
    q[(l c), (g j:group)] = "W_q"[c g {l: 3 2 1 0}, j] : u8
    s[n, g]               = "scale"[n g, 1]            : scale_type
    z[n, g]               = "zero"[n g, 1]             : scale_type
    b                     = "bias"                     : act
}

layout hqq when bits == 1 {
    q[(l c), (g j:group)] = "W_q"[c g {l: 7 6 5 4 3 2 1 0}, j] : u8
    s[n, g]               = "scale"[n g, 1]                    : scale_type
    z[n, g]               = "zero"[n g, 1]                     : scale_type
    b                     = "bias"                             : act
}
