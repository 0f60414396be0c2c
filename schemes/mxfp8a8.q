scheme mxfp8a8(fmt: type = e4m3, act: type = bf16)
    "OCP MXFP8 by MXFP8: 8-bit floats, one power-of-two scale per 32 for weights and activations."

# OCP Microscaling Formats (MX) Specification 1.0; both quantizers are its section 6.3.
weight {
    code  q[n, k]       : fmt
    scale s[n, k // 32] : e8m0
    w ~ q * s
}

activation {
    scale t[m, k // 32] : e8m0 = exp2(floor(log2(amax(abs(x)))) - floor(log2(max(fmt))))
    code  a[m, k]       : fmt  = x / t
    x ~ a * t
}

compute fmt -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = exp2(floor(log2(amax(abs(w)))) - floor(log2(max(fmt))))
    q = w / s
}

layout compressed_tensors {  # ModelOpt's MXFP8 and ModelSlim's W8A8_MXFP8 are the same
    q = "weight"       : fmt
    s = "weight_scale" : e8m0
    b = "bias"         : act
}
