scheme fp8_block_ue8m0(fmt: type = e4m3, act: type = bf16, block: dim = 128)
    "DeepSeek-V3.1: square weight blocks, activations in groups along k, and every scale a power of two."

# As fp8_block, with `scale_fmt: "ue8m0"`: scales of activations are rounded up, so that no code saturates.
weight {
    code  q[n, k]                   : fmt
    scale s[n // block, k // block] : e8m0
    w ~ q * s
}

activation {
    scale t[m, k // block] : e8m0 = exp2(ceil(log2(amax(abs(x)) / max(fmt))))
    code  a[m, k]          : fmt  = x / t
    x ~ a * t
}

compute fmt -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = exp2(ceil(log2(amax(abs(w)) / max(fmt))))
    q = w / s
}

layout deepseek {  # `weight_scale_inv` multiplies, despite its name
    q = "weight"           : fmt
    s = "weight_scale_inv" : e8m0
    b = "bias"             : act
}
