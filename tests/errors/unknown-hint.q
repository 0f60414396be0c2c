scheme unknown_hint

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

schedule sm_80 {
    stage = 4
}
