scheme fp8a16_block(fmt: type = e4m3, act: type = bf16, block: dim = 128, scale_type: type = f32)
    "8-bit float weights in square blocks with a scale each; activations stay 16-bit."

# The weights of DeepSeek-V3 (DeepSeek-AI, technical report, 2024, section 3.3), for 16-bit activations.  With
# scale_type = e8m0 the scales are powers of two ("ue8m0").
weight {
    code  q[n, k]                   : fmt
    scale s[n // block, k // block] : scale_type
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / max(fmt)
    q = w / s
}

layout deepseek {  # `weight_scale_inv` multiplies, despite its name
    q = "weight"           : fmt
    s = "weight_scale_inv" : scale_type
    b = "bias"             : act
}

layout gptqmodel {  # here it is what its name says
    q = "weight"               : fmt
    s = 1 / "weight_scale_inv" : scale_type
    b = "bias"                 : act
}

layout compressed_tensors {
    q = "weight"       : fmt
    s = "weight_scale" : scale_type
    b = "bias"         : act
}

layout modelopt {  # FP8_PB_WO
    q       = "weight"                   : fmt
    s[r, c] = "weight_scale"[r, 1, c, 1] : scale_type
    b       = "bias"                     : act
}
