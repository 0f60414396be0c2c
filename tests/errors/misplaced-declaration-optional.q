scheme misplaced_declaration_optional

weight {
    code  q[n, k] : u4
    scale s[n]    : f16 optional
    w ~ q * s
}

compute f16 -> f32
output f16
