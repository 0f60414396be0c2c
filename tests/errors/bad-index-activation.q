scheme bad_index_activation

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    scale t[m]     : f32 = amax(abs(x)) / 127
    scale v[m, kk] : f32 = amax(abs(x))
    scale r[n]     : f32
    code  a[m]     : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output f16
