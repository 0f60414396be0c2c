scheme gptq(bits: int = 4, group: dim = 128, act: type = f16, scale_type: type = f16)
    "GPTQ without act-order: 2, 3, 4, 5, 6, 7 or 8 bits, with a zero point per group."

# Frantar et al., GPTQ (2022).  The layouts are those of AutoGPTQ, which auto-round writes as well, of
# GPTQModel and of compressed-tensors.
weight {
    code  q[n, k]          : u(bits)
    scale s[n, k // group] : scale_type
    zero  z[n, k // group] : u(bits)
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
    z[(c l:32), g] = "qzeros"[g, c {l}] + 1 : i32
    s[n, g]        = "scales"[g, n]         : scale_type
    b              = "bias"                 : act
}

layout gptq_v2 {
    q[n, (r l:32)] = "qweight"[r {l}, n] : i32
    z[(c l:32), g] = "qzeros"[g, c {l}]  : i32
    s[n, g]        = "scales"[g, n]      : scale_type
    b              = "bias"              : act
}

layout gptqmodel_v1 when 32 % bits == 0 {  # GPTQModel shifts whole words, so borrows cross fields
    q[n, (r l:32)] = "qweight"[r {l}, n]                    : i32
    z[(c l:32), g] = words("qzeros" + ones(bits))[g, c {l}] : i32
    s[n, g]        = "scales"[g, n]                         : scale_type
    b              = "bias"                                 : act
}

layout gptq_planar when bits == 3 {  # GPTQModel 7: bit planes of powers of two
    q[n, (r l:32)] = "qweight"[r {l}.0:2 {l}.2:1, n] : i32
    z[(c l:32), g] = "qzeros"[g, c {l}.0:2 {l}.2:1]  : i32
    s[n, g]        = "scales"[g, n]                  : scale_type
    b              = "bias"                          : act
}

layout gptq_planar when bits == 5 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:1, n] : i32
    z[(c l:32), g] = "qzeros"[g, c {l}.0:4 {l}.4:1]  : i32
    s[n, g]        = "scales"[g, n]                  : scale_type
    b              = "bias"                          : act
}

layout gptq_planar when bits == 6 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:2, n] : i32
    z[(c l:32), g] = "qzeros"[g, c {l}.0:4 {l}.4:2]  : i32
    s[n, g]        = "scales"[g, n]                  : scale_type
    b              = "bias"                          : act
}

layout gptq_planar when bits == 7 {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:2 {l}.6:1, n] : i32
    z[(c l:32), g] = "qzeros"[g, c {l}.0:4 {l}.4:2 {l}.6:1]  : i32
    s[n, g]        = "scales"[g, n]                          : scale_type
    b              = "bias"                                  : act
}

layout pack_quantized {  # compressed-tensors: codes along k, zeros along n; both are offset by the same
    q[n, (r l:32)] = "weight_packed"[n, r {l}]     : i32
    z[(c l:32), g] = "weight_zero_point"[c {l}, g] : i32
    s              = "weight_scale"                : scale_type
    b              = "bias"                        : act
}
