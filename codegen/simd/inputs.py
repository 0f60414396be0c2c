"""x as the multipliers take it: rows of operands, all inputs of a plane beside each other, padded with zeros.

A float is cut into planes by its leading bits, so that the planes' sum is exact: bfloat16 has 8 of a float16's 11 bits and of
a float32's 24.  Cutting, unlike rounding, never makes an infinity of a finite number; an infinity's other planes are 0.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import for_tokens, store
from qdsl.codegen.portable import activation_core
from qdsl.codegen.simd.blocked import LANES
from qdsl.codegen.simd.state import State, div, for_lanes, local
from qdsl.codegen.tir import as_float, bits_of, choose, f32, float_of, i64, u32

ELEMENT = {"f32": "float32", "bf16": "uint16", "i16": "int16", "u8": "int8"}


def allocate(s: State) -> None:
    """Room for the operands and the sums of x: local to a call."""
    kind, planes = ELEMENT[s.unit], i64(s.planes)
    shape: tuple = (s.tokens, planes, s.padded)
    if s.by_tiles:
        tile, token = i64(s.blocked.tile_inputs), i64(LANES)
        shape = div(s.tokens, token * i64(2)), div(s.padded, tile), planes, i64(2), token, tile
    s.x = T.alloc_buffer(shape, kind, scope="global")
    if s.corrected:
        s.sums = T.alloc_buffer((s.tokens, s.groups), s.kind, scope="global")
    if s.weighed:
        s.ones = T.alloc_buffer((s.padded,), kind, scope="global")


def fill(s: State) -> None:
    """All rows of x."""
    k = s.own.sizes["k"]
    for_tokens(s.tokens, s.own.sizes["m"] * k, lambda row: _row(s, row))
    if s.ones is not None:
        with T.serial(i64(0), s.padded) as i:
            one = T.if_then_else(i < k, tirx.const(1, s.kind), tirx.const(0, s.kind))
            store(s.ones, _planes(s, one)[0], i)


def _row(s: State, row: tirx.Expr) -> None:
    """A token's inputs; beyond the last token they are zeros."""
    k = s.own.sizes["k"]
    lanes, zero = i64(LANES), tirx.const(0, s.kind)
    whole, all_ = div(k, LANES), div(s.padded, LANES)

    def put(at: tirx.Expr, v: tirx.Expr, value: tirx.Expr) -> None:
        for plane, part in enumerate(_planes(s, value)):
            store(s.x, part, *s.place(row, plane, at, v))

    with T.If(row < s.own.sizes["m"]):
        with T.Then():
            with T.serial(i64(0), whole) as i:
                for_lanes(lambda v: put(i * lanes, v, activation_core(s, row, i * lanes + v)))
            with T.serial(whole, all_) as i, T.serial(i64(0), lanes) as v:
                at = i * lanes
                with T.If(at + v < k):
                    with T.Then():
                        put(at, v, activation_core(s, row, at + v))
                    with T.Else():
                        put(at, v, zero)
        with T.Else(), T.serial(i64(0), all_) as i:
            for_lanes(lambda v: put(i * lanes, v, zero))
    if s.sums is not None:
        _sum(s, row)


def _sum(s: State, row: tirx.Expr) -> None:
    """Sums over each group, of 16 lanes first."""
    k, m = s.own.sizes["k"], s.own.sizes["m"]
    lanes = local((LANES,), s.kind)
    total = local((1,), s.kind)
    zero = tirx.const(0, s.kind)
    with T.serial(i64(0), s.groups) as g:
        start = g * s.step
        count = T.if_then_else(row < m, T.min(s.step, k - start), i64(0))
        whole = div(count, i64(LANES))
        for_lanes(lambda v: store(lanes, zero, v))
        with T.serial(i64(0), whole) as i:
            at = start + i * i64(LANES)
            for_lanes(lambda v, at=at: store(lanes, lanes[v] + activation_core(s, row, at + v), v))
        store(total, zero, 0)
        with T.serial(i64(0), i64(LANES)) as v:
            store(total, total[0] + lanes[v], 0)
        with T.serial(i64(0), count - whole * i64(LANES)) as i:
            store(total, total[0] + activation_core(s, row, start + whole * i64(LANES) + i), 0)
        store(s.sums, total[0], row, g)


def _planes(s: State, value: tirx.Expr) -> list[tirx.Expr]:
    unit = s.unit
    if s.blocked.whole:
        return [T.cast(value, ELEMENT[unit])]
    if unit == "f32":
        return [as_float(value)]
    found, rest = [], as_float(value)
    for plane in range(s.planes):
        bits = bits_of(rest)
        found.append(T.cast(bits >> u32(16), "uint16"))
        if plane + 1 < s.planes:
            infinite = (bits & u32(0x7FFFFFFF)) == u32(0x7F800000)
            rest = choose(infinite, f32(0), rest - float_of(bits & u32(0xFFFF0000)))
    return found
