scheme bad_type_loaded_code

weight {
    code q[n, k] : i16
    w ~ q
}

compute f32 -> f32
output f32
