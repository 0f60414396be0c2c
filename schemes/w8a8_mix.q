scheme w8a8_mix(act: type = bf16)
    "int8 x int8 in two phases: activations quantized per token in prefill, by a calibrated scale in decode."

# ModelSlim's W8A8_MIX.  The file's `quant_bias` and `deq_scale` are the same numbers, folded for one kernel.
weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation prefill {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

activation decode {
    scale c[]     : f32
    zero  o[]     : f32  # a whole number of an i8
    code  a[m, k] : i8 = x / c + i8(o)
    x ~ (a - i8(o)) * c
}

compute i8 -> i32

output act {
    bias b[n] : f32 optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 127
    q = w / s
}

layout modelslim {
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : f32
    c    = "input_scale"        : f32
    o    = "input_offset"       : f32
    b    = "bias"               : f32
}
