scheme missing_block_activation

weight {
    code q[n, k] : i8
    w ~ q
}

compute i8 -> i32
output f16
