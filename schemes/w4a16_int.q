scheme w4a16_int(act: type = f32, group: dim = 128, scale_type: type = f16)
    "AWQ's 4-bit weights by 16-bit integers that x is quantized to at run time, group by group."

# x in float32 takes three products of bfloat16, or two of int8.  Codes end at 127 * 256 + 127, two signed bytes; what is left of
# a number of x is at most 1 / 65278 of the largest in its group.
weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : scale_type
    zero  z[n, k // group] : u4
    w ~ (q - z) * s
}

activation {
    scale t[m, k // group] : f32 = amax(abs(x)) / 32639
    code  a[m, k]          : i16 = min(x / t, 32639)
    x ~ a * t
}

compute i16 -> i32

output act {
    bias b[n] : act optional
    y = acc + b
}

quantize {
    top = max(amax(w), 0)
    bottom = min(amin(w), 0)
    s = (top - bottom) / 15
    z = -bottom / s
    q = w / s + z
}

layout autoawq {
    q[(c l), k] = "qweight"[k, c {l: 0 2 4 6 1 3 5 7}] : i32
    z[(c l), g] = "qzeros"[g, c {l: 0 2 4 6 1 3 5 7}]  : i32
    s[n, g]     = "scales"[g, n]                       : scale_type
    b           = "bias"                               : act
}

layout autoawq_gemv {  # codes lie along k, groups padded to whole words
    q[n, (r l:8)] = "qweight"[n, r {l}] : i32
    z[n, (g l:8)] = "qzeros"[n, g {l}]  : i32
    s[n, g]       = "scales"[n, g]      : scale_type
    b             = "bias"              : act
}
