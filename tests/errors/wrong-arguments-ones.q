scheme wrong_arguments_ones

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[n, (b l:8)] = words("weight" + ones(3))[n, b {l}] : i32
}
