"""How a scheme meets the multipliers of a CPU: which unit multiplies, and what it sees of a code and of x.

A unit is a dot product in every 32-bit lane of a vector, of `depth` neighbouring inputs:

    f32    1 float32 by float32                    fused multiply-add
    bf16   2 bfloat16 by bfloat16 into a float32    vdpbf16ps, tdpbf16ps
    i16    2 int16 by int16 into an int32           vpmaddwd
    u8     4 uint8 by int8 into an int32            vpdpbusd, tdpbsud

Neighbouring lanes are neighbouring output features, so that a vector of codes needs no shuffle to become operands, and
one number of x serves all lanes.  Nothing here builds code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qdsl.dtype import DType, dtype
from qdsl.expr import Ref, interval
from qdsl.layout import Axis, Digit, Lane, Layout, Run
from qdsl.split import Split, ranges

if TYPE_CHECKING:
    from qdsl.codegen.target import Target
    from qdsl.scheme import Scheme

LANES = 16
FEATURES = 2 * LANES  # of a block, whose codes lie in one stream: two vectors hide the latency of the products
BYTES = 127 * 256 + 127  # the largest number that is 256 of an int8 and one of another
DEPTH = {"f32": 1, "bf16": 2, "i16": 2, "u8": 4}


@dataclass(frozen=True)
class Blocked:
    """The SIMD kernels' view of a scheme.

    unit     what multiplies
    bits     from one code to the next in a word: a power of two, of which narrower codes leave some
    planes   numbers of the unit that make a number of x: a float16 is the sum of two bfloat16, a float32 of three, and a code
             of x of more than 8 bits is 256 of its first int8 and one of its second, whose sums are kept apart
    decode   how codes become operands: "shift" (they are operands), "look up" (a table of 16), "number" (converted),
             "rescale" (bytes of a group's scale and zero, `rescaled`)
    values   what operands stand for, by bit pattern of the code
    offset   by which an operand is above what its code stands for (whole; "shift" alone)
    zero     the tensor of whole numbers that is taken off the codes of a group, after their sum
    step     inputs of a group; None: one group
    tiles    whether the unit also multiplies tiles of 16 by 16
    direct   whether these are loaded from the codes themselves, which are bytes: narrower ones with a sign are not
    signed   whether tiles hold signed bytes: the codes, or what they are less their offset and their group's zero
    folds    whether tiles may hold finished weights, rounded to bfloat16: its scheme rounds them so, or not at all
    small_floats  whether codes are floats of 8 bits that float16 holds, but for a power of two
    rescaled  the scale, and the zero or "", whose bytes `i8((q - zero) * scale)` are multiplied
    parts    of the features, of which one of y has one of each: gate and up lie beside each other, in blocks of 16
    """

    code: str
    bits: int
    unit: str
    planes: int
    decode: str
    values: tuple[float, ...]
    offset: int
    zero: str | None
    step: int | None
    tiles: bool = False
    direct: bool = False
    signed: bool = False
    folds: bool = False
    small_floats: bool = False
    rescaled: tuple[str, str] | None = None
    parts: int = 1

    @property
    def depth(self) -> int:
        return DEPTH[self.unit]

    @property
    def beside(self) -> int:
        """Inputs whose codes lie an equal part of a word apart: those of an operand, or pairs of small floats, which become
        float16 two at a time."""
        return max(self.depth, 2) if self.small_floats else self.depth

    @property
    def places(self) -> tuple[int, ...]:
        """The bits of a word that codes begin at, by rising k."""
        parts = range(0, 32, 32 // self.beside)
        return tuple(part + q * self.bits for q in range(self.inputs // self.beside) for part in parts)

    @property
    def inputs(self) -> int:
        """Inputs whose codes share a word."""
        return 32 // self.bits

    @property
    def whole(self) -> bool:
        """Whether sums are of integers."""
        return self.unit in ("u8", "i16")

    @property
    def apart(self) -> int:
        """Sums that are kept for a token: of each plane, where these stand for different powers of 256."""
        return self.planes if self.whole else 1

    @property
    def tile_inputs(self) -> int:
        """Inputs of one tile: 64 bytes of x, or as many as divide a group."""
        most = 16 * self.depth
        return math.gcd(self.step, most) if self.step else most

    @property
    def floats(self) -> bool:
        """Whether vectors multiply float32 instead, where the unit multiplies tiles."""
        return self.tiles and self.unit == "bf16" and (self.planes > 1 or self.decode == "number")

    @property
    def flips(self) -> bool:
        """Whether operands are codes with their top bit the other way round."""
        return self.decode == "shift" and self.values[0] != 0

    @property
    def top(self) -> int:
        """The bit of a code that is its sign, if it has one."""
        return (len(self.values) - 1).bit_length() - 1

    @property
    def excess(self) -> float:
        """The largest number that a code has too much until its group is corrected, in float32."""
        return float(max(map(abs, self.values))) if self.zero else 0.0

    def __str__(self) -> str:
        about = f"{self.unit} of {self.depth} inputs a lane{', tiles' if self.tiles else ''}; codes by {self.decode}"
        about += f"; x in {self.planes} planes" if self.planes > 1 else ""
        about += f"; {self.offset} above" if self.offset else ""
        about += f"; less {self.zero} after the sum" if self.zero else ""
        return f"{about}; {f'groups of {self.step} along k' if self.step else 'one group along k'}"


def blocked(
    scheme: Scheme, weight: Split, x: Split, target: Target, step: int | None,
    core: tuple[str, int | None, np.ndarray] | None, rescaled: tuple[str, str, int] | None = None,
) -> Blocked | None:  # fmt: skip
    """The view of a scheme; None where the portable loop nest serves it.

    step   inputs after which partial sums are scaled; None: once
    core   (the tensor that is taken off the codes or "", the inputs of one of its numbers or None, what codes stand for
           without it, by bit pattern)
    rescaled  (scale, zero or "", inputs of a group) of a core that is bytes of codes of 4 bits
    """
    code = scheme.code
    rescaled = None if scheme.compute.accumulator.is_float else rescaled
    if "avx2" not in target.units or not (core or rescaled) or code.dtype.bits > 8 or len(code.index) != 2:
        return None
    zero, of, values = core or ("", rescaled[2], np.arange(-128, 128))
    step = math.gcd(step or 0, of or 0) or None
    bits = cell(code.dtype.bits)
    _, parts = scheme.output.half or ("", 1)
    if parts > 2 or weight.gathered or x.gathered or (step and step % (32 // bits)):
        return None
    activation = scheme.activation()
    of_x = interval(x.core, ranges({t.name: t for t in activation.operand.tensors})) if activation else None
    if scheme.compute.accumulator.is_float:
        operand = scheme.compute.operand
        values = operand.round(values) if operand.bits >= 16 else values
        decode = "look up" if bits <= 4 else "number" if _numbers(code.dtype, values) else None
        if of_x is not None and x.core != Ref("x") and of_x.fits(dtype("bf16")):
            planes = 1
        else:
            planes = {"bf16": 1, "f16": 2}.get(scheme.output.dtype.name if activation is None else "f32", 3)
        narrow = "bf16" in target.units and _all_fit(values, dtype("bf16")) and (planes < 3 or "amx" in target.units)
        unit = "bf16" if narrow else "f32"
        offset = 0
    else:
        if of_x is None or not of_x.fits(dtype("i16")):
            return None
        unit = "u8" if "vnni" in target.units and of_x.high <= BYTES else "i16"
        planes = 2 if unit == "u8" and not of_x.fits(dtype("i8")) else 1
        if rescaled:
            offset = 128 if unit == "u8" else 0
            return Blocked(
                code.name, bits, unit, planes, "rescale", (), offset, None, step, rescaled=rescaled[:2], parts=parts
            )
        offset = -int(values.min())
        decode = "shift" if _patterns(values + offset, code.dtype.bits) else None
    if decode is None:
        return None
    found = tuple(float(v) for v in values + offset)
    view = Blocked(
        code.name, bits, unit, planes if unit != "f32" else 1, decode, found, offset, zero or None, step,
        small_floats=decode == "number" and not found[0] and _halves(code.dtype), parts=parts,
    )  # fmt: skip
    if (
        parts > 1
        or "amx" not in target.units
        or unit not in ("bf16", "u8")
        or view.tile_inputs % max(view.inputs, LANES)
    ):
        return view
    of_groups = any(e is not None for e in (x.fold, x.promote, x.correction))
    folds = unit == "bf16" and bool(step) and scheme.compute.operand == dtype("bf16") and not of_groups
    direct = unit == "u8" and bits == 8 and x.correction is None and not (view.flips and code.dtype.bits < bits)
    made = unit == "u8" and bool(step) and x.correction is None and weight.range.fits(dtype("i8"))
    return replace(view, tiles=True, direct=direct, signed=view.flips if direct else made, folds=folds)


def cell(bits: int) -> int:
    """Bits from one code to the next where they lie whole."""
    return next(size for size in (1, 2, 4, 8) if size >= bits)


def _halves(code: DType) -> bool:
    """Whether the fields of floats of 8 bits are those of float16, but for the exponent's bias and, of its bits, leading ones;
    a code that alone is none may be another number there."""
    return (
        code.is_float
        and code.signed
        and code.bits == 8
        and code.exponent <= 5
        and (code.special != "ieee" or code.exponent == 5)
    )


def _numbers(code: DType, values: np.ndarray) -> bool:
    """Whether values are the codes' own, less one number for all."""
    with np.errstate(invalid="ignore"):  # infinity less infinity
        less = code.decode(np.arange(1 << code.bits)) - values
    return bool((np.isnan(values) | (less == less[0]) | np.isnan(less)).all())


def _patterns(values: np.ndarray, bits: int) -> bool:
    """Whether whole numbers are the bit patterns, or these with their top bit flipped."""
    pattern = np.arange(1 << bits)
    return bool((values == pattern).all() or (values == pattern ^ (1 << (bits - 1))).all())


def _all_fit(values: np.ndarray, kind: DType) -> bool:
    return bool(np.array_equal(kind.round(values), values, equal_nan=True))


def codes(bits: int, beside: int) -> Layout:
    """Words of a lane (feature u, v) with the codes of 32 / bits inputs: those of one operand (p) a part of the word apart,
    so that a shift and a mask, or a look-up, make the operands q of all lanes at once."""
    operands = 32 // (bits * beside)
    dims = (
        (Digit("o"), Digit("u", 2), Digit("v", LANES)),
        (Digit("i"), Digit("q", operands), Digit("p", beside)),
    )
    return Layout(dims, (Axis(("o",)), Axis(("i",)), Axis(("u", "v"), (Run((Lane("p"), Lane("q"))),))), bits, 32)
