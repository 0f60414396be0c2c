scheme duplicate_name_block

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    scale t[] : f32
    scale t[] : f32
    code  a[m, k] : i8 = x / t
    x ~ a * t
}

compute i8 -> i32
output f16
