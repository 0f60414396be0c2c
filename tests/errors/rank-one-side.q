scheme rank_one_side

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, k] = "weight" : u8
}
