scheme w4a4(act: type = f16, scale_type: type = f16)
    "int4 x int4, per-channel weights, per-token activations."

weight {
    code  q[n, k] : i4
    scale s[n]    : scale_type
    w ~ q * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 7
    code  a[m, k] : i4  = x / t
    x ~ a * t
}

compute i4 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 7
    q = w / s
}

layout pack_quantized {
    q[n, (b l:8)] = "weight_packed"[n, b {l}] - 8 : i32
    s[n]          = "weight_scale"[n, 1]          : scale_type
    b             = "bias"                        : act
}

layout modelslim {  # W4A4_DYNAMIC: one code a byte, scale_type = f32
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : scale_type
    b    = "bias"               : act
}
