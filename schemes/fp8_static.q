scheme fp8_static(fmt: type = e4m3, act: type = bf16)
    "8-bit floats by 8-bit floats, one scale per tensor for both, that of the activations calibrated."

# Micikevicius et al., FP8 Formats for Deep Learning (2022); OCP 8-bit Floating Point Specification 1.0.
weight {
    code  q[n, k] : fmt
    scale s[]     : f32
    w ~ q * s
}

activation {
    scale t[]     : f32  # no `=`: loaded from the checkpoint
    code  a[m, k] : fmt = x / t
    x ~ a * t
}

compute fmt -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout compressed_tensors {  # ModelOpt's FP8 and transformers' "static" are the same
    q = "weight"       : fmt
    s = "weight_scale" : f32
    t = "input_scale"  : f32
    b = "bias"         : act
}
