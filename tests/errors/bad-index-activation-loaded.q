scheme bad_index_activation_loaded

weight {
    code q[n, k] : i8
    w ~ q
}

activation {
    scale u[kk]   : f32
    code  a[m, k] : i8 = x / u
    x ~ a * u
}

compute i8 -> i32
output f16
