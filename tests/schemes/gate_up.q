scheme gate_up(act: type = f16)
    "Gate and up projections in one weight; the layer returns their product."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 64] : f16
    w ~ (q - 8) * s
}

compute act -> f32

output act {
    half n = (r:2 j)
    y[m, j] = silu(acc[r = 0]) * acc[r = 1]
}

quantize {
    s = amax(abs(w)) / 7
    q = w / s + 8
}

layout stacked {
    q[n, (b l:8)] = "weight_packed"[n, b {l}] : i32
    s             = "weight_scale"            : f16
}
