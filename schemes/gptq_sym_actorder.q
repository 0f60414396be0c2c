scheme gptq_sym_actorder(bits: int = 4, group: dim = 128, act: type = f16, scale_type: type = f16)
    "Symmetric GPTQ with act-order: each input channel names its own group, codes around the middle one."

# Frantar et al., GPTQ (2022), and its act-order option.
weight {
    code  q[n, k] : u(bits)
    index g[k]    : idx(k // group)
    scale s[n, g] : scale_type
    w ~ (q - exp2(bits - 1)) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / (exp2(bits - 1) - 1)
    q = w / s + exp2(bits - 1)
}

layout gptq {  # the stored zeros are the constant and are not read
    q[n, (r l:32)] = "qweight"[r {l}, n] : i32
    s[n, j]        = "scales"[j, n]      : scale_type
    g              = "g_idx"             : i32
    b              = "bias"              : act
}

layout pack_quantized {  # compressed-tensors with actorder "group"
    q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32
    s              = "weight_scale"            : scale_type
    g              = "weight_g_idx"            : i32
    b              = "bias"                    : act
}
