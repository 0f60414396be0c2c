scheme word_size_element

weight {
    code  q[n, k]        : u4
    scale s[n, k // 128] : f16
    w ~ q * s
}

compute f16 -> f32
output f16

layout mine {
    q = "weight" : u8
    s[n, (g l:1)] = "scales"[n, g {l}] : u8
}
