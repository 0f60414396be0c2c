scheme unknown_name

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ (q - z) * s
}

compute f16 -> f32
output f16
