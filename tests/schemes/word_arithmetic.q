scheme word_arithmetic(bits: int = 4, act: type = f16)
    "Zero points stored minus one: field by field, or on the whole word, where a borrow crosses fields."

weight {
    code  q[n, k]       : u(bits)
    scale s[n, k // 64] : f16
    zero  z[n, k // 64] : u(bits)
    w ~ (q - z) * s
}

compute act -> f32
output act

layout by_field {
    q[n, (r l:32)] = "qweight"[r {l}, n]    : i32
    z[(c l:32), g] = "qzeros"[g, c {l}] + 1 : i32
    s[n, g]        = "scales"[g, n]         : f16
}

layout by_word when 32 % bits == 0 {
    q[n, (r l:32)] = "qweight"[r {l}, n]                    : i32
    z[(c l:32), g] = words("qzeros" + ones(bits))[g, c {l}] : i32
    s[n, g]        = "scales"[g, n]                         : f16
}
