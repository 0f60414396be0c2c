scheme duplicate_name_parameter(group: dim = 128, group: int = 3)

weight {
    code  q[n, k]  : u4
    scale group[n] : f16
    w ~ q * group
}

compute f16 -> f32
output f16
