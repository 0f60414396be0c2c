scheme mxfp4(act: type = bf16)
    "OCP MXFP4 weights: e2m1 elements, one power-of-two scale per 32."

# OCP Microscaling Formats (MX) Specification 1.0; the quantizer is its section 6.3.
weight {
    code  q[n, k]       : e2m1
    scale s[n, k // 32] : e8m0
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = exp2(floor(log2(amax(abs(w)))) - 2)
    q = w / s
}

layout gpt_oss {
    q[n, (g j:16 l:2)] = "blocks"[n, g, j {l}] : u8
    s                  = "scales"              : e8m0
    b                  = "bias"                : act
}

layout compressed_tensors {
    q[n, (b l:2)] = "weight_packed"[n, b {l}] : u8
    s             = "weight_scale"            : e8m0
    b             = "bias"                    : act
}
