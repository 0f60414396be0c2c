"""Accumulators of warpgroups -> y: through shared memory, so that neighbouring threads store along a row of y."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import ptx, when, wide
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.stage import Stage

FINISHED = 128  # tokens whose sums go through the epilogue at once: those of twice as many have no room beside the sums
PITCH = 64 * 2 + 16  # bytes of a staged token: 64 features, and padding that puts 8 rows into different banks


def staging_bytes(tile) -> int:
    return tile.consumers // 128 * tile.staged * PITCH


def partial_bytes(tile) -> int:
    return 4 * math.prod(tile.partials)


def store_direct(k: Kernel, acc, epilogue, buffers, y):
    """A warpgroup has all of the sums of its features: epilogue, rounding, and 16 tokens at a time to y.

    A persistent kernel stages them behind the ring, which is being filled for the next part; others over it.
    """
    tile, group = k.tile, k.thread // 128
    first = tile.stages * Stage(k.weight, tile).offset() // 2 if tile.persistent else 0
    staging = k.shared((first + staging_bytes(tile) // 2,), k.weight.compute)
    own = first + group * (tile.staged * PITCH // 2)  # the warpgroup's
    sync = lambda: ptx("bar.sync", T.cast(group + 2, "uint32"), T.uint32(128))  # 1 is for all consumers
    if not tile.persistent:
        ptx("bar.sync", T.uint32(15), T.uint32(tile.consumers))  # nobody reads the ring any more
    for f in range(tile.blocks):
        n0 = (k.o0 + (group * tile.blocks + f) * 4) * k.block_outputs
        for token in range(0, tile.tokens, tile.staged):
            if token % FINISHED == 0:
                pairs = _finished(k, acc, f, token, n0, epilogue, buffers)
            count = min(tile.staged, tile.tokens - token)
            with when(k.stores(k.m0 + token, count)):
                sync()  # the tokens staged before have been read
                for some in range(0, count, 16):  # the four matrices of one stmatrix
                    place = own + some * (PITCH // 2)
                    _stage_tokens(k, pairs, token % FINISHED + some, min(16, count - some), staging, place)
                sync()
                _store_rows(k, staging, own, k.m0 + token, n0, count, y)


def _finished(k: Kernel, acc, f: int, token: int, n0, epilogue, buffers):
    """Block f of up to 128 tokens as numbers of y, two tokens in a register: [token tile, feature c or c + 8].

    All at once: what the epilogue loads is then on its way together, for no barrier is in between.
    """
    lane, warp, half, own = k.lane, k.thread // 32 % 4, k.weight.half.ptx, k.block_outputs
    across, tiles = own // 8, min(FINISHED, k.tile.tokens - token) // 8
    pairs = T.alloc_local([across * tiles], "uint32")
    for i in range(tiles):
        for h in range(across):
            values = []
            for p in range(2):
                first = (f * k.tile.tokens + token) // 2 + 4 * i + 2 * h + p
                m = tirx.min(k.m0 + token + 8 * i + lane % 4 * 2 + p, k.M - 1)
                n = tirx.min(n0 + warp * own + lane // 4 + 8 * h, k.N - 1)
                sums = [k.weight.finished(acc[first + 2 * part]) for part in range(k.parts)]
                values.append(epilogue(sums, wide(m), k.features(n), buffers))
            ptx(f"cvt.rn.{half}x2.f32", pairs[across * i + h], values[1], values[0])
    return pairs


def _stage_tokens(k: Kernel, pairs, token: int, count: int, staging, start):
    """Tokens token .. token + count of those finished to the staging, from `start` on.

    A warp holds matrices of 8 features x 8 tokens, neighbouring tokens in a register; stmatrix with .trans stores them
    as rows of 8 features. Lane l names row l % 8 of matrix l // 8: token tile l // 16, features 8 (l // 8 % 2) on; where
    the two parts of features make one matrix, token tile l // 8.
    """
    lane, warp, own = k.lane, k.thread // 32 % 4, k.block_outputs
    across = own // 8
    matrices, first = across * (count // 8), across * (token // 8)
    tile = lane // (8 * across) if matrices > across else 0
    at = (tile * 8 + lane % 8) * (PITCH // 2) + warp * own + (lane // 8 % 2 * 8 if across > 1 else 0)
    address = staging.ptr_to([start + at])
    stored = (pairs[first + r] for r in range(matrices))
    ptx(f"stmatrix.sync.aligned.m8n8.x{matrices}.trans.shared.b16", address, *stored)


def _store_rows(k: Kernel, staging, own, m0, n0, tokens: int, y):
    """Staged tokens to y[m0 .., n0 .. n0 + 64 or 32], in pieces of eight features."""
    pieces = 8 // k.parts
    words, base = T.alloc_local([4], "uint32"), T.alloc_local([1], "uint64")
    ptx("cvta.to.global.u64", base[0], y.ptr_to([T.int64(0), T.int64(0)]))
    aligned = tirx.all(k.N % 8 == 0, base[0] % T.uint64(16) == T.uint64(0))
    for i in range(-(-tokens * pieces // 128)):
        piece = i * 128 + k.thread % 128
        row, n = piece // pieces, n0 + piece % pieces * 8
        m, at = m0 + row, own + row * (PITCH // 2) + piece % pieces * 8
        with when(tirx.all(row < tokens, k.stores(m), n < k.N)), T.If(aligned):
            with T.Then():
                ptx("ld.shared.v4.b32", *(words[r] for r in range(4)), staging.ptr_to([at]))
                ptx("st.global.v4.b32", y.ptr_to([wide(m), wide(n)]), *(words[r] for r in range(4)))
            with T.Else(), T.serial(0, 8, unroll=False) as j, when(n + j < k.N):
                T.buffer_store(y, staging[at + j], [wide(m), wide(n + j)])
