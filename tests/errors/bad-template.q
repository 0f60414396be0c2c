scheme bad_template

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q = "experts.{e}.weight" : u8
}
