"""Codes to operands, in registers: a word of every lane makes 32 / (bits * depth) vectors of operands."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import primitives
from qdsl.codegen.simd.blocked import LANES, Blocked
from qdsl.codegen.simd.primitives import splat
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
    for at, word in enumerate(words.astype(np.int32).tolist()):
        store(entries, tirx.const(word, "int32"), at)
    return entries


def floats(b: Blocked, code: DType, words: tirx.Expr, entries: tirx.Buffer | None) -> list[tirx.Expr]:
    """The codes of a vector of words as float32, by rising k; `entries` are floats."""

    def value(at: int) -> tirx.Expr:
        v = words >> splat(tirx.const(at, "uint32")) if at else words
        if entries is not None:
            return primitives.look_up(entries[_whole()], primitives.bits(v))
        found, less = _number(code, v, at + b.bits == 32), _less(b, code)
        return primitives.bits(found - splat(tirx.const(less, "float32")) if less else found)

    part = 32 // b.depth
    return [value(q * b.bits + p * part) for q in range(b.inputs // b.depth) for p in range(b.depth)]


def finished(
    b: Blocked,
    code: DType,
    words: tirx.Expr,
    entries: tirx.Buffer | None,
    scale: tirx.Expr | None,
    more: tirx.Expr | None,
) -> list[tirx.Expr]:
    """The same of finished weights: scale * code + more, rounded to bfloat16; `entries` are floats."""
    less = _less(b, code)

    def value(at: int) -> tirx.Expr:
        v = words >> splat(tirx.const(at, "uint32")) if at else words
        if entries is not None:
            found = primitives.look_up_floats(entries[_whole()], primitives.bits(v))
        else:
            found = _number(code, v, at + b.bits == 32)
            found = found - splat(tirx.const(less, "float32")) if less else found
        found = found if scale is None else found * scale
        return found if more is None else found + more

    return [primitives.packed(value(q * b.bits), value(q * b.bits + 16)) for q in range(b.inputs // b.depth)]


def _whole() -> tirx.Expr:
    return tirx.Ramp(tirx.const(0, "int64"), tirx.const(1, "int64"), LANES)


def _less(b: Blocked, code: DType) -> float:
    return float(code.decode(np.array([0]))[0] - b.values[0])


def operands(b: Blocked, code: DType, words: tirx.Expr, entries: tirx.Buffer | None) -> list[tirx.Expr]:
    """The vectors (int32x16) of operands of a vector of words (uint32x16), by rising k."""

    def shifted(by: int) -> tirx.Expr:
        return words >> splat(tirx.const(by, "uint32")) if by else words

    def u(value: int) -> tirx.Expr:
        return splat(tirx.const(value, "uint32"))

    count = b.inputs // b.depth
    if b.decode == "look up":
        held = entries[_whole()]
        return [primitives.look_up(held, primitives.bits(shifted(q * b.bits))) for q in range(count)]
    if b.decode == "shift":
        part = 32 // b.depth
        mask = sum(((1 << b.bits) - 1) << (part * p) for p in range(b.depth))
        flip = _flipped(b)
        found = []
        for q in range(count):
            v = shifted(q * b.bits)
            v = v if mask == 0xFFFFFFFF else v & u(mask)
            found.append(primitives.bits(v ^ u(flip) if flip else v))
        return found
    if pairs_of_floats(b, code):
        pairs = [shifted(q * b.bits) & u(0x00FF00FF) for q in range(count)]
        return [primitives.widened(primitives.bits(v)) for v in pairs]
    less = _less(b, code)

    def number(at: int) -> tirx.Expr:
        """The code that begins at a bit of the words, as a float32."""
        value = _number(code, shifted(at), at + b.bits == 32)
        return value - splat(tirx.const(less, "float32")) if less else value

    found = []
    for q in range(count):
        if b.depth == 1:
            found.append(T.reinterpret(primitives.INT, number(q * b.bits)))
        else:  # a bfloat16 is the upper half of the float32
            even, odd = (T.reinterpret("uint32x16", number(q * b.bits + p * 16)) for p in (0, 1))
            found.append(primitives.bits((even >> u(16)) | (odd & u(0xFFFF0000))))
    return found


def pairs_of_floats(b: Blocked, code: DType) -> bool:
    """Whether codes become bfloat16 two at a time."""
    return b.decode == "number" and code.is_float and b.unit == "bf16"


def _flipped(b: Blocked) -> int:
    """The top bits of all codes in a vector's lane, if operands have them the other way round."""
    if not b.flips:
        return 0
    part = 32 // b.depth
    return sum(1 << (part * p + b.bits - 1) for p in range(b.depth))


def _number(code: DType, v: tirx.Expr, last: bool) -> tirx.Expr:
    """The codes in the low bits of 32-bit lanes as float32; `last`: nothing lies above them."""

    def u(value: int) -> tirx.Expr:
        return splat(tirx.const(value, "uint32"))

    def f(value: tirx.Expr) -> tirx.Expr:
        return T.reinterpret(primitives.FLOAT, value)

    if code.is_integer:
        if code.kind == "int":
            up = splat(tirx.const(32 - code.bits, "int32"))
            return T.cast((primitives.bits(v) << up) >> up, primitives.FLOAT)
        return T.cast(primitives.bits(v if last else v & u(code.mask)), primitives.FLOAT)
    # As `primitives.small_float`; a subnormal number is what lies above the smallest normal one in the next binade.
    magnitude = v & u(code.mask >> 1)
    moved = magnitude << u(23 - code.mantissa)
    normal = moved + u((127 - code.bias) << 23)
    smallest = splat(tirx.const(2.0 ** (1 - code.bias), "float32"))
    small = f(moved + u((128 - code.bias) << 23)) - smallest
    value = T.reinterpret("uint32x16", tirx.Select(magnitude < u(1 << code.mantissa), small, f(normal)))
    first = {"nan": code.mask >> 1, "ieee": ((1 << code.exponent) - 1) << code.mantissa}.get(code.special)
    if first:
        value = tirx.Select(magnitude >= u(first), normal | u(0x7F800000), value)
    return f(value | ((v & u(1 << (code.bits - 1))) << u(32 - code.bits)))
