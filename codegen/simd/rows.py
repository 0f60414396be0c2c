"""A few tokens: codes become operands in registers, and each serves all of the tokens at once.

The weight is read once, in one stream, for every such few tokens.  Sums are kept apart by the operand of a word that they come
from, while there are registers for it: one sum alone would wait for the latency of every product.  Where tiles multiply
bfloat16, on Intel's processors, and x has several planes, vectors of float32 are multiplied instead: there they are twice as
fast as vectors of bfloat16.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import decode, primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.finish import Group, output
from qdsl.codegen.simd.state import HALVES, State, ceil_div, div, for_features, local, ramp
from qdsl.codegen.tir import f32, i64

AHEAD = 64  # words of a lane that are asked for before they are needed: 8 KiB
AHEAD_OF_FLOATS = (
    24  # where float32 are multiplied, which takes longest: 15 % less time than with 64, the others 2 to 8 % more
)
CHAINS = 8  # sums that hide the latency of a product


def at_once(s: State) -> tuple[int, ...]:
    """Numbers of tokens that there is code for: as many as there are registers for the sums of."""
    return (1, 2, 4) if "avx512" in s.plan.target.units else (1, 2)


def block_of(s: State, block: tirx.Expr) -> None:
    """y for the features of a block."""
    entries, m = decode.table(s.blocked, s.floats), s.own.sizes["m"]

    def choose(counts: tuple[int, ...]) -> None:
        count = counts[0]
        if len(counts) == 1:
            with T.serial(i64(0), ceil_div(m, count)) as r:
                _few(s, block, r * i64(count), count, entries)
            return
        with T.If(m <= i64(count)):
            with T.Then():
                _few(s, block, i64(0), count, entries)
            with T.Else():
                choose(counts[1:])

    choose(at_once(s))


def _few(s: State, block: tirx.Expr, row: tirx.Expr, count: int, entries: tirx.Buffer | None) -> None:
    """y of `count` tokens from `row` on."""
    b, k = s.blocked, s.own.sizes["k"]
    rows = count + s.weighed  # and one that is all ones
    chains = max(1, CHAINS // (rows * b.apart * HALVES))
    words = max(1, chains * s.depth // b.inputs)  # that are worked on at once
    acc = [local((FEATURES,), "float32") for _ in range(count)]
    part = [[[local((FEATURES,), s.kind) for _ in range(chains)] for _ in range(b.apart)] for _ in range(rows)]
    weights, code, zero = s.own.buffers[b.code], s.plan.scheme.code.dtype, tirx.const(0, s.kind)
    for held in acc:
        for_features(lambda v, held=held: store(held, f32(0), v))

    def work(first: tirx.Expr, count_of_words: int) -> None:
        for w in range(count_of_words):
            i = first + i64(w)
            ahead = i64(AHEAD_OF_FLOATS if s.floats else AHEAD)
            for u in range(HALVES):
                primitives.prefetch(T.address_of(weights[block, i + ahead, i64(u * LANES)]))
            read = [T.bind(weights[block, i, ramp(u * LANES)]) for u in range(HALVES)]
            operands = decode.floats if s.floats else decode.operands
            vectors = [[T.bind(v) for v in operands(b, code, held, entries)] for held in read]
            for q in range(b.inputs // s.depth):
                at = i * i64(b.inputs) + i64(q * s.depth)
                for r in range(rows):
                    for plane in range(1 if r == count else s.planes):
                        held = part[r][plane % b.apart][(w * b.inputs // s.depth + q) % chains]
                        at_x = s.one(at) if r == count else s.operand(row + i64(r), plane, at)
                        for u in range(HALVES):
                            value = primitives.dot(held[ramp(u * LANES)], vectors[u][q], at_x)
                            store(held, value, ramp(u * LANES))

    def sum_of(r: int, v: tirx.Expr) -> tirx.Expr:
        planes = []
        for own in part[r][: 1 if r == count else b.apart]:
            total = own[0][v]
            for held in own[1:]:
                total = total + held[v]
            planes.append(total)
        return s.joined(planes)

    with T.serial(i64(0), s.groups) as g:
        start = T.bind(g * s.step)
        end = T.bind(T.min(start + s.step, k))
        for held in (held for planes in part for own in planes for held in own):
            for_features(lambda v, held=held: store(held, zero, v))
        first, last = T.bind(div(start, i64(b.inputs))), T.bind(ceil_div(end, b.inputs))
        several = T.bind(div(last - first, i64(words)))
        with T.serial(i64(0), several) as i:
            work(first + i * i64(words), words)
        if words > 1:
            with T.serial(first + several * i64(words), last) as i:
                work(i, 1)
        group = Group(s, block, start, end, (lambda v: sum_of(count, v)) if s.weighed else None)
        for r in range(count):
            group.promote(row + i64(r), g, lambda v, r=r: sum_of(r, v), acc[r])
    for r in range(count):
        with T.If(row + i64(r) < s.own.sizes["m"]), T.Then():
            output(s, row + i64(r), block, lambda v, r=r: acc[r][v])
