scheme w8a8_static_sym(act: type = bf16)
    "int8 x int8 with a calibrated activation scale and no zero point."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[]     : f32  # no `=`: loaded from the checkpoint
    code  a[m, k] : i8 = x / t
    x ~ a * t
}

compute i8 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout compressed_tensors {
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : f32
    t    = "input_scale"        : f32
    b    = "bias"               : act
}
