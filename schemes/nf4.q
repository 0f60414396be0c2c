scheme nf4(act: type = f16, group: dim = 64)
    "bitsandbytes NF4: a 16-entry codebook, one absmax per group of weights."

# Dettmers et al., QLoRA (2023), appendix E; the table is bitsandbytes' own, in f32.  Its absmax may be quantized again,
# in runs of 256 that take no notice of rows; whoever reads such a file decodes the absmax first, as bitsandbytes does.
weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : f32
    table c[16]            : f32 = {
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0
    }
    w ~ c[q] * s
}

compute act -> f32

output act {
    bias b[n] : act optional
    y = acc + b
}

layout bitsandbytes {
    q[n, (b l)] = "weight"[n b {l: 1 0}, 1] : u8  # first element in the high nibble
    s[n, g]     = "weight.absmax"[n g]      : f32
    b           = "bias"                    : act
}
