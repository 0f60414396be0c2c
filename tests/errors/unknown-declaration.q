scheme unknown_declaration

weight {
    code   q[n, k] : u4
    scales s[n]    : f16
    w ~ q * s
}

compute f16 -> f32
output f16
