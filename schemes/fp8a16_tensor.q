scheme fp8a16_tensor(fmt: type = e4m3, act: type = bf16)
    "8-bit float weights, one scale for the whole tensor; activations stay 16-bit."

# Micikevicius et al., FP8 Formats for Deep Learning (2022); OCP 8-bit Floating Point Specification 1.0.
weight {
    code  q[n, k] : fmt
    scale s[]     : f32
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

layout compressed_tensors {  # ModelOpt's FP8 and the method "fp8" of transformers and vLLM name them the same
    q = "weight"       : fmt
    s = "weight_scale" : f32
    b = "bias"         : act
}
