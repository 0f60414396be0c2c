scheme bad_extent_literal

weight {
    code  q[n, k]         : u4
    table c[1000000000] : f16
    w ~ c[q]
}

compute f16 -> f32
output f16
