scheme rotation(act: type = f16)
    "x is scaled, rotated in blocks by a matrix, and mixed between them through few directions, before 8-bit codes."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    param v[k]    : act
    param h[4, 4] : i8
    param u[b, r] : f32
    param d[r, c] : f32
    transform x[m, (b j)] = sum(x[m, (b i)] * h[i, j] * v[(b i)])
    transform x[m, (c i)] = sum(d[r, c] * x[m, (b i)] * u[b, r])
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output act

layout plain {
    q = "weight"       : i8
    s = "weight_scale" : f32
    v = "factors"      : act
    h = "rotation"     : i8
    u = "up"           : f32
    d = "down"         : f32
}
