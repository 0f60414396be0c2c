scheme residual(act: type = f32)
    "4-bit weights with a residual in every call."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    w ~ (q - 8) * s
}

compute act -> f32

output act {
    bias     b[n]    : act optional
    residual r[m, n] : act
    y = gelu(acc + b) + r
}
