scheme wrong_left_side

weight {
    code q[n, k] : u4
    x ~ q
}

compute f16 -> f32
output f16
