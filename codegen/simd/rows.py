"""A few tokens: codes become operands in registers, and each serves all of the tokens at once.

The weight is read once, in one stream, for every such few tokens.  Sums are kept apart by the operand of a word that they come
from, while there are registers for it: one sum alone would wait for the latency of every product.  Where tiles multiply
bfloat16, on Intel's processors, and x has several planes or codes are bytes, vectors of float32 are multiplied instead: there
they are twice as fast as vectors of bfloat16.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import decode, primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.finish import Group, output
from qdsl.codegen.simd.rescale import Rescaling
from qdsl.codegen.simd.state import HALVES, State, ceil_div, div, for_features, local, ramp
from qdsl.codegen.tir import f32, i64

AHEAD = 64  # words of a lane that are asked for before they are needed: 8 KiB
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
    b, k, code = s.blocked, s.own.sizes["k"], s.plan.scheme.code.dtype
    rows = count + s.weighed  # and one that is all ones
    vectors = 2 if s.pairs else 1  # of sums, for a vector of features
    chains = max(1, CHAINS // (rows * b.apart * HALVES * vectors))
    depth = s.depth * vectors
    words = max(1, chains * depth // b.inputs)  # that are worked on at once
    acc = [local((FEATURES,), "float32") for _ in range(count)]
    part = [
        [[local((FEATURES * vectors,), s.kind) for _ in range(chains)] for _ in range(b.apart)] for _ in range(rows)
    ]
    spoils = s.pairs and code.special == "nan"
    seen = local((FEATURES,), "uint32") if spoils else None  # the largest magnitudes of codes
    weights, zero = s.own.buffers[b.code], tirx.const(0, s.kind)
    dot = primitives.dot_pairs if s.pairs else primitives.dot
    made = Rescaling(s, block) if b.rescaled else None
    for held in acc:
        for_features(lambda v, held=held: store(held, f32(0), v))

    def work(first: tirx.Expr, count_of_words: int) -> None:
        for w in range(count_of_words):
            i = first + i64(w)
            for u in range(HALVES):  # one after the other: lines that are asked for together wait for each other
                primitives.prefetch(T.address_of(weights[block, i + i64(AHEAD), i64(u * LANES)]))
                held = T.bind(weights[block, i, ramp(u * LANES)])
                if seen is not None:
                    store(seen, decode.largest(seen[ramp(u * LANES)], held), ramp(u * LANES))
                for q, some in enumerate(decoded(held, u)):
                    at = i * i64(b.inputs) + i64(q * depth)
                    for j, vector in enumerate(T.bind(v) for v in some):
                        for r in range(rows):
                            for plane in range(1 if r == count else s.planes):
                                sums = part[r][plane % b.apart][(w * b.inputs // depth + q) % chains]
                                to, x = ramp((u * vectors + j) * LANES), operand(r, plane, at)
                                store(sums, dot(sums[to], vector, x), to)

    def decoded(held: tirx.Expr, u: int) -> list[list[tirx.Expr]]:
        if s.pairs:
            return decode.pairs(code, held)
        if made:
            return [[v] for v in made.operands(held, u)]
        return [[v] for v in (decode.floats if s.floats else decode.operands)(b, code, held, entries)]

    def operand(r: int, plane: int, at: tirx.Expr) -> tirx.Expr:
        return s.one(at) if r == count else s.operand(row + i64(r), plane, at)

    def sum_of(r: int, v: tirx.Expr) -> tirx.Expr:
        planes = []
        for own in part[r][: 1 if r == count else b.apart]:
            total = own[0][v]
            for held in own[1:]:
                total = total + held[v]
            planes.append(total)
        return s.joined(planes)

    def joined(r: int) -> tirx.Buffer:
        """A token's sums, of pairs."""
        total = local((FEATURES,), s.kind)
        for u in range(HALVES):
            value = primitives.sum_pairs(*(sum_of(r, ramp((u * 2 + j) * LANES)) for j in (0, 1)))
            value = value * primitives.splat(tirx.const(decode.lift(code), s.kind))
            value = value if seen is None else decode.spoiled(seen[ramp(u * LANES)], value)
            store(total, value, ramp(u * LANES))
        return total

    with T.serial(i64(0), s.groups) as g:
        start = T.bind(g * s.step)
        end = T.bind(T.min(start + s.step, k))
        for held in (held for planes in part for own in planes for held in own):
            for j in range(HALVES * vectors):
                store(held, primitives.splat(zero), ramp(j * LANES))
        if seen is not None:
            for u in range(HALVES):
                store(seen, primitives.splat(tirx.const(0, "uint32")), ramp(u * LANES))
        if made:
            made.begin(start)
        first, last = T.bind(div(start, i64(b.inputs))), T.bind(ceil_div(end, b.inputs))
        several = T.bind(div(last - first, i64(words)))
        with T.serial(i64(0), several) as i:
            work(first + i * i64(words), words)
        if words > 1:
            with T.serial(first + several * i64(words), last) as i:
                work(i, 1)
        totals = [joined(r) for r in range(rows)] if s.pairs else None

        def total(r: int, v: tirx.Expr, totals=totals) -> tirx.Expr:
            return sum_of(r, v) if totals is None else totals[r][v]

        group = Group(s, block, start, end, (lambda v: total(count, v)) if s.weighed else None)
        for r in range(count):
            group.promote(row + i64(r), g, lambda v, r=r: total(r, v), acc[r])
    for r in range(count):
        with T.If(row + i64(r) < s.own.sizes["m"]), T.Then():
            output(s, row + i64(r), block, lambda v, r=r: acc[r][v])
