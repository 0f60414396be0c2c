"""Codes to operands, in registers: a word of every lane makes 32 / (bits * depth) vectors of operands."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import primitives
from qdsl.codegen.simd.blocked import LANES, Blocked
from qdsl.codegen.simd.primitives import splat, word
from qdsl.codegen.simd.state import local
from qdsl.dtype import DType


def table(b: Blocked, floats: bool = False) -> tirx.Buffer | None:
    """The vector that codes are looked up in, where they are: entries repeat, so that bits of the next code do not matter.

    floats   of float32, whatever the unit multiplies
    """
    if b.decode != "look up":
        return None
    halves = b.unit == "bf16" and not floats
    values = np.array([b.values[i % len(b.values)] for i in range(2 * LANES if halves else LANES)], np.float32)
    words = values.view(np.uint32)
    if halves:
        words = (words[0::2] >> 16) | (words[1::2] & 0xFFFF0000)
    entries = local((LANES,), "int32")
    for at, entry in enumerate(words.astype(np.int32).tolist()):
        store(entries, tirx.const(entry, "int32"), at)
    return entries


def floats(b: Blocked, code: DType, words: tirx.Expr, entries: tirx.Buffer | None) -> list[tirx.Expr]:
    """The codes of a vector of words as float32, by rising k; `entries` are floats."""

    def value(at: int) -> tirx.Expr:
        if entries is None:
            return primitives.bits(_number(b, code, words, at))
        return primitives.look_up(entries[_whole()], primitives.bits(_shifted(words, at)))

    return [value(at) for at in b.places]


def pairs(code: DType, words: tirx.Expr) -> list[list[tirx.Expr]]:
    """Small floats as float32 in pairs of inputs, by rising k: those of the lower and of the upper half of the features, whose
    two inputs are neighbouring lanes.  `lift` is left to multiply them by."""
    narrow = 5 - code.exponent  # bits of the exponent that float16 has more
    kept = (0x8000 | 0x7F00 >> narrow) - (1 << 16)

    def half(value: int) -> tirx.Expr:
        return tirx.Broadcast(tirx.const(value, "int16"), 2 * LANES)

    def both(upper_bytes: tirx.Expr) -> list[tirx.Expr]:
        moved = upper_bytes >> half(narrow) if narrow else upper_bytes
        return [primitives.of_halves(primitives.bits(moved & half(kept)), upper) for upper in (False, True)]

    halves = T.reinterpret(f"int16x{2 * LANES}", words)
    return [both(halves << half(8)), both(halves)]


def lift(code: DType) -> float:
    """By what float16 has a small float too small, subnormal ones too: the difference of the biases."""
    return 2.0 ** (15 - code.bias)


def largest(found: tirx.Expr, words: tirx.Expr) -> tirx.Expr:
    """The largest magnitude so far of each byte of a vector's codes."""
    bytes_ = (T.reinterpret(f"uint8x{4 * LANES}", v) for v in (found, words & word(0x7F7F7F7F)))
    return T.reinterpret("uint32x16", T.max(*bytes_))


