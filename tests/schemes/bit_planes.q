scheme bit_planes(act: type = f16)
    "5-bit codes in two planes, low four bits and top bit, as GGUF Q5_0 and planar GPTQ store them."

weight {
    code  q[n, k]       : u5
    scale s[n, k // 32] : f16
    w ~ (q - 16) * s
}

compute act -> f32
output act

quantize {
    s = amax(abs(w)) / 15
    q = w / s + 16
}

layout planar {
    q[n, (r l:32)] = "qweight"[r {l}.0:4 {l}.4:1, n] : i32
    s[n, g]        = "scales"[g, n]                  : f16
}

layout top_bit_first {  # the planes order their lanes differently
    q[n, (r h:2 j:16)] = "weight"[n, r {h j}.4:1 {j h}.0:4] : u32
    s                  = "scale"                            : f16
}
