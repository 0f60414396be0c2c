"""int4 codes as operands, of a group's scale and zero: i8((q - zero) * scale), in integers.

Two inputs at a time, as numbers of 16 bits, which hold every product, and are cut off at what a byte holds.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.primitives import word
from qdsl.codegen.simd.state import State, for_features, local, ramp
from qdsl.codegen.tir import i64

PAIRS = f"int16x{2 * LANES}"
BELOW = 8  # of codes with a sign, by which they lie above themselves once it is flipped


class Rescaling:
    """The scales and zeros of a block's features, and operands made with them."""

    def __init__(self, s: State, block: tirx.Expr):
        self.s, self.block = s, block
        self.signed = s.plan.scheme.code.dtype.kind == "int"
        self.scale, self.shift = local((FEATURES,), "uint32"), local((FEATURES,), "uint32")

    def begin(self, start: tirx.Expr) -> None:
        """Of the group that input `start` is in."""
        scale, zero = self.s.blocked.rescaled

        def number(name: str, v: tirx.Expr) -> tirx.Expr:  # what is laid out in blocks holds zeros beyond n
            at = {"n": self.block * i64(FEATURES) + v, "k": start}
            return T.cast(self.s.own.element(name, at), "int32")

        def both(value: tirx.Expr) -> tirx.Expr:
            return T.cast(value & tirx.const(0xFFFF, "int32"), "uint32") * tirx.const(0x10001, "uint32")

        def shift(v: tirx.Expr) -> tirx.Expr:
            lowest = tirx.const(BELOW if self.signed else 0, "int32")
            return -(number(zero, v) + lowest if zero else lowest) * number(scale, v)

        for_features(lambda v: store(self.scale, both(number(scale, v)), v))
        for_features(lambda v: store(self.shift, both(shift(v)), v))

    def operands(self, words: tirx.Expr, u: int) -> list[tirx.Expr]:
        """The vectors (int32x16) of operands of a vector of words (uint32x16), by rising k."""
        b, at = self.s.blocked, ramp(u * LANES)
        scale, shift = (T.reinterpret(PAIRS, held[at]) for held in (self.scale, self.shift))
        least, most = (tirx.Broadcast(tirx.const(value, "int16"), 2 * LANES) for value in (-128, 127))
        if self.signed:
            words = words ^ word(0x88888888)

        def scaled(by: int) -> tirx.Expr:
            codes = (words >> word(by) if by else words) & word(0x000F000F)
            product = T.reinterpret(PAIRS, codes) * scale + shift
            return T.reinterpret("uint32x16", T.max(T.min(product, most), least))

        found = []
        for q in range(b.inputs // b.depth):
            value = scaled(4 * q)
            if b.depth == 4:  # bytes, each `offset` above itself
                upper = scaled(4 * q + 8) << word(8)
                value = ((value & word(0x00FF00FF)) | (upper & word(0xFF00FF00))) ^ word(0x80808080)
            found.append(primitives.bits(value))
        return found
