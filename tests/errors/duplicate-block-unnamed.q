scheme duplicate_block_unnamed

weight {
    code q[n, k] : i8
    w ~ q
}

compute i8 -> i32
output f16

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}
activation decode {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}
