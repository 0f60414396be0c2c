scheme w8a16_group(group: dim = 128, act: type = bf16)
    "int8 weights, one scale per group along k; activations stay 16-bit."

# The files are those of compressed-tensors ("int-quantized"), of ModelSlim (W8A16, whose offsets are then zero), and,
# for group = k, of bitsandbytes (Dettmers et al., LLM.int8(), 2022), whose outliers are in the activations.
weight {
    code  q[n, k]          : i8
    scale s[n, k // group] : f32
    w ~ q * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 127
    q = w / s
}

layout compressed_tensors {
    q = "weight"       : i8
    s = "weight_scale" : f32
    b = "bias"         : act
}

layout bitsandbytes {  # stores the largest magnitude of a row
    q       = "weight"         : i8
    s[n, g] = "SCB"[n g] / 127 : f32
    b       = "bias"           : act
}
