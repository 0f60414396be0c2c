# params: bits=four
scheme bad_parameter_number(bits: int = 4, group: dim = 128, act: type = f16)

weight {
    code  q[n, k]          : u(bits)
    scale s[n, k // group] : act
    w ~ q * s
}

compute f16 -> f32
output f16
