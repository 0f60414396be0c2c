"""The frame of Hopper's kernels: Weight, tile -> tirx PrimFunc for sm_90a.

    global memory --ring: two producer warps--> shared memory --consumers--> accumulators --store--> y

What the consumers do is the tile's: warps that multiply few tokens (`warp`; narrow codes as bytes, `planes`), or warpgroups
that multiply many (`wgmma`).
A CTA computes a part of y, features x tokens; or the `split` CTAs of a cluster do, each over its share of k. `reduce` adds
their sums then, as it does with those of the teams of one CTA.

Persistent kernels have as many CTAs as fit on the GPU, each with every so many'th part: the producer fills the ring for
the next part while the consumers store the last. The last round rarely has a part for every CTA. If it has one for no
more than half of them, the pairs of a cluster take a part each, and each CTA half of k (`tail`):

    3.4 parts for each of 132 CTAs     round 0   1   2   3            round 0   1   2   3
                                             ##  ##  ##  ##                  ##  ##  ##  #
                                             ##  ##  ##      idle            ##  ##  ##  #
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import mma, overlap, ring, store, wgmma_bytes
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when
from qdsl.codegen.cuda.host import MULTIPROCESSORS
from qdsl.codegen.cuda.kernel import Cut, Kernel
from qdsl.codegen.cuda.reduce import SUM, Epilogue, reduce, store_partials
from qdsl.codegen.cuda.ring import Boxes, Cursor, Ring
from qdsl.codegen.cuda.stage import Stage
from qdsl.codegen.cuda.weight import Weight

SHARED = 227 * 1024  # bytes that one CTA can have on sm_90
SM_SHARED, RESERVED = 228 * 1024, 1024  # bytes of all CTAs of an SM, of which each costs some more


def lower(
    name: str,
    weight: Weight,
    tile: Cut,
    extra: Sequence[mma.Extra] = (),
    epilogue: Epilogue = SUM,
    parts: int = 1,
) -> tirx.PrimFunc:
    """The kernel (x, q, [s], [z], [o], *extra, y) for k a multiple of 8; x and y have the type `weight.compute`.

    parts  of the weight's features, of which each of y has one of each
    """
    small = fitted(weight, tile)
    assert small is not None, f"{tile}: needs {pool_bytes(weight, tile)} bytes of shared memory"
    tile = small
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        own, others = mma.declare(weight, parts, extra, weight.compute)
        maps, sms = ring.tensor_maps(own, weight, tile), tirx.Var("sms", "int32")
        if tile.persistent or tile.early:
            T.Bind(tirx.call_extern("int32", MULTIPROCESSORS), var=sms)
        T.device_entry()
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.resident}):
            k, ctas = _enter(weight, tile, own, sms, parts)
            stages = Ring(k, _barriers(weight, tile))
            if weight.ones:
                wgmma_bytes.store_ones(k)
            with when(k.thread == tile.consumers):
                ring.fetch(maps)
            stages.initialize()
            walk = _Parts(k, ctas)
            if weight.table:
                with when(k.thread < tile.consumers):
                    k.store_table(tile.consumers)
            if not tile.early:
                overlap.wait()
                overlap.let_in()
            with T.If(k.thread >= tile.consumers):
                with T.Then():
                    if tile.registers:
                        ptx("setmaxnreg.dec.sync.aligned.u32", tile.registers[1])
                    with when(k.thread // 32 == tile.consumers // 32), when(T.cuda.elect_sync()):
                        boxes = Boxes(k, stages, maps)
                        with walk.each() as part:
                            begin, end = _stages_of(part)
                            if tile.early:
                                useful = _early(walk, begin, end, sms * residents(weight, tile))
                                begin = boxes.fill_first(part, begin, end, useful, overlap.wait)
                            boxes.fill(part, begin, end)
                    if weight.grouped or weight.token_scale:
                        warp = k.thread // 32 - (tile.consumers // 32 + 1)
                        with when(tirx.all(warp >= 0, warp < tile.fill_warps)):
                            if tile.early and weight.token_scale:
                                overlap.wait()  # for what the predecessor computes
                            cursor = Cursor(tile.stages, warp, 1)
                            with walk.each() as part:
                                ring.fill_groups(part, stages, cursor, warp, *_stages_of(part))
                with T.Else():
                    if tile.registers:
                        ptx("setmaxnreg.inc.sync.aligned.u32", tile.registers[0])
                    if weight.table:
                        ptx("bar.sync", T.uint32(1), T.uint32(tile.consumers))  # all of it is there
                    if tile.early:
                        overlap.wait()
                        overlap.let_in()
                    consumer = tile.consumer(walk.only or k, stages)
                    with walk.each() as part:
                        direct = tile.finish(part, epilogue, others) if tile.direct else None
                        summed = consumer.multiply(*_stages_of(part))
                        if epilogue.correct:
                            consumer.correct(part, lambda m: epilogue.correction(m, others))
                        _store(part, consumer.acc, summed, epilogue, others, own["y"], direct)
    return builder.get()


def _early(walk: _Parts, begin, end, places):
    """Whether the ring is filled with codes while the predecessor still runs.

    places  CTAs that the GPU holds at once

    If all of a share fits into the ring; or if CTAs come in as the predecessor's leave, and memory has nothing else to
    do. CTAs that have been there from the beginning would only take bandwidth from it.
    """
    return tirx.any(end - begin <= walk.k.tile.stages, walk.ctas * 2 > places)


def residents(weight: Weight, tile: Cut) -> int:
    """CTAs that an SM holds at once."""
    return min(tile.resident, SM_SHARED // (pool_bytes(weight, tile) + RESERVED))


def _store(k: Kernel, acc, summed, epilogue: Epilogue, buffers, y, direct: store.Direct | None):
    """A part's sums to y."""
    tile = k.tile

    def alone():
        if direct:
            direct.store(acc, y)
        else:
            shared(1)

    def shared(cluster: int):
        store_partials(k, acc, summed)
        reduce(k, cluster, epilogue, buffers, y)

    if not tile.tail:
        return alone() if tile.split == 1 else shared(tile.split)
    with T.If(k.halved):
        with T.Then():
            shared(tile.cluster)
        with T.Else():
            alone()


