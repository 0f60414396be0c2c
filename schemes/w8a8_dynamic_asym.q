scheme w8a8_dynamic_asym(act: type = bf16)
    "int8 x int8: weights per channel, activations quantized per token with a zero point at run time."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : f32 = (max(amax(x), 0) - min(amin(x), 0)) / 255
    zero  o[m]    : i8  = -128 - min(amin(x), 0) / t
    code  a[m, k] : i8  = x / t + o
    x ~ (a - o) * t
}

compute i8 -> i32

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
