scheme w8a8_quant_bias(act: type = bf16)
    "int8 x int8, calibrated: the sum stays an integer, and so do the bias and the correction for the zero point."

# ModelSlim's W8A8.  `quant_bias` is round(bias / d) - o * sum(q), so the file's float bias must not be added again, and
# x is its codes.  d is the scale of the weight times that of x.
weight {
    code  q[n, k] : i8
    scale d[n]    : f32
    w ~ q
}

activation {
    scale c[]     : f32
    zero  o[]     : f32  # a whole number
    code  a[m, k] : i8 = x / c + o
    x ~ a
}

compute i8 -> i32

output act {
    bias b[n] : i32
    y = (acc + b) * d
}

layout modelslim {
    q = "weight"       : i8
    d = "deq_scale"    : f32
    c = "input_scale"  : f32
    o = "input_offset" : f32
    b = "quant_bias"   : i32
}

layout modelslim_f16 {  # of f16 models: the bits of the scale, an f32, are the low half of an i64
    q          = "weight"                  : i8
    d[(c l:1)] = "deq_scale"[c {l pad 32}] : i64
    c          = "input_scale"             : f32
    o          = "input_offset"            : f32
    b          = "quant_bias"              : i32
}
