scheme fp8_block(fmt: type = e4m3, act: type = bf16, block: dim = 128, scale_type: type = f32)
    "DeepSeek-V3: square weight blocks, activations in groups along k."

# DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.3.  `weight_scale_inv` multiplies, despite its name.
weight {
    code  q[n, k]                   : fmt
    scale s[n // block, k // block] : scale_type
    w ~ q * s
}

activation {
    scale t[m, k // block] : f32 = amax(abs(x)) / max(fmt)
    code  a[m, k]          : fmt = x / t
    x ~ a * t
}

compute fmt -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / max(fmt)
    q = w / s
}

layout deepseek {
    q = "weight"           : fmt
    s = "weight_scale_inv" : scale_type
    b = "bias"             : act
}

layout compressed_tensors {
    q = "weight"       : fmt
    s = "weight_scale" : scale_type
    b = "bias"         : act
}
