scheme digit_twice_left

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (n l:2)] = "weight"[n, {l}] : u8
}
