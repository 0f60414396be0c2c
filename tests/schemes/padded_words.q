scheme padded_words(bits: int = 3, act: type = f16)
    "Whole codes only in each word, the top bits unused, as old compressed-tensors files have odd widths."

weight {
    code  q[n, k]       : u(bits)
    scale s[n, k // 64] : f16
    w ~ (q - exp2(bits - 1)) * s
}

compute act -> f32
output act

quantize {
    s = amax(abs(w)) / (exp2(bits - 1) - 1)
    q = w / s + exp2(bits - 1)
}

layout padded when bits == 3 {
    q[n, (r l:10)] = "weight_packed"[n, r {l pad 2}] : i32
    s              = "weight_scale"                  : f16
}

layout padded when bits == 5 {
    q[n, (r l:6)] = "weight_packed"[n, r {l pad 2}] : i32
    s             = "weight_scale"                  : f16
}

layout dense {
    q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32
    s              = "weight_scale"            : f16
}
