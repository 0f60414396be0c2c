scheme misplaced_declaration

weight {
    code  q[n, k] : u4
    bias  b[n]    : f16
    w ~ q + b
}

compute f16 -> f32
output f16
