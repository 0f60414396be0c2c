"""Tensor-core linear layers on Hopper: Weight, WarpgroupTile -> tirx PrimFunc for sm_90a.

The same equation and the same stored fragments as in `mma`, which see. Here a warpgroup of four warps multiplies 64
output features by up to 256 tokens with one wgmma: A, the weights, from registers, in the very order of the stored
codes; B, the tokens, from shared memory.

    global memory --one producer warp--> shared memory --consumer warpgroups--> accumulators --reduce--> y

                       full[slot]                  empty[slot]
    producer warp   --- TMA, bulk copies ---> slot <--- the slot is read ---   consumer warpgroups

Consumers share the tokens of a stage and split its features. CTAs of a cluster split k into contiguous shares and
add their sums through each other's shared memory, in the order of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import mma, overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when, wide, zeros
from qdsl.codegen.cuda.correct import SumStep, WeightStep
from qdsl.codegen.cuda.fragments import biased
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.reduce import Epilogue
from qdsl.codegen.cuda.stage import FillGroups, Stage, declare_views
from qdsl.codegen.cuda.weight import Weight

SHARED = 227 * 1024  # bytes that one CTA can have on sm_90
ONES = 128  # bytes of the 8 x 8 ones whose product with x is its row sums
ROW = 128  # bytes of a row of 64 tokens' numbers in shared memory, the width of the swizzle


@dataclass(frozen=True)
class WarpgroupTile:
    """The part of y that one cluster computes, and how its CTAs and warpgroups share the work."""

    name: str
    tokens: int  # tokens of one CTA: the n of wgmma
    warpgroups: int  # warpgroups of a team, side by side along features
    blocks: int  # blocks of 64 features of one warpgroup
    teams: int  # teams along k: team t takes every teams'th stage, beginning with stage t
    slice: int  # tiles of 64 along k in one stage
    stages: int
    split: int  # CTAs of a cluster along k
    batch: int = 4  # times 16 of k whose weights are made, and multiplied, together
    resident: int = 1
    registers: tuple[int, int] | None = None  # of a consumer and of a producer thread, if they are redistributed

    correct: str = "weights"  # where scale and zero are applied: "sums" or "weights"

    swizzle = 1024
    rings = 1
    fillers = 32  # threads that fill scales and zeros

    def __post_init__(self):
        assert self.correct == "sums" or 4 * self.slice // self.batch % 2 == 0, (
            f"{self}: the batches of a stage alternate between two register sets"
        )
        assert self.teams <= self.stages and self.threads <= 1024, self

    @property
    def features(self) -> int:
        return 64 * self.warpgroups * self.blocks

    @property
    def consumers(self) -> int:
        return 128 * self.warpgroups * self.teams

    @property
    def threads(self) -> int:
        return self.consumers + (128 if self.registers else 32)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.slice, self.tokens, 64)

    @property
    def longest_step(self) -> int:
        return min(64 * self.slice, 128) if self.correct == "sums" else 64 * self.slice

    @property
    def feature_tiles(self) -> int:
        return self.blocks

    @property
    def token_tiles(self) -> int:
        return self.tokens // 8

    result = (0, 1, 2, 3)

    def block(self, warp, f: int):
        return (warp // 4 % self.warpgroups * self.blocks + f) * 4 + warp % 4

    @property
    def partials(self):
        return (self.teams, self.tokens, self.features + 4)


def pool_bytes(weight: Weight, tile: WarpgroupTile) -> int:
    ring = tile.stages * Stage(weight, tile).offset()
    partial = 4 * math.prod(tile.partials)
    return max(ring, partial) + ONES + 16 * tile.stages


def lower(name, weight: Weight, tile: WarpgroupTile, extra: Sequence[mma.Extra] = (),
          epilogue: Epilogue = lambda acc, m, n, buffers: acc, output: str | None = None) -> tirx.PrimFunc:  # fmt: skip
    """The kernel (x, q, [s], [z], *extra, y) for k a multiple of 8; y has the type `output`, by default that of x."""
    assert pool_bytes(weight, tile) <= SHARED, (tile, pool_bytes(weight, tile))
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        own, others = mma._declare(weight, tile, extra, output or weight.compute)
        maps = _tensor_maps(own, tile)
        T.device_entry()
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.resident}):
            k, rank = _enter(weight, tile, own)
            views = declare_views(k)
            ring = Ring(k)
            total = (k.k_tiles + (tile.slice - 1)) // tile.slice
            begin, end = rank * total // tile.split, (rank + 1) * total // tile.split
            ring.initialize()
            overlap.wait()
            with T.If(k.thread >= tile.consumers):
                with T.Then():
                    if tile.registers:
                        ptx("setmaxnreg.dec.sync.aligned.u32", tile.registers[1])
                    with when(k.thread < tile.consumers + 32):
                        _produce(k, views, ring, maps, begin, end)
                with T.Else():
                    if tile.registers:
                        ptx("setmaxnreg.inc.sync.aligned.u32", tile.registers[0])
                    acc = _consume(k, views, ring, begin, end)
                    _reduce(k, acc, rank, epilogue, others, own["y"])
    return builder.get()


def _tensor_maps(buffers, tile):
    """The TMA descriptors of x and q: what lies outside of a tensor is read as zeros.

    Of x, boxes of 64 numbers of `tokens` rows with the 128-byte swizzle that wgmma reads; of q, the stored blocks.
    """
    (M, K), (O, I, *_) = buffers["x"].shape, buffers["q"].shape
    x = (K, M), (K * 2,), (64, tile.tokens), 3
    q = (T.int64(128), I, O), (T.int64(512), I * 512), (128, tile.slice, tile.features // 16), 0
    maps = {}
    for name, (extents, strides, box, swizzle) in (("x", x), ("q", q)):
        maps[name] = T.Var(f"{name}_map", ty=T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=maps[name])
        box, steps = map(T.int64, box), [T.int64(1)] * len(extents)
        T.evaluate(
            T.tensormap_encode_tiled(
                maps[name], buffers[name].data, *extents, *strides, *box, *steps, descriptor_dtype=str(buffers[name].dtype),
                rank=len(extents), interleave=0, swizzle=swizzle, l2_promotion=2, oob_fill=0,
            )
        )  # fmt: skip
    return maps


def _enter(weight, tile, buffers):
    (M, K), N = buffers["x"].shape, buffers["y"].shape[1]
    columns = T.cast(ceildiv(N, tile.features), "int32")
    cta = T.cta_id([T.cast(ceildiv(M, tile.tokens), "int32") * columns * tile.split])
    if tile.split > 1:
        rank = T.cta_id_in_cluster([tile.split])
    else:
        rank = T.int32(0)
    thread = T.thread_id([tile.threads])
    pool = T.alloc_buffer((pool_bytes(weight, tile),), "uint8", scope="shared.dyn")
    place = T.alloc_local([2], "int32")
    index = cta // tile.split if tile.split > 1 else cta
    # neighbouring CTAs share weights: tokens vary fastest
    rows = T.cast(ceildiv(M, tile.tokens), "int32")
    assign(place, 0, tirx.truncmod(index, rows))
    assign(place, 1, tirx.truncdiv(index, rows))
    k = Kernel(
        weight=weight,
        tile=tile,
        x=buffers["x"],
        q=buffers["q"],
        grouped={role: buffers[role] for role in weight.grouped},
        M=T.cast(M, "int32"),
        N=T.cast(N, "int32"),
        K=T.cast(K, "int32"),
        m0=place[0] * tile.tokens,
        o0=place[1] * (tile.features // 16),
        thread=thread,
        aligned=None,
        pool=pool,
    )
    return k, rank


class Ring:
    """The barriers of the stages."""

    def __init__(self, k: Kernel):
        self.k, self.stages = k, k.tile.stages
        end = (pool_bytes(k.weight, k.tile) - 16 * self.stages) // 8
        buffer = k.shared((end + 2 * self.stages,), "uint64")
        self.buffer, self.start = buffer, end

    def full(self, slot):
        return self.buffer.ptr_to([self.start + slot])

    def empty(self, slot):
        return self.buffer.ptr_to([self.start + self.stages + slot])

    def ones(self):
        return self.k.pool.ptr_to([8 * self.start - ONES])

    def initialize(self):
        k = self.k
        if k.tile.correct == "sums":
            ones = k.shared((2 * self.start,), "uint32")
            with when(k.thread < ONES // 4):
                T.buffer_store(ones, T.uint32(k.weight.half.one * 0x10001), [2 * self.start - ONES // 4 + k.thread])
            ptx("fence.proxy.async.shared::cta")
        with when(k.thread == 0):
            for slot in range(self.stages):
                ptx("mbarrier.init.shared.b64", self.full(slot), T.uint32(1 + 32 * bool(k.weight.grouped)))
                ptx("mbarrier.init.shared.b64", self.empty(slot), T.uint32(4 * k.tile.warpgroups))
            ptx("fence.mbarrier_init.release.cluster")
        T.evaluate(T.cuda.cta_sync())


def _produce(k: Kernel, views, ring: Ring, maps, begin, end):
    """One warp: boxes of q and x by one thread, scales and zeros by all, into every slot that is empty."""
    tile, lane = k.tile, k.thread % 32
    slot, phase = register("int32", T.int32(0)), register("int32", T.int32(1))
    policy = register("uint64", T.uint64(0))
    ptx("createpolicy.fractional.L2::evict_first.b64", policy[0], T.float32(1.0))
    box = tile.slice * (tile.features // 16 * 512 + tile.tokens * ROW)
    load = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    groups = [FillGroups(k, role, views[role], begin * tile.slice) for role in k.weight.grouped]
    with T.serial(begin, end, unroll=False) as i:
        T.evaluate(T.cuda.mbarrier_wait(ring.empty(slot[0]), phase[0]))
        full, first = ring.full(slot[0]), i * tile.slice
        with when(lane == 0):
            ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(box))
            target = views["q"].ptr(slot[0], 0, 0, 0, 0)
            ptx(load.format(3) + ".L2::cache_hint", target, T.address_of(maps["q"]), 0, first, k.o0, full, policy[0])
            for t in range(tile.slice):
                target = views["x"].ptr(slot[0], t, 0, 0)
                ptx(load.format(2), target, T.address_of(maps["x"]), (first + t) * 64, k.m0, full)
        for fill in groups:
            fill.start(slot[0])
            fill.advance(tile.slice)
        if groups:
            ptx("cp.async.mbarrier.arrive.noinc.shared.b64", full)
        _next(slot, phase, tile.stages)


def _next(slot, phase, stages: int, by: int = 1):
    assign(slot, 0, slot[0] + by)
    with when(slot[0] >= stages):
        assign(slot, 0, slot[0] - stages)
        assign(phase, 0, phase[0] ^ 1)


def _consume(k: Kernel, views, ring: Ring, begin, end):
    """-> the warp's accumulators, [block, token tile, register] in one array.

    A batch of wgmmas runs while the fragments of the next are made. Fragments alternate between two sets of
    registers; so do, where the sums of a step are corrected afterwards, those sums.
    """
    tile, stage, half = k.tile, Stage(k.weight, k.tile), k.weight.half.ptx
    sums, width = tile.correct == "sums", tile.tokens // 2
    # From lane 0, so that the compiler knows that the warp agrees, and computes addresses once for all lanes.
    team = T.alloc_local([1], "int32")
    ptx(
        "shfl_sync.idx.b32",
        team[0],
        k.thread // (128 * tile.warpgroups),
        T.uint32(0),
        T.uint32(31),
        T.uint32(0xFFFFFFFF),
    )
    count = register("int32", (end - begin - team[0] + (tile.teams - 1)) // tile.teams)
    slot, phase, previous = register("int32", team[0]), register("int32", T.int32(0)), register("int32", T.int32(0))
    steps = SumStep(k) if sums else WeightStep(k)
    sets = 1 if sums else 2
    span = min(stage.step // 16, tile.batch) if sums else tile.batch  # times 16 of k in a batch
    fragments = T.alloc_local([sets * span * tile.blocks * 4], "uint32")
    acc = zeros(tile.blocks * width, "float32") if sums else T.alloc_local([tile.blocks * width], "float32")
    base = T.alloc_local([1], "uint64")
    T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(base[0]), k.pool.ptr_to([0]), 1, 64, 3))
    ones = T.alloc_local([1], "uint64")
    T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(ones[0]), ring.ones(), 0, 0, 0))
    words, low = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint32")
    ptx("mov.b64", words[0], words[1], base[0])
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tile.tokens}k16.f32.{half}.{half}"

    def multiply(d, first, a, j, add):
        at = j // 4 * (tile.tokens * ROW // 16) + j % 4 * 2
        desc = T.alloc_local([1], "uint64")
        ptx("mov.b64", desc[0], low[0] + T.uint32(at), words[1])
        transposed = [0] if len(a) == 4 else [0, 0]
        ptx(instruction, *(d[first + r] for r in range(width)), *a, desc[0], add, 1, 1, *transposed)

    def release(i):
        """The slot read last may be filled again."""
        with when(tirx.all(i > 0, k.thread % 32 == 0)):
            ptx("mbarrier.arrive.shared.b64", ring.empty(previous[0]))

    with T.serial(0, count[0], unroll=False) as i:
        T.evaluate(T.cuda.mbarrier_wait(ring.full(slot[0]), phase[0]))
        assign(low, 0, words[0] + T.cast(slot[0] * (stage.offset() // 16), "uint32"))
        codes = {}
        for b in range(4 * tile.slice // span):
            issue = []
            for j in range(b * span, (b + 1) * span):
                t, s = divmod(j, 4)
                if s == 0:
                    codes[t] = _load_codes(k, views["q"], slot[0], t)
                if 16 * j % stage.step == 0:
                    steps.begin(views, slot[0], 16 * j // stage.step)
                for f in range(tile.blocks):
                    at = 4 * ((b % sets * span + j % span) * tile.blocks + f)
                    a = [fragments[at + r] for r in range(4)]
                    if sums:
                        for r in range(4):
                            biased(k.weight, codes[t][f][s], r, a[r])
                        issue.append((steps.sums, f * width, a, j, 16 * j % stage.step > 0))
                    else:
                        steps.weights(f, codes[t][f][s], a)
                        issue.append((acc, f * width, a, j, j > 0 or i > 0))  # the first wgmma overwrites acc
                if sums:
                    issue.append((steps.row_sums, 0, [ones[0]], j, 16 * j % stage.step > 0))
            ptx("wgmma.fence.sync.aligned")
            for operands in issue:
                multiply(*operands)
            ptx("wgmma.commit_group.sync.aligned")
            ptx("wgmma.wait_group.sync.aligned", 0 if sums else 1)
            if b == 0:
                release(i)
            if sums and 16 * (b + 1) * span % stage.step == 0:
                steps.end(acc)
        assign(previous, 0, slot[0])
        _next(slot, phase, tile.stages, tile.teams)
    ptx("wgmma.wait_group.sync.aligned", 0)
    if not sums:
        with when(count[0] <= 0):  # no share of a short k
            for r in range(tile.blocks * width):
                assign(acc, r, T.float32(0))
    return acc


def _load_codes(k, view, slot, i):
    words = []
    for f in range(k.tile.blocks):
        registers = T.alloc_local([4], "uint32")
        words.append([registers[s] for s in range(4)])
        ptx("ld.shared.v4.b32", *words[-1], view.ptr(slot, k.block(f), i, k.thread % 32, 0))
    return words


def _reduce(k: Kernel, acc, rank, epilogue, buffers, y):
    """Adds the sums of all teams of all CTAs of the cluster, in that order, applies the epilogue, rounds."""
    tile, lane, width = k.tile, k.thread % 32, k.tile.tokens // 2
    partials = k.shared(tile.partials, "float32")
    team = k.thread // (128 * tile.warpgroups)
    sync = lambda: ptx("bar.sync", T.uint32(1), T.uint32(tile.consumers))
    sync()  # all consumers are done with the stages
    for f in range(tile.blocks):
        feature = k.block(f) * 16 + lane // 4
        for r in range(width):
            token = r // 4 * 8 + lane % 4 * 2 + r % 2
            value = acc[f * width + r]
            if tile.correct == "sums":
                value = value * T.float32(1 / k.weight.factor(r // 2 % 2))
            T.buffer_store(partials, value, [team, token, feature + r // 2 % 2 * 8])
    if tile.split > 1:
        T.evaluate(T.cuda.cluster_sync())
    else:
        sync()
    # Rank r adds and stores every split'th token, beginning with token r; a thread takes four features.
    items = -(-tile.tokens // tile.split) * (tile.features // 4)
    total, part = T.alloc_local([4], "float32"), T.alloc_local([4], "float32")
    remote = T.alloc_local([tile.split], "uint32")
    if tile.split > 1:
        own = T.cuda.cvta_generic_to_shared(partials.ptr_to([0, 0, 0]))
        for other in range(tile.split):
            ptx("mapa.shared::cluster.u32", remote[other], own, T.uint32(other))
    with T.serial(0, -(-items // tile.consumers)) as i:
        item = i * tile.consumers + k.thread
        token = item // (tile.features // 4) * tile.split + rank
        feature = item % (tile.features // 4) * 4
        m, n = k.m0 + token, k.o0 * 16 + feature
        with when(tirx.all(item < items, token < tile.tokens, m < k.M, n < k.N)):
            for other in range(tile.split):
                for t in range(tile.teams):
                    first = other == t == 0
                    values = total if first else part
                    if tile.split > 1:
                        at = T.cast(((t * tile.tokens + token) * tile.partials[2] + feature) * 4, "uint32")
                        ptx("ld.shared::cluster.v4.f32", *(values[j] for j in range(4)), remote[other] + at)
                    else:
                        for j in range(4):
                            assign(values, j, partials[t, token, feature + j])
                    if not first:
                        for j in range(4):
                            assign(total, j, total[j] + part[j])
            for j in range(4):
                with when(n + j < k.N):
                    value = epilogue(total[j], wide(m), wide(n + j), buffers)
                    T.buffer_store(y, T.cast(value, str(y.dtype)), [wide(m), wide(n + j)])
    if tile.split > 1:
        T.evaluate(T.cuda.cluster_sync())  # nobody leaves while its sums are read
