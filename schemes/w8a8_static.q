scheme w8a8_static(act: type = bf16)
    "int8 x int8 with a calibrated, asymmetric activation scale."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[]     : f32  # no `=`: loaded from the checkpoint
    zero  o[]     : i8
    code  a[m, k] : i8 = x / t + o
    x ~ (a - o) * t
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
    o    = "input_zero_point"   : i8
    b    = "bias"               : act
}
