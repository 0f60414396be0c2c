"""What a kernel needs to know of a weight: how its codes, scales and zeros are stored, and how they become a weight."""

from __future__ import annotations

from dataclasses import dataclass

from qdsl.codegen.cuda import decode
from qdsl.codegen.cuda.decode import HALVES, Decoded, Half
from qdsl.dtype import DType, dtype

U4 = dtype("u4")
INTEGERS = tuple(f"{sign}{bits}" for sign in "ui" for bits in range(1, 9))
NIBBLES = ("u4", "i4")  # two of them share a byte
FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "e4m3": 1, "e5m2": 1, "e8m0": 1}  # bytes
BYTES = {**FLOATS, **dict.fromkeys(INTEGERS, 1)}  # of a number by itself


@dataclass(frozen=True)
class Shared:
    """Which weights share a number: so many features, and so many inputs; None: all."""

    features: int | None
    inputs: int | None


@dataclass(frozen=True)
class Weight:
    """How a code becomes a weight: w = (q - bias - zero) * scale + offset, one of each per group along k.

    With a table, w = table[q] * scale + offset.
    """

    compute: str  # "float16" or "bfloat16": type of x and of the multiplier
    bias: int  # constant zero point; 8 for symmetric u4, 0 if there is none
    zero: str | None  # type of the loaded zero: "u1" .. "u8", "i1" .. "i8", or a float; None: there is none
    scale: str | None  # type of the loaded scale; None: there is none, or the epilogue applies it
    group: int | None  # extent of a group: a multiple of 16; None: all of K is one group
    code: DType = U4
    table: tuple[float, ...] = ()  # what the codes stand for, if not for themselves; in float32
    offset: str | None = None  # type of the loaded offset, a float; None: there is none
    subtract: bool = False  # the offset is taken off
    shared: tuple[tuple[str, Shared], ...] = ()  # roles whose numbers features share, or that have other groups

    @property
    def problem(self) -> str:
        """Why kernels can't be made for it; empty if they can."""
        code = self.code
        if self.compute not in HALVES:
            return f"no 16-bit multiplier for {self.compute}"
        if code.bits > 8 or (
            code.is_float and not (code.mantissa <= self.half.mantissa and code.exponent <= self.half.exponent)
        ):
            return f"{code} has more bits than {self.compute}"
        floats = ("float16", "bfloat16", "float32")
        if self.zero not in (None, *INTEGERS, *floats) or self.scale not in (None, *FLOATS):
            return f"scales of {self.scale} and zeros of {self.zero} are not decoded"
        if self.offset not in (None, *floats):
            return f"offsets of {self.offset} are not decoded"
        if any(size is not None and size % 16 for size in (self.group, *(place.inputs for _, place in self.shared))):
            return f"groups of {self.group} are no whole steps of 16"
        if (
            self.zero in INTEGERS
            and self.zero[0] == "i"
            and not (code.kind == "int" and int(self.zero[1:]) <= code.bits)
        ):
            return f"zeros of {self.zero} may be below every {code}"
        if (self.bias or self.zero) and (self.table or code.is_float):
            return "a zero point is taken off integers alone"
        if not (self.bias >= 0 and all(self._shifts_exactly(r) for r in range(2))):
            return f"{code} with zeros up to {self.largest_zero} needs more bits than {self.compute} has"
        return ""

    unit = 1  # inputs in 16 bits of x
    sums = "float32"
    kept = None
    from_shared = False  # codes are decoded in registers
    uniform = False  # the features of a block of 16 have the same scale, and it is held once
    promoted = False  # sums of some inputs are added to others, once they are multiplied by their scales
    token_scale = None
    ones = False

    @property
    def x_type(self) -> str:
        return self.compute

    @property
    def staged_x(self) -> str:
        """The type of a unit of x."""
        return self.compute

    @property
    def unit_bits(self) -> int:
        """Bits of the codes that one unit of x is multiplied by."""
        return self.code.bits

    def finished(self, value):
        """A sum as float32."""
        return value

    @property
    def half(self) -> Half:
        return HALVES[self.compute]

    def decoded(self, step: int, register: int) -> Decoded:
        """How two codes become floats: registers 0 .. 3 of a step of 16 of k."""
        if self.table:
            return decode.looked_up(self.code, self.half, self.table, step, register)
        return decode.decoded(self.code, self.half, step, register)

    def factor(self, r: int) -> float:
        """What a code of feature c + 8 r is multiplied by where it is a float."""
        return self.decoded(0, r).factor

    def nothing(self, r: int) -> float:
        """What such a float is for a weight of zero, if nothing is loaded that says so."""
        return self.decoded(0, r).bias + self.factor(r) * self.bias

    def taken_off(self, token_tiles: int) -> bool:
        """Whether products whose sums are scaled afterwards are of codes less their zero points. That takes an instruction for
        a pair of codes, and spares one product of three, with ones, for every eight tokens."""
        integers = self.code.is_integer and not self.table and self.zero in (None, *INTEGERS)
        return token_tiles > 1 and integers and all(self.decoded(0, r).bias > 0 for r in range(2))

    @property
    def excess(self) -> float:
        """How far what is summed may be from the code less its zero point, in units of the code."""
        shifted = self.zero is not None or any(self.nothing(r) for r in range(2))
        away = max(abs(self.decoded(0, r).bias) / self.factor(r) for r in range(2))
        return away + (1 << self.code.bits) if shifted else 0.0

    @property
    def largest_zero(self) -> int:
        return self.bias + ((1 << int(self.zero[1:]) - (self.zero[0] == "i")) - 1 if self.zero in INTEGERS else 0)

    def _shifts_exactly(self, r: int) -> bool:
        """Whether what is taken off a decoded code has the unit of the code."""
        way = self.decoded(0, r)
        return way.bias + way.factor * self.largest_zero <= 2 << self.half.mantissa

    @property
    def arithmetic(self) -> str:
        """How q - zero, which is exact, becomes a finished weight, rounded once.

        packed  in pairs of 16 bits, times a scale, plus an offset of that type, or of one whose values that type has
        split   the same with a scale of more bits than bf16 has: as the sum of two bf16 numbers. What they lack, and what
                the product with the lower loses, is 2^-15 of the weight, before the rounding by up to 2^-8
        floats  in float32

        A float zero of the multiplier's type is packed, too: q - zero rounds then, and the product once more.
        """
        if self.table or self.zero not in (None, self.compute, *INTEGERS):
            return "floats"
        held = {"float16": ("float16", "e4m3", "e5m2"), "bfloat16": ("bfloat16", "e4m3", "e5m2", "e8m0")}
        if all(kind is None or kind in held[self.compute] for kind in (self.scale, self.offset)):
            return "packed"
        wide = self.scale in ("float16", "float32") and not self.offset
        return "split" if self.compute == "bfloat16" and wide else "floats"

    @property
    def side_by_side(self) -> bool:
        """Whether the two codes of a register are one number, that may be looked up in a table of pairs."""
        return bool(self.table) and self.code.bits <= decode.PAIRED

    def table_bytes(self, pairs: bool) -> int:
        """Of the table in shared memory: of pairs for every lane, or of single entries."""
        if pairs and self.side_by_side:
            return 4 * 32 << 2 * self.code.bits
        return -(-4 * len(self.table) // 16) * 16

    @property
    def grouped(self) -> dict[str, str]:
        """The types of what is loaded per group, by role."""
        roles = (("scale", self.scale), ("zero", self.zero), ("offset", self.offset))
        return {role: dtype for role, dtype in roles if dtype}

    def place(self, role: str) -> Shared | None:
        """Which weights share a number of a role, if not those of one feature and one group."""
        return dict(self.shared).get(role)
