scheme fp8_tensor_dynamic(fmt: type = e4m3, act: type = bf16)
    "8-bit floats by 8-bit floats: one scale for the weight, activations quantized per token at run time."

# Micikevicius et al., FP8 Formats for Deep Learning (2022); OCP 8-bit Floating Point Specification 1.0.
weight {
    code  q[n, k] : fmt
    scale s[]     : f32
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

layout compressed_tensors {  # transformers' "dynamic" is the same
    q = "weight"       : fmt
    s = "weight_scale" : f32
    b = "bias"         : act
}
