scheme misplaced_reduction

weight {
    code q[n, k] : u4
    w ~ q / amax(q)
}

compute f16 -> f32
output f16
