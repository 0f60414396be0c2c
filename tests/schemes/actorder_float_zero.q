scheme actorder_float_zero(act: type = f16)
    "5-bit codes and float zero points in groups that each input names."

weight {
    code  q[n, k] : u5
    index g[k]    : idx(k // 48)
    scale s[n, g] : f16
    zero  z[n, g] : f16
    w ~ (q - z) * s
}

compute act -> f32
output act
