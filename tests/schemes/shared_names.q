scheme shared_names(act: type = f16)
    "Phases that call different things by one name: a scale that the first computes and the second loads."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q
}

activation prefill {
    scale t[m]    : f32 = amax(abs(x)) / 7
    code  a[m, k] : i4  = x / t
    x ~ a
}

activation decode {
    scale t[]     : f32
    code  a[m, k] : i8 = x / t
    x ~ a
}

compute i8 -> i32

output act {
    bias b[n] : act optional
    y = acc * s * t + b
}

layout plain {
    q = "weight"       : i8
    s = "weight_scale" : f32
    t = "input_scale"  : f32
    b = "bias"         : act
}
