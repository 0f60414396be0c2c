scheme gate_up_actorder(act: type = bf16, group: dim = 40)
    "Gate and up projections in one weight of 8-bit floats; inputs name their groups, and features share them in blocks."

weight {
    code  q[n, k]       : e4m3
    index g[k]          : idx(k // group)
    scale s[n // 24, g] : f32
    w ~ q * s
}

compute act -> f32

output act {
    half n = (r:2 j)
    y[m, j] = silu(acc[r = 0]) * acc[r = 1]
}
