scheme gptq_sym(bits: int = 4, group: dim = 128, act: type = f16)
    "Symmetric GPTQ without act-order: 2, 3, 4 or 8 bits around the middle code."

weight {
    code  q[n, k]          : u(bits)
    scale s[n, k // group] : f16
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
    s[n, g]        = "scales"[g, n]      : f16
    b              = "bias"              : act
}

layout pack_quantized {  # compressed-tensors: offset binary along k
    q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32
    s              = "weight_scale"            : f16
    b              = "bias"                    : act
}
