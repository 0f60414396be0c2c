scheme gptq_actorder(bits: int = 4, group: dim = 128, act: type = f16, scale_type: type = f16)
    "GPTQ with act-order: each input channel names its own group."

# Frantar et al., GPTQ (2022), and its act-order option.  The layouts are those of `gptq` and the groups' names.
weight {
    code  q[n, k] : u(bits)
    index g[k]    : idx(k // group)
    scale s[n, g] : scale_type
    zero  z[n, g] : u(bits)
    w ~ (q - z) * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    top = max(amax(w), 0)
    bottom = min(amin(w), 0)
    s = (top - bottom) / (exp2(bits) - 1)
    z = -bottom / s
    q = w / s + z
}

layout gptq_v1 {  # AutoGPTQ stores zero - 1, field by field
    q[n, (r l:32)] = "qweight"[r {l}, n]    : i32
    z[(c l:32), j] = "qzeros"[j, c {l}] + 1 : i32
    s[n, j]        = "scales"[j, n]         : scale_type
    g              = "g_idx"                : i32
    b              = "bias"                 : act
}

layout gptq_v2 {
    q[n, (r l:32)] = "qweight"[r {l}, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}]  : i32
    s[n, j]        = "scales"[j, n]      : scale_type
    g              = "g_idx"             : i32
    b              = "bias"              : act
}

layout gptqmodel_v1 when 32 % bits == 0 {  # GPTQModel shifts whole words, so borrows cross fields
    q[n, (r l:32)] = "qweight"[r {l}, n]                    : i32
    z[(c l:32), j] = words("qzeros" + ones(bits))[j, c {l}] : i32
    s[n, j]        = "scales"[j, n]                         : scale_type
    g              = "g_idx"                                : i32
    b              = "bias"                                 : act
}

layout gptq_planar when bits == 3 {  # GPTQModel 7: bit planes of powers of two
    q[n, (r l:32)] = "qweight"[r {l}.0:2 {l}.2:1, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}.0:2 {l}.2:1]  : i32
    s[n, j]        = "scales"[j, n]                  : scale_type
    g              = "g_idx"                         : i32
    b              = "bias"                          : act
}

layout gptq_planar when bits == 5 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:1, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}.0:4 {l}.4:1]  : i32
    s[n, j]        = "scales"[j, n]                  : scale_type
    g              = "g_idx"                         : i32
    b              = "bias"                          : act
}

layout gptq_planar when bits == 6 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:2, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}.0:4 {l}.4:2]  : i32
    s[n, j]        = "scales"[j, n]                  : scale_type
    g              = "g_idx"                         : i32
    b              = "bias"                          : act
}

layout gptq_planar when bits == 7 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:2 {l}.6:1, n] : i32
    z[(c l:32), j] = "qzeros"[j, c {l}.0:4 {l}.4:2 {l}.6:1]  : i32
    s[n, j]        = "scales"[j, n]                          : scale_type
    g              = "g_idx"                                 : i32
    b              = "bias"                                  : act
}

layout pack_quantized {  # compressed-tensors: codes along k, zeros along n; both are offset by the same
    q[n, (r l:32)] = "weight_packed"[n, r {l}]     : i32
    z[(c l:32), j] = "weight_zero_point"[c {l}, j] : i32
    s              = "weight_scale"                : scale_type
    g              = "weight_g_idx"                : i32
    b              = "bias"                        : act
}
