scheme duplicate_block_phases

weight {
    code q[n, k] : i8
    w ~ q
}

compute i8 -> i32
output f16

activation prefill {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}
activation prefill {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}
