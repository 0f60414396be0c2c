"""Tensor-core linear layers on Hopper: Weight, WarpgroupTile -> tirx PrimFunc for sm_90a.

The same equation and the same stored fragments as in `mma`, which see. Here a warpgroup, four warps, multiplies blocks of
64 output features by up to 256 tokens with one instruction: A, the weights, from registers, made out of the stored
codes in their own order; B, the tokens, from shared memory.

    global memory --ring: two producer warps--> shared memory --consumer warpgroups--> accumulators --store--> y

The part of y that one CTA computes, and who computes it, for two warpgroups of two blocks each:

                  tokens 0 .. 255
    features   0 |  warpgroup 0  |      A cluster of `multicast` CTAs takes as many such parts, one below the other:
              64 |       "       |      they have the same tokens, and each loads a part of them for all.
             128 |  warpgroup 1  |      A cluster of `split` CTAs takes one part, and each CTA a share of k; `reduce`
             192 |       "       |      adds their sums. So it does with those of the teams of one CTA.

Persistent kernels have as many clusters as fit on the GPU, each with every so many'th part: the producer fills the ring
for the next part while the consumers store the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import mma, overlap, ring, store
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when
from qdsl.codegen.cuda.correct import WeightStep
from qdsl.codegen.cuda.host import MULTIPROCESSORS
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.reduce import Epilogue, reduce, store_partials
from qdsl.codegen.cuda.ring import ROW, Cursor, Ring
from qdsl.codegen.cuda.stage import Stage
from qdsl.codegen.cuda.weight import Weight

SHARED = 227 * 1024  # bytes that one CTA can have on sm_90


def tiles() -> tuple[WarpgroupTile, ...]:
    """The tiles, by rising number of tokens.

    Up to 128 tokens the weights' bytes count: few features and a split of k give every SM a part. Beyond, products do.
    """
    large = {"registers": (232, 40)}  # 128 sums a thread, and weights in the making
    return (
        WarpgroupTile("w32", 32, warpgroups=2, blocks=1, teams=2, slice=2, stages=8),
        WarpgroupTile("w32_wide", 32, warpgroups=2, blocks=2, teams=1, slice=2, stages=8),
        WarpgroupTile("w32_split", 32, warpgroups=2, blocks=1, teams=1, slice=2, stages=8, split=2),
        WarpgroupTile("w32_narrow", 32, warpgroups=1, blocks=1, teams=2, slice=4, stages=6, split=2),
        WarpgroupTile("w32_ahead", 32, warpgroups=2, blocks=1, teams=1, slice=2, stages=5, split=2, ahead=10),
        WarpgroupTile("w64", 64, warpgroups=2, blocks=1, teams=1, slice=4, stages=4),
        WarpgroupTile("w64_wide", 64, warpgroups=2, blocks=2, teams=1, slice=2, stages=6, batch=2),
        WarpgroupTile("w64_split", 64, warpgroups=2, blocks=1, teams=2, slice=2, stages=8, split=2),
        WarpgroupTile("w64_narrow", 64, warpgroups=1, blocks=1, teams=2, slice=4, stages=4, split=2),
        WarpgroupTile("w64_ahead", 64, warpgroups=2, blocks=1, teams=1, slice=2, stages=4, split=2, ahead=8),
        WarpgroupTile("w128", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5),
        WarpgroupTile("w128_wide", 128, warpgroups=2, blocks=2, teams=1, slice=2, stages=4, batch=2, persistent=True, **large),
        WarpgroupTile("w128_split", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5, split=2),
        WarpgroupTile("w128_narrow", 128, warpgroups=1, blocks=1, teams=2, slice=2, stages=4, split=2),
        WarpgroupTile("w152", 152, warpgroups=2, blocks=1, teams=1, slice=2, stages=4, persistent=True, **large),
        WarpgroupTile("w256", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, persistent=True, **large),
        WarpgroupTile("w256_split", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, split=2, **large),
        WarpgroupTile("w256_pair", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, multicast=2, **large),
        WarpgroupTile("w256_pairs", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, multicast=2, persistent=True, **large),
    )  # fmt: skip


@dataclass(frozen=True)
class WarpgroupTile:
    """The part of y that one CTA computes, and how its warpgroups and its cluster share the work.

    Right for every M and N, and every K that is a multiple of 8: TMA wants rows of x on 16 bytes.
    """

    name: str
    tokens: int  # tokens of one CTA: the n of wgmma
    warpgroups: int  # warpgroups of a team, side by side along features
    blocks: int  # blocks of 64 features of one warpgroup
    teams: int  # teams along k: team t takes every teams'th stage, beginning with stage t
    slice: int  # tiles of 64 along k in one stage
    stages: int
    split: int = 1  # CTAs of a cluster along k
    multicast: int = 1  # CTAs of a cluster along features: they load their tokens for each other
    batch: int = 4  # times 16 of k whose weights are made, and multiplied, together
    resident: int = 1  # CTAs that an SM must be able to hold: a limit on registers
    registers: tuple[int, int] | None = None  # of a consumer and of a producer thread, if they are redistributed
    ahead: int = 0  # tiles of 64 along k that are asked for before the predecessor has ended (`overlap`)
    persistent: bool = False  # as many clusters as the GPU has room for, instead of one for every part of y

    correct = "weights"
    result = (0, 1, 2, 3)  # registers of eight tokens, as in `Tile.result`
    rings = 1
    swizzle = 1024  # bytes that the stages are aligned to
    fillers = 32  # threads that fill scales and zeros

    def __post_init__(self):
        assert 4 * self.slice // self.batch % 2 == 0, f"{self}: the batches of a stage alternate between register sets"
        # A slot belongs to one team: a team that met the slots of others could be a whole phase ahead of them, and a
        # barrier does not tell the phase after the next from the last.
        assert self.stages % self.teams == 0 and self.threads <= 1024, self
        # A slot is released once the next is being multiplied.
        assert self.stages >= 2 * self.teams, self
        assert 1 in (self.split, self.multicast) and self.tokens % (8 * self.multicast) == 0, self
        assert not self.persistent or (self.direct and not self.ahead), self

    def __str__(self):
        parts = f"{self.tokens} tokens x {self.features} features, {self.warpgroups}x{self.teams} warpgroups"
        parts += f", {self.stages} stages of {64 * self.slice}"
        parts += f", {self.split} CTAs along k" if self.split > 1 else ""
        parts += f", {self.multicast} CTAs with the same tokens" if self.multicast > 1 else ""
        return f"{self.name}: {parts}{', persistent' if self.persistent else ''}"

    @property
    def direct(self) -> bool:
        """One warpgroup has all of a sum: it goes to y without the detour through partial sums."""
        return self.split == self.teams == 1

    @property
    def features(self) -> int:
        return 64 * self.warpgroups * self.blocks

    @property
    def consumers(self) -> int:
        return self.team_threads * self.teams

    @property
    def team_threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        return self.consumers + (128 if self.registers else 64)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.slice, self.tokens, 64)

    @property
    def longest_step(self) -> int:
        return 64 * self.slice

    @property
    def feature_tiles(self) -> int:
        return self.blocks

    @property
    def cluster(self) -> int:
        """CTAs that share k."""
        return self.split

    def block(self, warp, f: int):
        return (warp // 4 % self.warpgroups * self.blocks + f) * 4 + warp % 4

    @property
    def token_tiles(self) -> int:
        return self.tokens // 8

    def token_warp(self, warp) -> int:
        return 0  # every warp has all tokens

    @property
    def partials(self) -> tuple[int, int, int]:
        return (self.teams, self.tokens, self.features + 4)


def order(tile: WarpgroupTile) -> str:
    """Names the order in which the products of one number of y are summed; equal names, equal bits (see `Stage.order`).

    A team goes through its stages by rising k, 16 of k at a time, whatever else the tile says.
    """
    span = f"by {64 * tile.slice}"
    share = "1 team" if tile.teams == 1 else f"{tile.teams} teams {span}"
    return f"wgmma {share if tile.split == 1 else f'{tile.split} CTAs {span}, of {share}'}"


def pool_bytes(weight: Weight, tile: WarpgroupTile) -> int:
    return _barriers(weight, tile) + Ring.barrier_bytes(tile)


def _barriers(weight: Weight, tile: WarpgroupTile) -> int:
    """Where the barriers begin: behind the stages and what becomes of the sums."""
    stages = tile.stages * Stage(weight, tile).offset()
    if not tile.direct:
        return max(stages, store.partial_bytes(tile))
    return stages + store.staging_bytes(tile) if tile.persistent else max(stages, store.staging_bytes(tile))


def fitted(weight: Weight, tile: WarpgroupTile) -> WarpgroupTile:
    """The tile with as many stages as fit into shared memory: scales and zeros of small groups take more of it."""
    while pool_bytes(weight, tile) > SHARED and tile.stages > 2 * tile.teams:
        tile = replace(tile, stages=tile.stages - tile.teams)
    assert pool_bytes(weight, tile) <= SHARED, f"{tile}: needs {pool_bytes(weight, tile)} bytes of shared memory"
    return tile


def lower(
    name: str,
    weight: Weight,
    tile: WarpgroupTile,
    extra: Sequence[mma.Extra] = (),
    epilogue: Epilogue = lambda acc, m, n, buffers: acc,
) -> tirx.PrimFunc:
    """The kernel (x, q, [s], [z], *extra, y) for k a multiple of 8; x and y have the type `weight.compute`."""
    tile = fitted(weight, tile)
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        own, others = mma.declare(weight, tile, extra, weight.compute)
        maps, sms = ring.tensor_maps(own, tile), tirx.Var("sms", "int32")
        if tile.persistent:
            T.Bind(tirx.call_extern("int32", MULTIPROCESSORS), var=sms)
        T.device_entry()
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.resident}):
            k, cluster, rank = _enter(weight, tile, own, sms)
            stages = Ring(k, _barriers(weight, tile))
            stages.initialize()
            if tile.ahead:
                with _parts(k, cluster, rank) as part:
                    overlap.prefetch(part, tile.ahead)
            overlap.wait()
            with T.If(k.thread >= tile.consumers):
                with T.Then():
                    if tile.registers:
                        ptx("setmaxnreg.dec.sync.aligned.u32", tile.registers[1])
                    with when(k.thread // 32 == tile.consumers // 32):
                        cursor = Cursor(tile.stages, T.int32(0), 1)
                        with _parts(k, cluster, rank) as part:
                            ring.fill_boxes(part, stages, maps, cursor, rank, *_stages_of(part))
                    if weight.grouped:
                        with when(k.thread // 32 == tile.consumers // 32 + 1):
                            cursor = Cursor(tile.stages, T.int32(0), 1)
                            with _parts(k, cluster, rank) as part:
                                ring.fill_groups(part, stages, cursor, *_stages_of(part))
                with T.Else():
                    if tile.registers:
                        ptx("setmaxnreg.inc.sync.aligned.u32", tile.registers[0])
                    consumer = Consumer(k, stages)
                    with _parts(k, cluster, rank) as part:
                        summed = consumer.multiply(*_stages_of(part))
                        if tile.direct:
                            store.store_direct(part, consumer.acc, epilogue, others, own["y"])
                        else:
                            store_partials(part, consumer.acc, summed)
                            reduce(part, epilogue, others, own["y"])
            if tile.multicast > 1:
                T.evaluate(T.cuda.cluster_sync())  # nobody leaves while others write into its ring
    return builder.get()


def _enter(weight, tile, buffers, sms):
    """The launch grid and the names in scope on the device; the cluster's index and the CTA's rank in it."""
    M, N = buffers["y"].shape
    size = tile.split * tile.multicast
    parts = T.cast(ceildiv(M, tile.tokens), "int32") * T.cast(ceildiv(N, tile.features * tile.multicast), "int32")
    clusters = tirx.min(parts, tirx.truncdiv(sms, size)) if tile.persistent else parts
    cta = T.cta_id([clusters * size])
    rank = T.cta_id_in_cluster([size]) if size > 1 else T.int32(0)
    thread = T.thread_id([tile.threads])
    pool = T.alloc_buffer((pool_bytes(weight, tile),), "uint8", scope="shared.dyn")
    k = Kernel.of(weight, tile, buffers, thread=thread, pool=pool, rank=rank if tile.split > 1 else None)
    return k, (cta // size if size > 1 else cta, clusters), rank


GROUP = 4  # rows of parts that are walked together: their tokens and their weights both stay in the L2 cache


@contextmanager
def _parts(k: Kernel, cluster, rank):
    """A loop over the parts of y of a cluster, (its index, all clusters): the names in scope for each.

    Down the tokens within a group of rows, then along the features.
    """
    tile, (first, clusters) = k.tile, cluster
    rows, span = (k.M + (tile.tokens - 1)) // tile.tokens, tile.features * tile.multicast
    columns = (k.N + (span - 1)) // span

    def part(index) -> Kernel:
        group = tirx.truncdiv(index, columns * GROUP)
        within = index - group * (columns * GROUP)
        height = tirx.min(rows - group * GROUP, GROUP)
        row = register("int32", group * GROUP + tirx.truncmod(within, height))
        column = register("int32", tirx.truncdiv(within, height) * tile.multicast + (rank if tile.multicast > 1 else 0))
        return replace(k, m0=row[0] * tile.tokens, o0=column[0] * (tile.features // 16))

    if tile.persistent:
        with T.serial(0, tirx.truncdiv(rows * columns - first + (clusters - 1), clusters), unroll=False) as i:
            yield part(first + i * clusters)
    else:
        yield part(first)


def _stages_of(k: Kernel):
    """The stages of the CTA's share of k, first and end."""
    first, end = k.share
    return first // k.tile.slice, (end + (k.tile.slice - 1)) // k.tile.slice


