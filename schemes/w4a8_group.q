scheme w4a8_group(act: type = bf16, group: dim = 256)
    "int4 weights with scales on two levels, groups along k and channels, by int8 activations per token."

weight {
    code  q[n, k]          : i4
    scale r[n, k // group] : f32  # level 2: per group
    scale s[n]             : f32  # level 1: per channel
    w ~ q * r * s
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

quantize {
    s = amax(abs(w)) / 127
    r = amax(abs(w)) / (7 * s)
    q = w / (r * s)
}

layout modelslim {  # W4A8_DYNAMIC before "1.0.0", with a group size: one code a byte
    q    = "weight"              : i8
    r    = "weight_scale_second" : f32
    s[n] = "weight_scale"[n, 1]  : f32
    b    = "bias"                : act
}
