scheme w4a8_channel(act: type = bf16)
    "int4 by int8: weights per channel, activations quantized per token at run time."

weight {
    code  q[n, k] : i4
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout plain {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "scale"            : f32
    b             = "bias"             : act
}
