scheme smoothing(act: type = bf16)
    "One factor per input channel moves outliers from x into the weight, before x is quantized."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    param v[k] : act
    transform x[m, k] = x[m, k] * v[k]
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output act

layout plain {
    q = "weight"        : i8
    s = "weight_scale"  : f32
    v = "div.mul_scale" : act
}
