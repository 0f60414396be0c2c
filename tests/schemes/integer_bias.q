scheme integer_bias(act: type = bf16)
    "A bias inside the scale: sums stay integers until the last line."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a
}

compute i8 -> i32

output act {
    bias b[n] : i32
    y = (acc + b) * s * t
}

layout plain {
    q = "weight"     : i8
    s = "deq_scale"  : f32
    b = "quant_bias" : i32
}
