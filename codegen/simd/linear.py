"""The SIMD kernels of y = x wᵀ: x becomes operands once, then every block of features is a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import ENOUGH, in_order, limit_threads, open_function, store
from qdsl.codegen.plan import Plan
from qdsl.codegen.simd import decode, inputs, panel, primitives, rows, tiles
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.state import State, ceil_div, div, mod
from qdsl.codegen.tir import i64

PIECES = 16  # of a thread, where blocks allow


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """The kernels that the plan's variants call."""
    steps = {s.function: s.args for v in plan.variants for s in v.steps}
    return {name: _linear(plan, name, args) for name, args in steps.items() if name.startswith("linear_")}


def _linear(plan: Plan, name: str, args: tuple[str, ...]) -> tirx.PrimFunc:
    b, code = plan.blocked, plan.scheme.code.dtype
    folds = name == "linear_folded"
    by_tiles, stacked = name not in ("linear_rows", "linear_panel"), name == "linear_stacked"
    with open_function(plan, name, args) as (builder, own):
        width = 512 if "avx512" in plan.target.units else 256
        s = State(plan, b, own, by_tiles, name == "linear_rows" and b.floats, folds, stacked)
        pairs = code if decode.pairs_of_floats(b, code) and not s.floats else None
        rows_of_b = b.tile_inputs // b.depth if by_tiles else None
        with primitives.imported(s.unit, width, b.decode == "look up", rows_of_b, pairs, b.signed):
            k, m = own.sizes["k"], own.sizes["m"]
            together = 2 * LANES if by_tiles else panel.at_once(s) if name == "linear_panel" else rows.at_once(s)[-1]
            s.tokens = T.bind(ceil_div(m, together) * i64(together))
            s.padded = T.bind(ceil_div(k, s.multiple) * i64(s.multiple))
            inputs.allocate(s)
            blocks = T.bind(ceil_div(own.buffers["y"].shape[1], FEATURES // b.parts))
            if by_tiles:
                _by_tiles(s, blocks)
            else:
                _of_blocks(s, blocks, (panel if name == "linear_panel" else rows).block_of)
    return builder.get()


@contextmanager
def _pieces(s: State, tokens: tirx.Expr, count: tirx.Expr) -> Iterator[tirx.Expr]:
    """Pieces of all products, after all of x: a loop for as many threads as have enough to do.  They take its turns in order,
    so that one that comes late holds up no other, and whoever waits for x waits for a thread that is at it."""
    products = s.own.sizes["m"] * s.own.sizes["k"] * s.own.buffers["y"].shape[1]
    ready = T.alloc_buffer((1,), "int64", scope="global")
    store(ready, i64(0), 0)
    limit_threads(div(products, i64(ENOUGH)))
    in_order(tokens + count)
    with T.parallel(i64(0), tokens + count) as i, T.If(i < tokens):
        with T.Then():
            inputs.fill(s, i)
            T.evaluate(T.call_extern("void", "qdsl_one_more", T.address_of(ready[0])))
        with T.Else():
            T.evaluate(T.call_extern("void", "qdsl_wait_for", T.address_of(ready[0]), tokens))
            yield T.bind(i - tokens)


def _of_blocks(s: State, blocks: tirx.Expr, work: Callable[[State, tirx.Expr], None]) -> None:
    """Pieces of some blocks beside each other, whose codes are one stream."""
    each = _each(blocks)
    with _pieces(s, s.tokens, ceil_div(blocks, each)) as i:
        _some(s, blocks, i * each, each, work)


def _each(blocks: tirx.Expr) -> tirx.Expr:
    threads = T.cast(T.call_extern("int32", "omp_get_max_threads"), "int64")
    return T.bind(ceil_div(blocks, threads * i64(PIECES)))


def _some(s: State, blocks: tirx.Expr, first: tirx.Expr, count: tirx.Expr, work: Callable) -> None:
    with T.serial(first, T.min(blocks, first + count)) as block:
        work(s, block)


def _by_tiles(s: State, blocks: tirx.Expr) -> None:
    each, w = _each(blocks), tiles.work(s, blocks)
    tokens, pieces = s.tokens, w.pieces
    if not s.folds:
        tokens = T.bind(T.if_then_else(s.few, s.own.sizes["m"], tokens))
        pieces = T.bind(T.if_then_else(s.few, ceil_div(blocks, each), pieces))
    with _pieces(s, tokens, pieces) as i:
        if s.folds:
            _many(s, blocks, w, i)
            return
        with T.If(s.few):
            with T.Then():
                _few(s, blocks, i * each, each)
            with T.Else():
                _many(s, blocks, w, i)


def _few(s: State, blocks: tirx.Expr, first: tirx.Expr, count: tirx.Expr) -> None:
    def work(stacked: bool) -> None:
        _some(s, blocks, first, count, lambda s, block: tiles.few(s, block, stacked))

    if s.planes == 1 or not s.blocked.whole:
        work(s.planes == 1 or s.stacked)
        return
    with T.If(s.own.sizes["m"] * i64(s.planes) <= i64(LANES)):  # whole numbers do not mind the order
        with T.Then():
            work(True)
        with T.Else():
            work(False)


def _many(s: State, blocks: tirx.Expr, w: tiles.Work, piece: tirx.Expr) -> None:
    block = T.bind(mod(piece, w.rows) * w.blocks)
    pair = T.bind(div(piece, w.rows) * w.pairs)
    pairs = T.bind(T.min(w.pairs, div(s.tokens, i64(2 * LANES)) - pair))
    tiles.many(s, block, T.bind(T.min(w.blocks, blocks - block)), pair, pairs)
