"""How a 4-bit code becomes a weight, and the 16-bit float types that do it with bit tricks."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Half:
    """What the main loop needs to know about a 16-bit float type.

    A nibble or-ed into the bits of `bias` is the number bias + q. If the mantissa is wide enough, the nibble
    above is taken without a shift, as bias + 16 q: `wide` is 16 then, otherwise 1.
    """

    ptx: str
    one: int  # bits of 1.0
    magic: int  # bits of `bias`
    bias: int
    wide: int


HALVES = {
    "float16": Half("f16", 0x3C00, 0x6400, 1024, 16),
    "bfloat16": Half("bf16", 0x3F80, 0x4300, 128, 1),
}


@dataclass(frozen=True)
class Weight:
    """How a code becomes a weight: w = (q - bias - zero) * scale, one scale and zero per group along k."""

    compute: str  # "float16" or "bfloat16": type of x and of the multiplier
    bias: int  # constant zero point; 8 for symmetric u4, 0 if there is none
    zero: str | None  # type of the loaded zero: "u4" (two in a byte) or a float; None: there is none
    scale: str | None  # type of the loaded scale; None: there is none, or the epilogue applies it
    group: int | None  # extent of a group: 16, 32 or a multiple of 64; None: all of K is one group
    signed: bool  # codes are two's complement

    def __post_init__(self):
        assert self.compute in HALVES, f"no 16-bit multiplier for {self.compute}"
        assert self.zero in (None, "u4", *BYTES) and self.scale in (None, *BYTES), self
        assert self.group is None or self.group in (16, 32) or self.group % 64 == 0, f"group {self.group}"
        assert 0 <= self.offset <= 48, f"bias {self.bias} leaves the exact range of the bit trick"

    @property
    def half(self) -> Half:
        return HALVES[self.compute]

    @property
    def offset(self) -> int:
        """The constant zero point of a nibble read as unsigned. Flipping bit 3 of an i4 code adds 8 to it."""
        return self.bias + 8 * self.signed

    @property
    def arithmetic(self) -> str:
        """How q - zero, which is exact, becomes a finished weight, rounded once.

        packed  in pairs of 16 bits, times a scale of that type
        split   the same with an f16 scale in bf16: as the sum of two bf16 numbers, which it is exactly. The lower has
                3 bits, q - zero no more than 5, so their product is exact, too, and is added before the one rounding
        floats  in float32
        """
        if self.zero not in (None, "u4"):
            return "floats"
        if self.scale in (None, self.compute):
            return "packed"
        small = self.offset + 15 * (self.zero is not None) < 32
        return "split" if (self.compute, self.scale) == ("bfloat16", "float16") and small else "floats"

    def factor(self, register: int) -> int:
        """What q is multiplied by in a register of the A fragment (see Half)."""
        return self.half.wide if register % 2 else 1

    @property
    def grouped(self) -> dict[str, str]:
        """The types of what is loaded per group, by role."""
        return {role: dtype for role, dtype in (("scale", self.scale), ("zero", self.zero)) if dtype}
