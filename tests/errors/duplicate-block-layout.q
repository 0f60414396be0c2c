scheme duplicate_block_layout

weight {
    code q[n, k] : u4
    w ~ q
}

compute f16 -> f32
output f16

layout mine {
    q = "weight" : u8
}
layout mine {
    q = "qweight" : u8
}
