scheme bad_convention_not_invertible

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q = "weight" // 2 : u8
}
