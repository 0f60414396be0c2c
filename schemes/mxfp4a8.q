scheme mxfp4a8(fmt: type = e4m3, act: type = bf16)
    "OCP MXFP4 weights by MXFP8 activations: one power-of-two scale per 32 for both."

# OCP Microscaling Formats (MX) Specification 1.0; both quantizers are its section 6.3.  With fmt = e2m1 the activations
# are MXFP4, too.
weight {
    code  q[n, k]       : e2m1
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
    s = exp2(floor(log2(amax(abs(w)))) - 2)
    q = w / s
}

layout compressed_tensors {  # ModelSlim's W4A8_MXFP and W4A4_MXFP4 store "weight" instead
    q[n, (b l:2)] = "weight_packed"[n, b {l}] : u8
    s             = "weight_scale"            : e8m0
    b             = "bias"                    : act
}

layout modelslim {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "weight_scale"     : e8m0
    b             = "bias"             : act
}
