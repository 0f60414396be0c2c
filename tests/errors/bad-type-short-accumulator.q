scheme bad_type_short_accumulator

weight {
    code q[n, k] : u4
    w ~ q
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i16
output f32
