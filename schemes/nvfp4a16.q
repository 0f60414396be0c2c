scheme nvfp4a16(act: type = bf16)
    "NVFP4 weights: e2m1 in blocks of 16, e4m3 block scale, f32 tensor scale; activations stay 16-bit."

# NVIDIA, Pretraining Large Language Models with NVFP4 (2025); files of ModelOpt and compressed-tensors.
weight {
    code  q[n, k]       : e2m1
    scale s[n, k // 16] : e4m3
    scale u[]           : f32
    w ~ q * s * u
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    u = amax(abs(w)) / (max(e2m1) * max(e4m3))
    s = amax(abs(w)) / (max(e2m1) * u)
    q = w / (s * u)
}

layout modelopt {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "weight_scale"     : e4m3
    u             = "weight_scale_2"   : f32
    b             = "bias"             : act
}

layout compressed_tensors {  # stores the reciprocal of the tensor scale
    q[n, (b l:2)] = "weight_packed"[n, b {l}] : u8
    s             = "weight_scale"            : e4m3
    u             = 1 / "weight_global_scale" : f32
    b             = "bias"                    : act
}
