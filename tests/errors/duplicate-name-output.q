scheme duplicate_name_output

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ q * s
}

compute f16 -> f32
output f16 {
    s = acc
    y = s
}