class Consumer:
    """A warpgroup's share of the multiplication.

    A batch of wgmmas runs while the fragments of the next are made, in another set of registers.
    """

    def __init__(self, k: Kernel, stages: Ring):
        self.k, self.ring, self.tile, self.stage = k, stages, k.tile, Stage(k.weight, k.tile)
        tile, self.width = self.tile, self.tile.tokens // 2
        # From lane 0, so that the compiler knows that the warp agrees, and computes addresses once for all lanes.
        team = T.alloc_local([1], "int32")
        ptx("shfl_sync.idx.b32", team[0], k.team, T.uint32(0), T.uint32(31), T.uint32(0xFFFFFFFF))
        self.team = team[0] if tile.teams > 1 else T.int32(0)
        self.cursor, self.previous = Cursor(tile.stages, self.team, 0), register("int32", T.int32(0))
        self.steps = WeightStep(k)
        self.fragments = T.alloc_local([2 * tile.batch * tile.blocks * 4], "uint32")
        self.acc = T.alloc_local([tile.blocks * self.width], "float32")  # [block, token tile, register]
        base, words = T.alloc_local([1], "uint64"), T.alloc_local([2], "uint32")
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(base[0]), k.pool.ptr_to([0]), 1, 64, 3))
        ptx("mov.b64", words[0], words[1], base[0])
        self.base, self.low = words, T.alloc_local([1], "uint32")

    def multiply(self, begin, end):
        """acc = the part's features x tokens, over the team's share of stages begin .. end; -> whether there is one."""
        tile, stage, cursor = self.tile, self.stage, self.cursor
        count = register("int32", (end - begin - self.team + (tile.teams - 1)) // tile.teams)
        with T.serial(0, count[0], unroll=False) as i:
            T.evaluate(T.cuda.warp_sync())  # all lanes have read the previous slot
            T.evaluate(T.cuda.mbarrier_wait(self.ring.full(cursor.slot), cursor.phase))
            assign(self.low, 0, self.base[0] + T.cast(cursor.slot * (stage.offset() // 16), "uint32"))
            codes = {}
            for b in range(4 * tile.slice // tile.batch):
                steps = range(b * tile.batch, (b + 1) * tile.batch)
                for j in steps:
                    if j % 4 == 0:
                        codes[j // 4] = self._load_codes(j // 4)
                    if 16 * j % stage.step == 0:
                        self.steps.begin(self.ring.views, cursor.slot, 16 * j // stage.step)
                    for f in range(tile.blocks):
                        self.steps.weights(f, codes[j // 4][f][j % 4], self._fragment(j, f))
                ptx("wgmma.fence.sync.aligned")
                for j in steps:
                    for f in range(tile.blocks):
                        self._issue(j, f, j > 0 or i > 0)  # the first overwrites acc
                ptx("wgmma.commit_group.sync.aligned")
                ptx("wgmma.wait_group.sync.aligned", 1)
                if b == 0:
                    with when(i > 0):
                        self.ring.release(self.previous[0])
            assign(self.previous, 0, cursor.slot)
            cursor.advance(tile.teams)
        ptx("wgmma.wait_group.sync.aligned", 0)
        T.evaluate(T.cuda.warp_sync())
        with when(count[0] > 0):
            self.ring.release(self.previous[0])
        return count[0] > 0

    def _fragment(self, j: int, f: int) -> list:
        """Registers of the A fragment for times j of block f."""
        first = 4 * (j % (2 * self.tile.batch) * self.tile.blocks + f)
        return [self.fragments[first + r] for r in range(4)]

    def _load_codes(self, i: int) -> list:
        """By block, the lane's four words of k tile i of the stage."""
        k, words = self.k, []
        for f in range(self.tile.blocks):
            registers = T.alloc_local([4], "uint32")
            words.append([registers[s] for s in range(4)])
            address = self.ring.views["q"].ptr(self.cursor.slot, k.block(f), i, k.lane, 0)
            ptx("ld.shared.v4.b32", *words[-1], address)
        return words

    def _issue(self, j: int, f: int, add):
        half, width = self.k.weight.half.ptx, self.width
        at = j // 4 * (self.tile.tokens * ROW // 16) + j % 4 * 2  # in units of 16 bytes, from the stage's x on
        descriptor = T.alloc_local([1], "uint64")
        ptx("mov.b64", descriptor[0], self.low[0] + T.uint32(at), self.base[1])
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.tile.tokens}k16.f32.{half}.{half}"
        ptx(
            instruction,
            *(self.acc[f * width + r] for r in range(width)),
            *self._fragment(j, f),
            descriptor[0],
            add,
            1,
            1,
            0,
        )
