scheme w8a16(act: type = bf16)
    "int8 weights, one scale per output channel; activations stay 16-bit."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 127
    q = w / s
}

layout compressed_tensors {
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : f32
    b    = "bias"               : act
}
