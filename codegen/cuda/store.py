"""Accumulators of warpgroups -> y: through shared memory, so that neighbouring threads store along a row of y."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import ptx, when, wide
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.stage import Stage

TOKENS = 16  # that a warpgroup stages at once
PITCH = 64 * 2 + 16  # bytes of a staged token: 64 features, and padding that puts 8 rows into different banks


def staging_bytes(tile) -> int:
    return tile.warpgroups * TOKENS * PITCH


def partial_bytes(tile) -> int:
    return 4 * math.prod(tile.partials)


def store_direct(k: Kernel, acc, epilogue, buffers, y):
    """A warpgroup has all of the sums of its features: epilogue, rounding, and 32 tokens at a time to y.

    stmatrix with .trans turns 8 features x 8 tokens of a warp into rows of 8 features.
    """
    tile, half = k.tile, k.weight.half.ptx
    group, lane, warp = k.thread // 128, k.thread % 32, k.thread // 32 % 4
    first = 0 if not tile.persistent else _staging_start(k)
    staging = k.shared((first // 2 + tile.warpgroups * TOKENS * (PITCH // 2),), k.weight.compute)
    own = first // 2 + group * (TOKENS * PITCH // 2)
    sync = lambda: ptx("bar.sync", T.cast(group + 1, "uint32"), T.uint32(128))
    if not tile.persistent:  # the staging lies over stages that the others may still read
        ptx("bar.sync", T.uint32(15), T.uint32(tile.consumers))
    pairs = T.alloc_local([4], "uint32")
    for f in range(tile.blocks):
        n0 = (k.o0 + (group * tile.blocks + f) * 4) * 16
        for j0 in range(0, tile.tokens, TOKENS):
            tokens = min(TOKENS, tile.tokens - j0)
            with when(k.m0 + j0 < k.M):
                sync()  # the tokens staged before have been read
                for j in range(j0, j0 + tokens, 16):
                    count = min(2, (j0 + tokens - j) // 8)
                    for i in range(count):
                        for h in range(2):
                            values = []
                            for p in range(2):
                                value = acc[f * (tile.tokens // 2) + (j // 8 + i) * 4 + 2 * h + p]
                                m = tirx.min(k.m0 + j + 8 * i + lane % 4 * 2 + p, k.M - 1)
                                n = tirx.min(n0 + warp * 16 + lane // 4 + 8 * h, k.N - 1)
                                values.append(epilogue(value, wide(m), wide(n), buffers))
                            ptx(f"cvt.rn.{half}x2.f32", pairs[2 * i + h], values[1], values[0])
                    matrix = lane // 8  # of the four that the lanes address: token half, feature half
                    row = j - j0 + (matrix // 2 * 8 if count == 2 else 0) + lane % 8
                    at = staging.ptr_to([own + row * (PITCH // 2) + warp * 16 + matrix % 2 * 8])
                    ptx(
                        f"stmatrix.sync.aligned.m8n8.x{2 * count}.trans.shared.b16",
                        at,
                        *(pairs[r] for r in range(2 * count)),
                    )
                sync()
                _store_rows(k, staging, own, k.m0 + j0, n0, tokens, y)


def _staging_start(k: Kernel) -> int:
    return k.tile.stages * Stage(k.weight, k.tile).offset()


def _store_rows(k: Kernel, staging, own, m0, n0, tokens: int, y):
    """Staged tokens to y[m0 .., n0 .. n0 + 64], in pieces of eight features."""
    words, base = T.alloc_local([4], "uint32"), T.alloc_local([1], "uint64")
    ptx("cvta.to.global.u64", base[0], y.ptr_to([T.int64(0), T.int64(0)]))
    aligned = tirx.all(k.N % 8 == 0, base[0] % T.uint64(16) == T.uint64(0))
    for i in range(-(-tokens * 8 // 128)):
        piece = i * 128 + k.thread % 128
        row, n = piece // 8, n0 + piece % 8 * 8
        m, at = m0 + row, own + row * (PITCH // 2) + piece % 8 * 8
        with when(tirx.all(row < tokens, m < k.M, n < k.N)), T.If(aligned):
            with T.Then():
                ptx("ld.shared.v4.b32", *(words[r] for r in range(4)), staging.ptr_to([at]))
                ptx("st.global.v4.b32", y.ptr_to([wide(m), wide(n)]), *(words[r] for r in range(4)))
            with T.Else(), T.serial(0, 8, unroll=False) as j, when(n + j < k.N):
                T.buffer_store(y, staging[at + j], [wide(m), wide(n + j)])


def _sync(k: Kernel):
    ptx("bar.sync", T.uint32(1), T.uint32(k.tile.consumers))


def store_partials(k: Kernel, acc, summed):
    """The sums of every team of the CTA to its shared memory, [team, token, feature], where the stages were.

    summed  whether the team has a share of k; else its sums are zeros
    """
    tile, lane, width = k.tile, k.lane, k.tile.tokens // 2
    partials = k.shared(tile.partials, "float32")
    team = k.thread // (128 * tile.warpgroups)
    _sync(k)  # all consumers are done with the stages
    for f in range(tile.blocks):
        feature = k.block(f) * 16 + lane // 4
        for r in range(width):
            token = r // 4 * 8 + lane % 4 * 2 + r % 2
            value = T.if_then_else(summed, acc[f * width + r], T.float32(0))
            T.buffer_store(partials, value, [team, token, feature + r // 2 % 2 * 8])
    _sync(k)
