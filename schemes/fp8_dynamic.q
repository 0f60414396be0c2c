scheme fp8_dynamic(fmt: type = e4m3, act: type = bf16)
    "8-bit floats by 8-bit floats: weights per channel, activations quantized per token at run time."

# Micikevicius et al., FP8 Formats for Deep Learning (2022); OCP 8-bit Floating Point Specification 1.0.
weight {
    code  q[n, k] : fmt
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / max(fmt)
    code  a[m, k] : fmt = x / t
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

layout compressed_tensors {
    q    = "weight"             : fmt
    s[n] = "weight_scale"[n, 1] : f32
    b    = "bias"               : act
}

layout modelopt {  # FP8_PER_CHANNEL_PER_TOKEN
    q = "weight"       : fmt
    s = "weight_scale" : f32
    b = "bias"         : act
}
