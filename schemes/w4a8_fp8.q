scheme w4a8_fp8(act: type = bf16, group: dim = 128, scale_type: type = bf16)
    "int4 weights, one scale per group along k, by e4m3 activations, quantized per token at run time."

weight {
    code  q[n, k]          : i4
    scale s[n, k // group] : scale_type
    w ~ q * s
}

activation {
    scale t[m]    : f32  = amax(abs(x)) / max(e4m3)
    code  a[m, k] : e4m3 = x / t
    x ~ a * t
}

compute e4m3 -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 7
    q = w / s
}

layout int_quantized {  # compressed-tensors' W4AFP8: one code a byte
    q = "weight"       : i8
    s = "weight_scale" : scale_type
    b = "bias"         : act
}

layout pack_quantized {  # compressed-tensors stores codes plus 8
    q[n, (b l:8)] = "weight_packed"[n, b {l}] - 8 : i32
    s             = "weight_scale"                : scale_type
    b             = "bias"                        : act
}
