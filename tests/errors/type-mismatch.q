scheme type_mismatch

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q = "weight" : f16
}
