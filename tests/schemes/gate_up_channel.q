scheme gate_up_channel(act: type = f16, group: dim = 32)
    "Gate and up projections in one weight of int4 codes; the activation function is part of the layer."

weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : f16
    zero  z[n, k // group] : u4
    scale t[n]             : f32
    w ~ (q - z) * s * t
}

compute act -> f32

output act {
    half n = (r:2 j)
    y[m, j] = silu(acc[r = 0]) * acc[r = 1]
}
