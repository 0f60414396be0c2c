scheme epilogue(act: type = f32)
    "4-bit weights with everything in the epilogue."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    w ~ (q - 8) * s
}

compute act -> f32

output act {
    bias     b[n]    : act optional
    residual r[m, n] : act optional
    y = gelu(acc + b) + r
}
