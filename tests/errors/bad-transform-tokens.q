scheme bad_transform_tokens

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    param v[k] : f16
    transform x[m, k] = x[m, k] * v[m]
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output f16
