scheme one_scale(act: type = bf16)
    "int8 x int8: one scale for all of x, computed at run time."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[]     : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output act

quantize {
    s = amax(abs(w)) / 127
    q = w / s
}

layout plain {
    q = "weight" : i8
    s = "scale"  : f32
}