def _enter(weight, tile, buffers, sms, parts: int):
    """The launch grid and the names in scope on the device; (CTA's index, all CTAs)."""
    M, N = buffers["y"].shape
    size = tile.cluster
    count = T.cast(ceildiv(M, tile.tokens), "int32") * T.cast(ceildiv(N, tile.features // parts), "int32")
    clusters = count
    if tile.persistent:
        clusters = tirx.truncdiv(sms, size)
        if not tile.tail:
            clusters = tirx.min(count, clusters)
    cta = T.cta_id([clusters * size])
    rank = T.cta_id_in_cluster([size]) if size > 1 else T.int32(0)
    thread = T.thread_id([tile.threads])
    pool = T.alloc_buffer((pool_bytes(weight, tile),), "uint8", scope="shared.dyn")
    k = Kernel.of(weight, tile, buffers, thread=thread, pool=pool, rank=rank if tile.cluster > 1 else None,
                  partials=_partials(weight, tile), table_start=_table(weight, tile), parts=parts)  # fmt: skip
    return k, (cta, clusters * size)


GROUP = 4  # rows of parts that are walked together: their tokens and their weights both stay in the L2 cache


class _Parts:
    """The parts of y of a CTA, (its index, all CTAs): down the tokens within a group of rows, then along the features."""

    def __init__(self, k: Kernel, ctas):
        self.k, (self.cta, self.ctas) = k, ctas
        tile = k.tile
        self.rows, self.columns = (k.M + (tile.tokens - 1)) // tile.tokens, (k.N + (k.outputs - 1)) // k.outputs
        self.only = None if tile.persistent else self._part(tirx.truncdiv(self.cta, tile.split))

    @contextmanager
    def each(self):
        """A loop over the parts: the names in scope for each."""
        tile, cta, ctas = self.k.tile, self.cta, self.ctas
        if not tile.persistent:
            yield self.only
            return
        parts = self.rows * self.columns
        whole = tirx.truncdiv(parts, ctas)  # rounds with a part for every CTA
        rest = parts - whole * ctas
        if not tile.tail:
            with T.serial(0, whole + T.cast(cta < rest, "int32"), unroll=False) as i:
                yield self._part(i * ctas + cta)
            return
        cluster = tirx.truncdiv(cta, tile.cluster)
        short = rest * tile.cluster <= ctas
        last = register("int32", T.cast(T.if_then_else(short, cluster, cta) < rest, "int32"))
        with T.serial(0, whole + last[0], unroll=False) as i:
            halved = register("int32", T.cast(tirx.all(i == whole, short), "int32"))
            yield self._part(i * ctas + T.if_then_else(halved[0] != 0, cluster, cta), halved[0] != 0)

    def _part(self, index, halved=None) -> Kernel:
        place = T.alloc_local([2], "int32")
        with T.If(self.rows == 1):
            with T.Then():  # spared the latency of divisions
                assign(place, 0, 0)
                assign(place, 1, index)
            with T.Else():
                group = tirx.truncdiv(index, self.columns * GROUP)
                within = index - group * (self.columns * GROUP)
                height = tirx.min(self.rows - group * GROUP, GROUP)
                assign(place, 0, group * GROUP + tirx.truncmod(within, height))
                assign(place, 1, tirx.truncdiv(within, height))
        # The last tokens are those that end with x: TMA takes longer for rows that x has not than for those it has. What
        # the part before has as well is not stored again.
        tile, first = self.k.tile, place[0] * self.k.tile.tokens
        m0 = register("int32", tirx.min(first, tirx.max(self.k.M - tile.tokens, 0)))
        return replace(self.k, m0=m0[0], first=first, o0=place[1] * (tile.features // 16), halved=halved)


def _stages_of(k: Kernel):
    """The stages of the CTA's share of k, first and end.

    A persistent kernel's teams go on around the ring from part to part, so every part has as many stages for each team, and
    rounds of the loop are whole: what lies beyond K is zero.
    """
    tile, size = k.tile, k.tile.slice
    if not tile.persistent and tile.together == 1:
        first, end = k.share
        return first // size, (end + (size - 1)) // size
    whole = tile.together * tile.teams
    rounds = (k.k_tiles + (size * whole - 1)) // (size * whole)
    if not tile.tail:
        return T.int32(0), rounds * whole
    half = (rounds + 1) // 2 * whole
    first = register("int32", T.if_then_else(k.halved, k.rank * half, T.int32(0)))
    return first[0], T.if_then_else(tirx.all(k.halved, k.rank == 0), half, rounds * whole)


def pool_bytes(weight: Weight, tile: Cut) -> int:
    return _table(weight, tile) + weight.table_bytes(tile.looks_up_pairs) + tile.own_bytes


def _table(weight: Weight, tile: Cut) -> int:
    """Where the weight's table begins: behind the barriers."""
    return _barriers(weight, tile) + Ring.barrier_bytes(tile)


def _barriers(weight: Weight, tile: Cut) -> int:
    """Where the barriers begin: behind the stages and what becomes of the sums."""
    sums = store.partial_bytes(tile) if tile.cluster * tile.teams > 1 else 0
    if tile.direct:
        staged = store.staging_bytes(tile)
        return max(_stages(weight, tile) + staged if tile.persistent else max(_stages(weight, tile), staged), sums)
    return max(_partials(weight, tile) + sums, _stages(weight, tile))


def _partials(weight: Weight, tile: Cut) -> int:
    """Where partial sums are: over the stages, unless those are being filled for the next part."""
    return _stages(weight, tile) if tile.persistent and not tile.direct else 0


def _stages(weight: Weight, tile: Cut) -> int:
    return tile.stages * Stage(weight, tile).offset()


def fitted(weight: Weight, tile: Cut) -> Cut | None:
    """The tile with as many stages as fit into shared memory: wide codes, scales and zeros of small groups take more of it.

    At the least two for each team, even if an SM then holds fewer CTAs than the tile was made for; None if not even those.
    Where there would be no more than two, stages are half as long: of two, one is being multiplied while the other is
    filled, and nothing is on its way when that takes longer.
    """
    most, found, least = min(SHARED, SM_SHARED // tile.resident - RESERVED), tile, 2 * tile.teams
    while pool_bytes(weight, found) > most and found.stages > least:
        found = replace(found, stages=found.stages - tile.teams)
    fits = pool_bytes(weight, found) <= SHARED
    if tile.halved and found.stages == least and not (fits and tile.stages == least):
        return fitted(weight, cast("Cut", tile.halved))  # of the same class
    return found if fits else None


def order(weight: Weight, tile: Cut) -> str | None:
    """Names the order in which the products of one number of y are summed; equal names, equal bits (see `Stage.order`).

    A team goes through its stages by rising k, 16 of k at a time, whatever else the tile says; where sums are corrected,
    they are rounded after every step as well. Sums of planes of bytes are rounded after a step alone, and after a stage, and
    so is x, by what is in the stage. None: how many parts there are decides which of them are summed in halves.
    """
    if weight.sums == "uint32":
        return "integers"  # are summed exactly in any order
    if tile.tail:
        return None
    span = f"by {64 * weight.unit * tile.slice}"
    share = "1 team" if tile.teams == 1 else f"{tile.teams} teams {span}"
    share = share if tile.split == 1 else f"{tile.split} CTAs {span}, of {share}"
    if tile.correct == "planes":
        return f"planes {share}, sums of {Stage(weight, tile).step}"
    if tile.correct == "sums":
        return f"mma {share}, {Stage(weight, tile).scaled}"
    if weight.promoted:
        return f"wgmma {share}, adds sums of {32 * tile.batch}{', turned' if tile.turned else ''}"
    return f"wgmma {share}"
