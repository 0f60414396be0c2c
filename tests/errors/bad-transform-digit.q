scheme bad_transform_digit

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    param v[i, c] : f16
    transform x[m, (i i)] = sum(v[i, c] * x[m, (i c)])
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output f16
