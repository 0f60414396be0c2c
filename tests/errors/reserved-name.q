scheme reserved_name

weight {
    code k[n, k] : u4
    w ~ k
}

compute f16 -> f32
output f16
