scheme wrong_left_side_output

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    z = acc
}
