scheme nvfp4(act: type = bf16)
    "NVFP4 x NVFP4: e2m1 in blocks of 16, e4m3 block scale, f32 tensor scale."

weight {
    code  q[n, k]       : e2m1
    scale s[n, k // 16] : e4m3
    scale u[]           : f32
    w ~ q * s * u
}

activation {
    scale v[]           : f32
    scale t[m, k // 16] : e4m3 = amax(abs(x)) / (6 * v)
    code  a[m, k]       : e2m1 = x / (t * v)
    x ~ a * t * v
}

compute e2m1 -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout modelopt {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "weight_scale"     : e4m3
    u             = "weight_scale_2"   : f32
    v             = "input_scale"      : f32
    b             = "bias"             : act
}

layout compressed_tensors {  # stores reciprocals; say so once, here
    q[n, (b l:2)] = "weight_packed"[n, b {l}] : u8
    s             = "weight_scale"            : e4m3
    u             = 1 / "weight_global_scale" : f32
    v             = 1 / "input_global_scale"  : f32
    b             = "bias"                    : act
}
