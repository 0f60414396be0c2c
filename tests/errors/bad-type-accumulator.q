scheme bad_type_accumulator

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> i8
output f16
