scheme rotated(act: type = bf16)
    "16-bit activations that are rotated, with a matrix that serves twice."

weight {
    code  q[n, k]       : u4
    scale s[n, k // 16] : f16
    w ~ (q - 8) * s
}

activation {
    param h[i, j] : act
    transform x[m, (a b)] = sum(x[m, (i j)] * h[i, a] * h[j, b])
    x ~ x
}

compute act -> f32

output act {
    bias b[n] : f32 optional
    y = acc + b
}

layout plain {
    q[n, (b l:2)] = "weight"[n, b {l}] : u8
    s             = "scales"           : f16
    h             = "rotation"         : act
}
