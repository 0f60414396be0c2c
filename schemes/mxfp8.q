scheme mxfp8(fmt: type = e4m3, act: type = bf16)
    "OCP MXFP8 weights: 8-bit float elements, one power-of-two scale per 32."

# OCP Microscaling Formats (MX) Specification 1.0; the quantizer is its section 6.3.
weight {
    code  q[n, k]       : fmt
    scale s[n, k // 32] : e8m0
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = exp2(floor(log2(amax(abs(w)))) - floor(log2(max(fmt))))
    q = w / s
}

layout compressed_tensors {  # ModelOpt's MXFP8 is the same
    q = "weight"       : fmt
    s = "weight_scale" : e8m0
    b = "bias"         : act
}
