scheme bad_type_mixed

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> i32
output f16
