scheme inexact_operand

weight {
    code  q[n, k] : u8
    zero  z[n, k] : u8
    scale s[n]    : f32
    w ~ (q - z) * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output f16
