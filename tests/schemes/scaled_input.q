scheme scaled_input
    "Weight-only with a loaded factor for every input, and a residual in the epilogue."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 32] : f16
    w ~ (q - 8) * s
}

activation {
    param v[k] : f32
    x ~ x * v
}

compute f32 -> f32

output f32 {
    bias     b[n]    : f32 optional
    residual r[m, n] : f32 optional
    y = relu(acc + b) + r
}

layout plain {
    q[n, (b l:2)] = "q"[n, b {l}] : u8
    s             = "s"           : f16
    v             = "v"           : f32
    b             = "bias"        : f32
}
