scheme w8a16_asym(group: dim = k, act: type = bf16, zero_type: type = i8)
    "int8 weights with a zero point, per output channel or group along k; activations stay 16-bit."

# The files are those of compressed-tensors ("int-quantized") and of ModelSlim (W8A16).
weight {
    code  q[n, k]          : i8
    scale s[n, k // group] : f32
    zero  z[n, k // group] : zero_type
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
    s = (top - bottom) / 255
    z = min(i8) - bottom / s
    q = w / s + z
}

layout compressed_tensors {
    q = "weight"            : i8
    s = "weight_scale"      : f32
    z = "weight_zero_point" : zero_type
    b = "bias"              : act
}

layout modelslim {  # stores its offsets as f32: zero_type = f32 reads them
    q = "weight"        : i8
    s = "weight_scale"  : f32
    z = "weight_offset" : zero_type
    b = "bias"          : act
}
