scheme w4a4_flatquant(act: type = bf16)
    "int4 x int4 per token, after x, seen as a matrix, is multiplied from both sides."

# Sun et al., FlatQuant: Flatness Matters for LLM Quantization (2024).  The weight has the inverse in it already.
weight {
    code  q[n, k] : i4
    scale s[n]    : f32
    w ~ q * s
}

activation {
    param left[i, c]  : f32
    param right[j, d] : f32
    param clip[]      : f32
    transform x[m, (c d)] = sum(left[i, c] * x[m, (i j)] * right[j, d])
    scale t[m]    : f32 = clip * amax(abs(x)) / 7
    code  a[m, k] : i4  = x / t
    x ~ a * t
}

compute i4 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout modelslim {  # W4A4_FLATQUANT_DYNAMIC: one code a byte
    q     = "weight"             : i8
    s[n]  = "weight_scale"[n, 1] : f32
    left  = "left_trans"         : f32
    right = "right_trans"        : f32
    clip  = "clip_ratio"         : f32
    b     = "bias"               : act
}
