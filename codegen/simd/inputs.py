"""x as the multipliers take it: rows of operands, all inputs of a plane beside each other, padded with zeros.

A float is cut into planes by its leading bits, so that the planes' sum is exact: bfloat16 has 8 of a float16's 11 bits and of
a float32's 24.  Cutting, unlike rounding, never makes an infinity of a finite number; an infinity's other planes are 0.
A code of more than 8 bits is 256 of one byte and one of another, both signed.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen import quantize
from qdsl.codegen.function import buffer_shape, store
from qdsl.codegen.portable import activation_core, factor, first, times
from qdsl.codegen.simd.blocked import LANES
from qdsl.codegen.simd.state import State, div, for_lanes, local, mod
from qdsl.codegen.tir import as_float, bits_of, choose, f32, float_of, i32, i64, u32
from qdsl.scheme import Tensor

ELEMENT = {"f32": "float32", "bf16": "uint16", "i16": "int16", "u8": "int8"}


def allocate(s: State) -> None:
    """Room for the operands and the sums of x, and for what is computed of each token to quantize it: local to a call."""
    kind, planes = ELEMENT[s.unit], i64(s.planes)
    shape: tuple = (s.tokens, planes, s.padded)
    if s.by_tiles:
        tile = i64(s.blocked.tile_inputs)
        s.rows = T.bind(T.if_then_else(s.few, s.own.sizes["m"], i64(2 * LANES)))
        pairs = T.if_then_else(s.few, i64(1), div(s.tokens, 2 * LANES))
        shape = T.bind(pairs * div(s.padded, tile) * planes * s.rows), tile
    s.x = T.alloc_buffer(shape, kind, scope="global")
    if s.corrected:
        s.sums = T.alloc_buffer((s.tokens, s.groups), s.kind if s.sums_of_codes else "float32", scope="global")
    if s.weighed:
        s.ones = T.alloc_buffer((s.padded,), kind, scope="global")
        with T.serial(i64(0), s.padded) as i:
            one = T.if_then_else(i < s.own.sizes["k"], tirx.const(1, s.kind), tirx.const(0, s.kind))
            store(s.ones, _planes(s, one)[-1 if s.blocked.whole else 0], i)
    for tensor in _computed(s):
        if not quantize.inline(s.own, tensor):
            s.own.buffers[tensor.name] = T.alloc_buffer(*buffer_shape(s.own, tensor), scope="global")
            if not quantize.of_tokens(tensor):
                quantize.compute(s.own, tensor)


def _computed(s: State) -> list[Tensor]:
    """What is computed of x, in order."""
    activation = s.plan.scheme.activation()
    return [t for t in activation.operand.tensors if not t.loaded] if activation else []


def fill(s: State, row: tirx.Expr) -> None:
    """A token's inputs; beyond the last token they are zeros."""
    k, lanes, zero = s.own.sizes["k"], i64(LANES), tirx.const(0, s.kind)
    beside = s.sums is not None and (s.blocked.step or LANES) % LANES == 0  # sums are made where x is written
    total = local((LANES,), s.kind) if beside else None

    def put(at: tirx.Expr, v: tirx.Expr, value: tirx.Expr) -> None:
        for plane, part in enumerate(_planes(s, value)):
            store(s.x, part, *s.place(row, plane, at, v))

    def vector(at: tirx.Expr, v: tirx.Expr) -> None:
        value = activation_core(s, row, at + v)
        put(at, v, value)
        if total is not None:  # of what has been written: LLVM would compute it again, for that might have changed x
            added = value
            if s.blocked.whole:
                added = s.joined([T.cast(s.x[s.place(row, p, at, v)], s.kind) for p in range(s.planes)])
            store(total, total[v] + added, v)

    with T.If(row < s.own.sizes["m"]):
        with T.Then():
            for tensor in _computed(s):
                if tensor.name not in s.own.inlined and quantize.of_tokens(tensor):
                    quantize.compute(s.own, tensor, row)
            with T.serial(i64(0), s.groups if beside else i64(1)) as g:
                start = g * s.step
                end = T.bind(T.min(start + s.step, k)) if beside else k
                if total is not None:
                    for_lanes(lambda v: store(total, zero, v))
                whole = T.bind(div(end - start, LANES))
                with T.serial(i64(0), whole) as i:
                    for_lanes(lambda v: vector(start + i * lanes, v))
                last = start + whole * lanes
                with T.serial(i64(0), end - last) as v:
                    vector(last, v)
                if total is not None:
                    _add(s, total, row, g)
            with T.serial(k, s.padded) as i:
                at = div(i, LANES) * lanes
                put(at, i - at, zero)
            if s.sums is not None and not beside:
                _sum(s, row)
        with T.Else():
            with T.serial(i64(0), div(s.padded, LANES)) as i:
                for_lanes(lambda v: put(i * lanes, v, zero))
            if s.sums is not None:
                with T.serial(i64(0), s.groups) as g:
                    store(s.sums, tirx.const(0, s.sums.dtype), row, g)


def _sum(s: State, row: tirx.Expr) -> None:
    """Sums over each group of a token, of 16 lanes first."""
    k, zero = s.own.sizes["k"], tirx.const(0, s.kind)
    lanes = local((LANES,), s.kind)
    with T.serial(i64(0), s.groups) as g:
        start = g * s.step
        for_lanes(lambda v: store(lanes, zero, v))
        with T.serial(i64(0), T.min(s.step, k - start)) as i:
            at = mod(i, LANES)
            store(lanes, lanes[at] + activation_core(s, row, start + i), at)
        _add(s, lanes, row, g)


def _add(s: State, lanes: tirx.Buffer, row: tirx.Expr, group: tirx.Expr) -> None:
    """The sum of a group is that of its lanes; by the scale of x, unless it is of codes."""
    total = local((1,), s.kind)
    store(total, tirx.const(0, s.kind), 0)
    with T.serial(i64(0), i64(LANES)) as v:
        store(total, total[0] + lanes[v], 0)
    if s.sums_of_codes:
        store(s.sums, total[0], row, group)
        return
    activation = s.plan.activation
    scale = factor(s, first(activation.fold, activation.promote), {"m": row, "k": group * s.step})
    store(s.sums, times(as_float(total[0]), scale), row, group)


def _planes(s: State, value: tirx.Expr) -> list[tirx.Expr]:
    unit = s.unit
    if s.blocked.whole:  # the last plane has the last 8 bits, as a signed number
        upper = [T.cast((value + i32(128)) >> i32(8), ELEMENT[unit])] * (s.planes - 1)
        return [*upper, T.cast(value, ELEMENT[unit])]
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