def spoiled(found: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
    """value, but NaN where the largest magnitude of a lane's codes is that of the one that is no number."""
    nan = splat(tirx.const(float("nan"), "float32"))
    return tirx.Select(((found + word(0x01010101)) & word(0x80808080)) != word(0), nan, value)


def finished(
    b: Blocked,
    code: DType,
    words: tirx.Expr,
    entries: tirx.Buffer | None,
    scale: tirx.Expr | None,
    more: tirx.Expr | None,
) -> list[tirx.Expr]:
    """The same of finished weights: scale * code + more, rounded to bfloat16; `entries` are floats."""

    def value(at: int) -> tirx.Expr:
        if entries is not None:
            found = primitives.look_up_floats(entries[_whole()], primitives.bits(_shifted(words, at)))
        else:
            found = _number(b, code, words, at)
        found = found if scale is None else found * scale
        return found if more is None else found + more

    return [primitives.packed(value(q * b.bits), value(q * b.bits + 16)) for q in range(b.inputs // b.depth)]


def _shifted(words: tirx.Expr, by: int) -> tirx.Expr:
    return words >> splat(tirx.const(by, "uint32")) if by else words


def _whole() -> tirx.Expr:
    return tirx.Ramp(tirx.const(0, "int64"), tirx.const(1, "int64"), LANES)


def _less(b: Blocked, code: DType) -> float:
    return float(code.decode(np.array([0]))[0] - b.values[0])


def operands(b: Blocked, code: DType, words: tirx.Expr, entries: tirx.Buffer | None) -> list[tirx.Expr]:
    """The vectors (int32x16) of operands of a vector of words (uint32x16), by rising k."""
    count = b.inputs // b.depth
    if b.decode == "look up":
        held = entries[_whole()]
        return [primitives.look_up(held, primitives.bits(_shifted(words, q * b.bits))) for q in range(count)]
    if b.decode == "shift":
        part = 32 // b.depth
        mask = sum(((1 << b.bits) - 1) << (part * p) for p in range(b.depth))
        flip = _flipped(b)
        found = []
        for q in range(count):
            v = _shifted(words, q * b.bits)
            v = v if mask == 0xFFFFFFFF else v & word(mask)
            found.append(primitives.bits(v ^ word(flip) if flip else v))
        return found
    if pairs_of_floats(b, code):
        pairs = [_shifted(words, q * b.bits) & word(0x00FF00FF) for q in range(count)]
        return [primitives.widened(primitives.bits(v)) for v in pairs]
    found = []
    for q in range(count):
        if b.depth == 1:
            found.append(primitives.bits(_number(b, code, words, b.places[q])))
        else:  # a bfloat16 is the upper half of the float32
            even, odd = (T.reinterpret("uint32x16", _number(b, code, words, q * b.bits + p * 16)) for p in (0, 1))
            found.append(primitives.bits((even >> word(16)) | (odd & word(0xFFFF0000))))
    return found


def pairs_of_floats(b: Blocked, code: DType) -> bool:
    """Whether codes become bfloat16 two at a time."""
    return b.decode == "number" and code.is_float and b.unit == "bf16"


def _flipped(b: Blocked) -> int:
    """The top bits of all codes in a vector's lane, if operands have them the other way round."""
    if not b.flips:
        return 0
    part = 32 // b.depth
    return sum(1 << (part * p + b.top) for p in range(b.depth))


def _number(b: Blocked, code: DType, words: tirx.Expr, at: int) -> tirx.Expr:
    """What the bytes that begin at a bit of the words stand for, as float32."""
    less = _less(b, code)
    if code.is_float:
        value = _small_float(code, _shifted(words, at))
    else:
        whole = int(less) if less == int(less) and abs(less) < 1 << 15 else 0
        value, less = _byte(code, words, at, whole), less - whole
    return value - splat(tirx.const(less, "float32")) if less else value


def _byte(code: DType, words: tirx.Expr, at: int, less: int) -> tirx.Expr:
    """Integers in bytes, less a whole number: as the lowest bits of the mantissa of 2^23, or as those above 8 others, from
    which that power is taken.  A processor does more such instructions at once than shifts and conversions."""
    place, sign = at % 16, 1 << (code.bits - 1) if code.kind == "int" else 0
    lifted = (_shifted(words, at - place) & word(0xFF << place)) ^ word(0x4B000000 | (sign << place))
    above = (1 << 23) + ((sign + less) << place)  # a code with its sign flipped lies by that above itself
    value = T.reinterpret(primitives.FLOAT, lifted)
    scale, off = (splat(tirx.const(v, "float32")) for v in (2.0**-place, -above * 2.0**-place))
    return primitives.multiply_add(value, scale, off) if place else value + off


def _small_float(code: DType, v: tirx.Expr) -> tirx.Expr:
    """The floats in the low bits of 32-bit lanes as float32."""

    def f(value: tirx.Expr) -> tirx.Expr:
        return T.reinterpret(primitives.FLOAT, value)

    # As `primitives.small_float`; a subnormal number is what lies above the smallest normal one in the next binade.
    magnitude = v & word(code.mask >> 1)
    moved = magnitude << word(23 - code.mantissa)
    normal = moved + word((127 - code.bias) << 23)
    smallest = splat(tirx.const(2.0 ** (1 - code.bias), "float32"))
    small = f(moved + word((128 - code.bias) << 23)) - smallest
    value = T.reinterpret("uint32x16", tirx.Select(magnitude < word(1 << code.mantissa), small, f(normal)))
    first = {"nan": code.mask >> 1, "ieee": ((1 << code.exponent) - 1) << code.mantissa}.get(code.special)
    if first:
        value = tirx.Select(magnitude >= word(first), normal | word(0x7F800000), value)
    return f(value | ((v & word(1 << (code.bits - 1))) << word(32 - code.bits)))
