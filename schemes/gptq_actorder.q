scheme gptq_actorder(bits: int = 4, group: dim = 128, act: type = f16)
    "GPTQ with act-order: each input channel names its own group."

weight {
    code  q[n, k] : u(bits)
    index g[k]    : idx(k // group)
    scale s[n, g] : f16
    zero  z[n, g] : u(bits)
    w ~ (q - z) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout gptq_v1 {
    q[n, (r l:32)] = "qweight"[r {l}, n]    : i32
    z[(c l:32), j] = "qzeros"[j, c {l}] + 1 : i32
    s[n, j]        = "scales"[j, n]         : f16
    g              = "g_idx"                : i32
    b              = "bias"                 : act
}

layout gptq_v2 {
    q[n, (r l:32)] = "qweight"[r {l}, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}]  : i32
    s[n, j]        = "scales"[j, n]      : f16
    g              = "g_idx"             : i32
    b              = "bias"              : act
}
