scheme code_book(act: type = f16)
    "Twenty-four values that no formula gives, chosen by 5-bit codes."

weight {
    code  q[n, k]       : u5
    scale s[n, k // 64] : f16
    table c[24]         : f16 = {
        -3.0, -2.5, -2.0, -1.75, -1.5, -1.25, -1.0, -0.75, -0.5, -0.375, -0.25,
        -0.125, 0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0
    }
    w ~ c[q] * s
}

compute act -> f32
output act

layout dense {
    q[n, (r l:32)] = "codes"[n, r {l}] : u32
    s              = "scale"           : f16
}
