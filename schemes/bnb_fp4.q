scheme bnb_fp4(act: type = f16, group: dim = 64)
    "bitsandbytes FP4: a 16-entry codebook in the order of its bits, one absmax per group of weights."

# bitsandbytes, get_4bit_type("fp4"): sign, two bits of exponent, one of mantissa, as multiples of 1 / 192.  Not e2m1:
# the order of the exponents is another, and the smallest entry is far below the rest.
weight {
    code  q[n, k]          : u4
    scale s[n, k // group] : f32
    table c[16]            : f32 = {
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408,
        0.5, 0.1666666716337204, 0.25, 0.0, -0.0052083334885537624,
        -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204,
        -0.25
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
