scheme missing_block

weight {
    code q[n, k] : u4
    w ~ q
}
