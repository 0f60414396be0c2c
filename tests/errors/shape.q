scheme shape

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q[(c l), k] = "qweight"[k, c {l: 0 2 4 6 1 3 5 7}] : i32
}
