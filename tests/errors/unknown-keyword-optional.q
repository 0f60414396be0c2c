scheme unknown_keyword_optional

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16 {
    bias b[n] : f16 optionl
    y = acc + b
}
