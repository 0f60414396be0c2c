scheme missing_code

weight {
    scale s[n] : f16
    w ~ s
}

compute f16 -> f32
output f16
