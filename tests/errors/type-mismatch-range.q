scheme type_mismatch_range

weight {
    code  q[n, k] : u4
    scale s[n]    : f16
    w ~ q * s
}

compute f16 -> f32
output f16

layout mine {
    q = "weight" : u8
    s = "scales" : bf16
}
