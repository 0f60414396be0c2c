scheme duplicate_name

weight {
    code  q[n, k] : u4
    scale q[n]    : f16
    w ~ q
}

compute f16 -> f32
output f16
