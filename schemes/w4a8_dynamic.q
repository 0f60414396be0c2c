scheme w4a8_dynamic(act: type = bf16)
    "int4 weights per channel by int8 activations, quantized per token at run time."

weight {
    code  q[n, k] : i4
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    s = amax(abs(w)) / 7
    q = w / s
}

layout modelslim {  # W4A8_DYNAMIC: two rows in a byte
    q[(r l:2), k] = "weight"[r {l}, k]   : i8
    s[n]          = "weight_scale"[n, 1] : f32
    b             = "bias"               : act
}

layout compressed_tensors {  # one code a byte; ModelSlim's W4A8_DYNAMIC before "1.0.0" is the same
    q    = "weight"             : i8
    s[n] = "weight_scale"[n, 1] : f32
    b    = "bias"               : act
}
