scheme float_zero(act: type = f16)
    "HQQ: the zero point is a float, so it is no part of the exact core."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 64] : f16
    zero  z[n, k // 64] : f16
    w ~ (q - z) * s
}

compute act -> f32
output act

layout halves {  # the first half of the rows in the high nibbles
    q[(h r), k] = "W_q"[r {h: 1 0}, k] : u8
    s[n, g]     = "scale"[n g, 1]      : f16
    z[n, g]     = "zero"[n g, 1]       : f16
}
