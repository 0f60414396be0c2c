"""The SIMD kernels of y = x wᵀ: x becomes operands once, then every block of features is a piece of work."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import ENOUGH, limit_threads, open_function
from qdsl.codegen.plan import Plan
from qdsl.codegen.simd import decode, inputs, panel, primitives, rows, tiles
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.state import State, ceil_div, div, mod
from qdsl.codegen.tir import i64


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """The kernels that the plan's variants call."""
    steps = {s.function: s.args for v in plan.variants for s in v.steps}
    return {name: _linear(plan, name, args) for name, args in steps.items() if name.startswith("linear_")}


def _linear(plan: Plan, name: str, args: tuple[str, ...]) -> tirx.PrimFunc:
    b, code = plan.blocked, plan.scheme.code.dtype
    folds = name == "linear_folded"
    by_tiles = folds or name == "linear_tiles"
    with open_function(plan, name, args) as (builder, own):
        width = 512 if "avx512" in plan.target.units else 256
        s = State(plan, b, own, by_tiles, name == "linear_rows" and b.tiles and b.planes > 1, folds)
        pairs = code if decode.pairs_of_floats(b, code) and not s.floats else None
        rows_of_b = b.tile_inputs // b.depth if by_tiles else None
        with primitives.imported(s.unit, width, b.decode == "look up", rows_of_b, pairs, b.direct and b.flips):
            k, m = own.sizes["k"], own.sizes["m"]
            together = 2 * LANES if by_tiles else panel.at_once(s) if name == "linear_panel" else rows.at_once(s)[-1]
            s.tokens = T.bind(ceil_div(m, together) * i64(together))
            s.padded = T.bind(ceil_div(k, s.multiple) * i64(s.multiple))
            inputs.allocate(s)
            inputs.fill(s)
            blocks = T.bind(ceil_div(own.buffers["y"].shape[1], FEATURES))
            if by_tiles:
                _by_tiles(s, blocks)
            else:
                with _parallel(s, blocks) as block:
                    (panel if name == "linear_panel" else rows).block_of(s, block)
    return builder.get()


def _parallel(s: State, count: tirx.Expr):
    """A loop over pieces of all products, which are enough for so many threads."""
    products = s.own.sizes["m"] * s.own.sizes["k"] * s.own.buffers["y"].shape[1]
    limit_threads(div(products, i64(ENOUGH)))
    return T.parallel(i64(0), count)


def _by_tiles(s: State, blocks: tirx.Expr) -> None:
    if s.folds:
        _many(s, blocks)
        return
    with T.If(s.own.sizes["m"] <= i64(LANES)):
        with T.Then(), _parallel(s, blocks) as block:
            tiles.few(s, block)
        with T.Else():
            _many(s, blocks)


def _many(s: State, blocks: tirx.Expr) -> None:
    w = tiles.work(s, blocks)
    pairs = div(s.tokens, i64(2 * LANES))
    with _parallel(s, w.pieces) as i:
        block = T.bind(mod(i, w.rows) * w.blocks)
        pair = T.bind(div(i, w.rows) * w.pairs)
        here = T.bind(T.min(w.blocks, blocks - block)), T.bind(T.min(w.pairs, pairs - pair))
        tiles.many(s, block, here[0], pair, here[1])
