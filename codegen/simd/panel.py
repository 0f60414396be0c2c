"""Many tokens: the operands of a group's inputs are written beside each other first, a panel, which all tokens use."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import decode, primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.finish import Group, output
from qdsl.codegen.simd.rescale import Rescaling
from qdsl.codegen.simd.rows import AHEAD
from qdsl.codegen.simd.state import HALVES, State, ceil_div, div, for_features, local, ramp
from qdsl.codegen.tir import f32, i64

INPUTS = 512  # of a panel, where one group has all


def at_once(s: State) -> int:
    """Tokens whose sums there are registers for."""
    return 8 if "avx512" in s.plan.target.units else 2


def block_of(s: State, block: tirx.Expr) -> None:
    """y for the features of a block."""
    b, k, m = s.blocked, s.own.sizes["k"], s.own.sizes["m"]
    entries, unit = decode.table(b), at_once(s)
    inputs = b.step or INPUTS
    depth = -(-inputs // b.inputs) * b.inputs // b.depth
    operands = T.alloc_buffer((depth, FEATURES), "int32", scope="global")
    acc = T.alloc_buffer((s.tokens, FEATURES), "float32", scope="global")
    whole = b.step is None  # a group is several panels: its sums are kept between them
    part = T.alloc_buffer((s.tokens if whole else i64(unit), FEATURES), s.kind, scope="global")
    ones = local((FEATURES,), s.kind) if s.weighed else None
    zero = tirx.const(0, s.kind)
    with T.serial(i64(0), s.tokens) as r:
        for_features(lambda v: store(acc, f32(0), r, v))
        if whole:
            for_features(lambda v: store(part, zero, r, v))
    if ones is not None:
        for_features(lambda v: store(ones, zero, v))
    with T.serial(i64(0), ceil_div(k, inputs)) as g:
        start = g * i64(inputs)
        end = T.bind(T.min(start + i64(inputs), k))
        _fill(s, block, start, end, operands, entries)
        if ones is not None:
            if not whole:
                for_features(lambda v: store(ones, zero, v))
            with T.serial(i64(0), ceil_div(end - start, b.depth)) as i:
                for u in range(HALVES):
                    at = s.one(start + i * i64(b.depth))
                    held = primitives.dot(ones[ramp(u * LANES)], operands[i, ramp(u * LANES)], at)
                    store(ones, held, ramp(u * LANES))
        group = None if whole else Group(s, block, start, end, (lambda v: ones[v]) if s.weighed else None)
        with T.serial(i64(0), div(s.tokens, i64(unit))) as square:
            row = square * i64(unit)
            _square(s, row, row if whole else i64(0), start, end, operands, part, clear=not whole)
            if group is not None:
                with T.serial(i64(0), i64(unit)) as r:
                    group.promote(row + r, g, lambda v: part[r, v], acc, row + r)
    if whole:
        group = Group(s, block, i64(0), k, (lambda v: ones[v]) if s.weighed else None)
        with T.serial(i64(0), m) as r:
            group.promote(r, i64(0), lambda v: part[r, v], acc, r)
    with T.serial(i64(0), m) as r:
        output(s, r, block, lambda v: acc[r, v])


def _fill(s, block, start, end, operands, entries) -> None:
    """The operands of inputs start .. end."""
    b = s.blocked
    weights, per_word = s.own.buffers[b.code], b.inputs // b.depth
    made = Rescaling(s, block) if b.rescaled else None
    if made:
        made.begin(start)
    with T.serial(i64(0), ceil_div(end - start, b.inputs)) as i:
        word = div(start, i64(b.inputs)) + i
        for u in range(HALVES):
            primitives.prefetch(T.address_of(weights[block, word + i64(AHEAD), i64(u * LANES)]))
            held = T.bind(weights[block, word, ramp(u * LANES)])
            vectors = made.operands(held, u) if made else decode.operands(b, s.plan.scheme.code.dtype, held, entries)
            for q, v in enumerate(vectors):
                store(operands, v, i * i64(per_word) + i64(q), ramp(u * LANES))


def _square(s, row, to, start, end, operands, part, *, clear: bool) -> None:
    """part[to ...] = (or +=) the products of some tokens, from `row` on, with a panel."""
    b = s.blocked
    sums = [local((FEATURES,), s.kind) for _ in range(at_once(s))]
    zero = primitives.splat(tirx.const(0, s.kind))
    for turn in range(b.apart):  # plane by plane, sums times 256 in between
        first, last = turn == 0, turn == b.apart - 1
        planes = (turn,) if b.whole else range(b.planes)
        for r, held in enumerate(sums):
            for u in range(HALVES):
                value = zero if first else held[ramp(u * LANES)] << primitives.splat(tirx.const(8, s.kind))
                if last and not clear:
                    before = part[to + i64(r), ramp(u * LANES)]
                    value = before if first else value + before
                store(held, value, ramp(u * LANES))
        with T.serial(i64(0), ceil_div(end - start, b.depth)) as i:
            for r, held in enumerate(sums):
                for u in range(HALVES):
                    value = held[ramp(u * LANES)]
                    for plane in planes:
                        at = s.operand(row + i64(r), plane, start + i * i64(b.depth))
                        value = primitives.dot(value, operands[i, ramp(u * LANES)], at)
                    store(held, value, ramp(u * LANES))
    for r, held in enumerate(sums):
        for u in range(HALVES):
            store(part, held[ramp(u * LANES)], to + i64(r), ramp(u * LANES))
