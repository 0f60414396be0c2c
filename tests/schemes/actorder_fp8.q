scheme actorder_fp8
    "8-bit floats by 8-bit floats, the weight's scale in a group that each input names."

weight {
    code  q[n, k] : e4m3
    index g[k]    : idx(k // 32)
    scale s[n, g] : f32
    w ~ q * s
}

activation {
    scale t[m, k // 64] : f32  = amax(abs(x)) / 448
    code  a[m, k]       : e4m3 = x / t
    x ~ a * t
}

compute e4m3 -> f32
output bf16
