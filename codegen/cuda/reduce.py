"""Accumulators -> y: the teams' partial sums through shared memory, added, through the epilogue, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, when, wide
from qdsl.codegen.cuda.kernel import Kernel

Epilogue = Callable[[tirx.Expr, tirx.Expr, tirx.Expr, Mapping[str, tirx.Buffer]], tirx.Expr]


def store_partials(k: Kernel, acc):
    """Every warp's accumulators to [team, token, feature], where the stages were."""
    tile = k.tile
    T.evaluate(T.cuda.cta_sync())  # all teams are done with the stages
    partials = k.shared(tile.partials, "float32")
    for f in range(tile.feature_tiles):
        for j in range(tile.token_tiles):
            for i in tile.result:
                token = (k.token_warp * tile.token_tiles + j) * 8 + k.lane % 4 * 2 + i % 2
                feature = (k.feature_warp * tile.feature_tiles + f) * 16 + i // 2 * 8 + k.lane // 4
                value = acc[4 * (f * tile.token_tiles + j) + i]
                if tile.correct == "sums":
                    value = value * T.float32(1 / k.weight.factor(i // 2))
                if tile.tokens >= 8:
                    T.buffer_store(partials, value, [k.team, token, feature])
                else:
                    with when(token < tile.tokens):
                        T.buffer_store(partials, value, [k.team, token, feature])
    T.evaluate(T.cuda.cta_sync())


def reduce(k: Kernel, epilogue: Epilogue, buffers, y):
    """Adds the teams' sums in order, applies the epilogue, rounds. Neighbouring threads store along a row."""
    tile = k.tile
    partials = k.shared(tile.partials, "float32")
    total = T.alloc_local([1], "float32")
    items = tile.tokens * tile.features
    with T.serial(0, -(-items // tile.threads)) as i:
        item = i * tile.threads + k.thread
        token, feature = item // tile.features, item % tile.features
        m, n = k.m0 + token, k.o0 * 16 + feature
        with when(tirx.all(item < items, m < k.M, n < k.N)):
            assign(total, 0, partials[0, token, feature])
            for team in range(1, tile.teams):
                assign(total, 0, total[0] + partials[team, token, feature])
            value = epilogue(total[0], wide(m), wide(n), buffers)
            T.buffer_store(y, T.cast(value, str(y.dtype)), [wide(m), wide(n)])
