scheme w4a8(act: type = f16, group: dim = 128)
    "QServe-style: int4 rescaled to int8 per group, then one float scale per channel."

# Lin et al., QServe: W4A8KV4 Quantization and System Co-design (2024).
weight {
    code  q[n, k]          : u4
    zero  z[n, k // group] : u4
    scale r[n, k // group] : i8   # level 2: integer, per group
    scale s[n]             : f32  # level 1: float, per channel
    w ~ i8((q - z) * r) * s       # the cast is where rounding happens
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output act

layout plain {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    z             = "zeros"            : u8
    r             = "group_scale"      : i8
    s             = "scale"            : f32
}
