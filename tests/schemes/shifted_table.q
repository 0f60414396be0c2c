scheme shifted_table
    "A table read at the sum of code and zero, and a loaded table."

weight {
    code  q[n, k]       : u3
    scale s[n, k // 32] : f16
    zero  z[n, k // 32] : u2
    table c[9]          : f32 = { -4.0, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0 }
    table d[8]          : f16
    w ~ (c[q + z] + d[q]) * s
}

compute f16 -> f32
output f16

layout plain {
    q[n, (b l:8)] = "q"[n, b {l}] : u8
    s             = "s"           : f16
    z             = "z"           : u8
    d             = "d"           : f16
}
