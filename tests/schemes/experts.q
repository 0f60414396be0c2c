scheme experts(act: type = f16)
    "A stack of experts: e is an index like the others, and a stored name may hold it."

weight {
    code  q[e, n, k]        : u4
    scale s[e, n, k // 128] : f16
    w ~ (q - 8) * s
}

compute act -> f32
output act

quantize {
    s = amax(abs(w)) / 7
    q = w / s + 8
}

layout one_file_name_each {
    q[n, (r l:8)] = "experts.{e}.up_proj.qweight"[r {l}, n] : i32
    s[n, g]       = "experts.{e}.up_proj.scales"[g, n]      : f16
}

layout stacked {
    q[e, n, (b l:2)] = "w13_weight"[e, n, b {l}] : u8
    s                = "w13_weight_scale"        : f16
}
