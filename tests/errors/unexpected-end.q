scheme unexpected_end

weight {
    code q[n, k] : u4
    w ~ q
