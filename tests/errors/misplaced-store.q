scheme misplaced_store

weight {
    code q[n, k] : u4
    w ~ q * "scales"
}

compute f16 -> f32
output f16
