scheme unknown_tensor_computed

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output f16

layout mine {
    q = "weight" : i8
    t = "scales" : f32
}
