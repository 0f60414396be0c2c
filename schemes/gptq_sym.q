scheme gptq_sym(bits: int = 4, group: dim = 128, act: type = f16, scale_type: type = f16)
    "Symmetric GPTQ without act-order: 2, 3, 4 or 8 bits around the middle code."

# Frantar et al., GPTQ (2022).  The bits of compressed-tensors' odd widths are those of its versions from 0.12 on in
# `pack_quantized`, of the earlier ones in `pack_quantized_padded`.
weight {
    code  q[n, k]          : u(bits)
    scale s[n, k // group] : scale_type
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
    s[n, g]        = "scales"[g, n]      : scale_type
    b              = "bias"              : act
}

layout pack_quantized {  # compressed-tensors: offset binary along k
    q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32
    s              = "weight_scale"            : scale_type
    b              = "bias"                    : act
}

layout pack_quantized_padded when bits == 3 {
    q[n, (r l:10)] = "weight_packed"[n, r {l pad 2}] : i32
    s              = "weight_scale"                  : scale_type
    b              = "bias"                          : act
}

layout pack_quantized_padded when bits == 5 {
    q[n, (r l:6)] = "weight_packed"[n, r {l pad 2}] : i32
    s             = "weight_scale"                  : scale_type
    b             = "bias"                          : act
}

layout pack_quantized_padded when bits == 6 {
    q[n, (r l:5)] = "weight_packed"[n, r {l pad 2}] : i32
    s             = "weight_scale"                  : scale_type
    b             = "bias"                          : act
}

layout pack_quantized_padded when bits == 7 {
    q[n, (r l:4)] = "weight_packed"[n, r {l pad 4}] : i32
    s             = "weight_scale"                  : scale_type
    b             = "bias"                          : act
}

layout int_quantized {  # compressed-tensors again: signed codes, one in each byte
    q = "weight" + exp2(bits - 1) : i8
    s = "weight_scale"            : scale_type
    b = "bias"                    : act
}
