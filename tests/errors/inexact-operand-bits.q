scheme inexact_operand_bits

weight {
    code  q[n, k] : u8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    code  a[m, k] : e4m3 = x
    x ~ a
}

compute e4m3 -> f32
output f16
