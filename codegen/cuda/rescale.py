"""int4 codes as bytes, of a group's scale and zero: i8((q - zero) * scale), in integers.

Lin et al., QServe (2024): int4 weights are int8 weights that a group has rescaled. Two products are in a register, as numbers
of 16 bits that are never negative:

    word >> 4 r          & 0x000F000F    codes 0 and 2 of feature c + 8 r      * scale + (BIAS - zero * scale) * 0x10001
    word >> 4 r >> 8     & 0x000F000F    codes 1 and 3

and are cut off at what a byte holds, BIAS away, as the positive float16 that have their bits: these have the same order.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx
from qdsl.codegen.cuda.correct import integers, load_groups
from qdsl.codegen.cuda.kernel import Kernel

BIAS = 4096  # more than any product, and no byte of its own in the lower eight bits


class Rescaling:
    """The scales and zeros of the features of a warp, and bytes made with them."""

    def __init__(self, k: Kernel):
        self.k, self.weight = k, k.weight
        size = 2 * k.tile.feature_tiles  # features c and c + 8 of every feature tile
        self.scale, self.shift = T.alloc_local([size], "uint32"), T.alloc_local([size], "uint32")

    def begin(self, views, slot, step) -> None:
        """Of a step, in which a group's are the same."""
        lowest = 8 if self.weight.code.kind == "int" else 0  # of which codes count from
        for f in range(self.k.tile.feature_tiles):
            words = load_groups(self.k, views, slot, f, step)
            scales = integers(self.weight.scale, words["scale"])
            zeros = integers(self.weight.zero, words["zero"]) if self.weight.zero else [T.uint32(0)] * 2
            for r in range(2):
                scale, zero = T.cast(scales[r], "uint32"), T.cast(zeros[r], "uint32") + T.uint32(lowest)
                assign(self.scale, 2 * f + r, scale)
                assign(self.shift, 2 * f + r, (T.uint32(BIAS) - zero * scale) * T.uint32(0x10001))

    def bytes(self, word, f: int, r: int, out) -> None:
        """out = four bytes of feature c + 8 r of feature tile f, out of a word that has those of c as well."""
        both = T.alloc_local([2], "uint32")
        if self.weight.code.kind == "int":
            word = word ^ T.uint32(0x88888888)
        for odd in range(2):
            moved = word >> T.uint32(8 * odd + 4 * r) if odd or r else word
            scaled = (moved & T.uint32(0x000F000F)) * self.scale[2 * f + r] + self.shift[2 * f + r]
            assign(both, odd, scaled)
            ptx("max.f16x2", both[odd], both[odd], T.uint32((BIAS - 128) * 0x10001))
            ptx("min.f16x2", both[odd], both[odd], T.uint32((BIAS + 127) * 0x10001))
        ptx("prmt.b32", out, both[0], both[1], T.uint32(0x6240))
