scheme phases(act: type = bf16)
    "Two activation blocks, as ModelSlim's W8A8_MIX: dynamic in prefill, calibrated in decode."

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
    zero  o[]     : f32  # a whole number
    code  a[m, k] : i8 = x / c + o
    x ~ (a - o) * c
}

compute i8 -> i32

output act {
    bias b[n] : f32 optional
    y = acc + b
}

layout modelslim {
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : f32
    c    = "input_scale"        : f32
    o    = "input_offset"       : f32
    b    = "bias"               : f32
}
