scheme ragged(group: dim = 48, act: type = f16)
    "Sizes that no group, word or block divides: the last of each is short."

weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : f16
    scale u[n // 20]       : f32
    w ~ (q - 8) * s * u
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    u = amax(abs(w)) / 7
    s = amax(abs(w)) / (7 * u)
    q = w / (s * u) + 8
}

layout words {
    q[n, (r l:8)] = "codes"[n, r {l}] : i32
    s             = "scale"           : f16
    u             = "row_scale"       : f32
    b             = "bias"            : act
}
