"""Global memory -> shared memory on Hopper: a ring of stages that two producer warps fill.

    producer warps  --- boxes of q and x, scales, zeros ---> slot      full[slot]: everything has landed
                    <--- may be filled again --------------- slot      empty[slot]: every consumer has read it

One warp asks for the boxes, by TMA; another copies scales and zeros, which come in pieces too small for
boxes. One warp that does both takes longer for a stage than the consumers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, when, wide
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.stage import (
    READ_ONCE,
    FillTokenScales,
    Stage,
    View,
    copied,
    declare_views,
    evict_first,
    fill_of,
    whole_rows,
)
from qdsl.codegen.cuda.weight import Weight

ROW = 128  # bytes of 64 numbers of a token in shared memory: the width of the swizzle that wgmma reads


def tensor_maps(buffers, weight: Weight, tile) -> dict:
    """The TMA descriptors of x and q, made on the host at every launch; what lies outside of a tensor is read as zeros.

    Of x, boxes of 64 numbers of the tokens, swizzled as wgmma wants it, or all of a stage of a single token; of q, the
    stored blocks.
    """
    (M, K), (blocks, tiles, *_) = buffers["x"].shape, buffers["q"].shape
    words = 32 * weight.unit_bits  # of 16 features by 64 units of k
    cut = -(-words // 256)  # a box has no more of them side by side
    units, row = (K // weight.unit, K) if weight.unit > 1 else (K, K * 2)
    shapes = {
        "x": ((units, M), (row,), weight.staged_x, *_tokens_box(tile, M)),
        "q": (
            (T.int64(words // cut), tiles * cut, blocks),
            (T.int64(4 * words // cut), tiles * (4 * words)),
            "uint32",
            (words // cut, tile.slice * cut, tile.features // 16),
            0,
        ),
    }
    if weight.from_shared:  # blocks side by side, k tile by k tile
        extents, strides = (words // cut, cut, blocks, tiles), (4 * words // cut, tiles * (4 * words), 4 * words)
        box = (words // cut, cut, tile.features // 16, tile.slice)
        shapes["q"] = (tuple(map(_wide, extents)), tuple(map(_wide, strides)), "uint32", box, 0)
    maps = {}
    for name, (extents, strides, dtype, box, swizzle) in shapes.items():
        maps[name] = T.Var(f"{name}_map", ty=T.handle("tensormap").ty)
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=maps[name])
        box, steps = [*map(_wide, box)], [T.int64(1)] * len(extents)
        T.evaluate(
            T.tensormap_encode_tiled(
                maps[name], buffers[name].data, *extents, *strides, *box, *steps, descriptor_dtype=dtype,
                rank=len(extents), interleave=0, swizzle=swizzle, l2_promotion=2, oob_fill=0,
            )
        )  # fmt: skip
    return maps


def _wide(extent):
    return T.int64(extent) if isinstance(extent, int) else extent


def _tokens_box(tile, M):
    """The extents of a box of x and how it is swizzled: 3 within 128 bytes, 0 not at all.

    No more rows than x has: those outside of it take longer than those inside. What a slot then holds in the rest of its
    rows only gets into sums that are not stored.
    """
    return ((64 * tile.slice, 1), 0) if tile.tokens == 1 else ((64, tirx.min(M, T.int64(tile.tokens))), 3)


class Cursor:
    """A walk around the ring: the slot, and the phase of its barriers."""

    def __init__(self, stages: int, slot, phase: int):
        self.stages, self._slot = stages, register("int32", slot)
        self._phase = register("int32", T.int32(phase))

    @property
    def slot(self):
        return self._slot[0]

    @property
    def phase(self):
        return self._phase[0]

    def advance(self, by: int = 1):
        assign(self._slot, 0, self.slot + by)
        with when(self.slot >= self.stages):
            assign(self._slot, 0, self.slot - self.stages)
            assign(self._phase, 0, self.phase ^ 1)


class Ring:
    """The stages, and two barriers for each."""

    def __init__(self, k: Kernel, first: int):
        """`first`: where the barriers begin in shared memory, in bytes."""
        self.k, self.stages, self.start = k, k.tile.stages, first // 8
        self.views: dict[str, View] = declare_views(k)
        self.barriers = k.shared((self.start + 2 * self.stages,), "uint64")

    @staticmethod
    def barrier_bytes(tile) -> int:
        return 16 * tile.stages

    def full(self, slot):
        return self.barriers.ptr_to([self.start + slot])

    def empty(self, slot):
        return self.barriers.ptr_to([self.start + self.stages + slot])

    def initialize(self):
        k, tile = self.k, self.k.tile
        with when(k.thread < self.stages):
            landed = 1 + 32 * len(_arrivals(k.weight))
            ptx("mbarrier.init.shared.b64", self.full(k.thread), T.uint32(landed))
            ptx("mbarrier.init.shared.b64", self.empty(k.thread), T.uint32(tile.team_threads))
            ptx("fence.mbarrier_init.release.cluster")
        T.evaluate(T.cuda.cta_sync())

    def release(self, slot):
        """A thread has read the slot.

        Every lane says so for itself: one for all of its warp, behind a warp barrier, is ordered just as well, but no
        faster, and compute-sanitizer does not see the order.
        """
        ptx("mbarrier.arrive.shared.b64", self.empty(slot))


def _arrivals(weight: Weight) -> list[str]:
    """How each of the lanes that fill groups says that its share has landed: what it copied, and what it stored itself."""
    roles = [*weight.grouped, *(["token_scale"] if weight.token_scale else [])]
    stored = {not copied(weight, role) for role in roles}
    return [ARRIVALS[own] for own in sorted(stored)]


ARRIVALS = {False: "cp.async.mbarrier.arrive.noinc.shared.b64", True: "mbarrier.arrive.shared.b64"}


def fetch(maps):
    """Ask for the descriptors: the first box would wait for its own."""
    for tensor_map in maps.values():
        ptx("prefetch.tensormap", T.address_of(tensor_map))


class Boxes:
    """The requests of one lane, elected: the boxes of q and x, and rows of the scales of tokens where they can be copied whole.

    What a lane does alone needs no loop over the lanes, which ptxas puts around each request otherwise.
    """

    def __init__(self, k: Kernel, ring: Ring, maps):
        self.ring, self.cursor = ring, Cursor(k.tile.stages, T.int32(0), 1)
        self.q, self.x = T.address_of(maps["q"]), T.address_of(maps["x"])
        read_once = k.tile.tokens <= READ_ONCE
        self.load = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        self.hint, self.policy = (".L2::cache_hint", [evict_first()]) if read_once else ("", [])
        rows = tirx.min(k.M, k.tile.tokens) * k.tile.slice
        size = k.tile.slice * (k.tile.features // 16 * 128 * k.weight.unit_bits) + rows * ROW
        self.scales = register("int32", T.cast(whole_rows(k), "int32")) if k.weight.token_scale else None
        self.rows = tirx.min(k.M, k.tile.tokens) * 4  # bytes of the scales of a group
        if self.scales is not None:
            size = size + T.if_then_else(self.scales[0] != 0, self.rows * Stage(k.weight, k.tile).steps, 0)
        self.bytes = T.cast(size, "uint32")

    def fill_first(self, k: Kernel, begin, end, early, wait):
        """As many of stages begin .. end as the ring has room for, which is empty; none unless `early`. -> the next stage.

        wait  for x: codes are asked for before
        """
        count = register("int32", T.if_then_else(early, tirx.min(end - begin, k.tile.stages), T.int32(0)))
        with T.serial(0, count[0], unroll=False) as i:
            self._codes(k, i, begin + i)
        wait()
        with T.serial(0, count[0], unroll=False) as i:
            self._tokens(k, self.cursor.slot, begin + i)
            self.cursor.advance()
        return begin + count[0]

    def fill(self, k: Kernel, begin, end):
        """Stages begin .. end of a part."""
        with T.serial(begin, end, unroll=False) as i:
            slot = self.cursor.slot
            T.evaluate(T.cuda.mbarrier_wait(self.ring.empty(slot), self.cursor.phase))
            self._codes(k, slot, i)
            self._tokens(k, slot, i)
            self.cursor.advance()

    def _codes(self, k: Kernel, slot, i):
        """Those of stage i into an empty slot, and how many bytes it gets in all."""
        full, target = self.ring.full(slot), self.ring.views["q"].ptr(slot, 0, 0, 0, 0)
        ptx("mbarrier.arrive.expect_tx.shared.b64", full, self.bytes)
        if k.weight.from_shared:
            at = (0, 0, k.o0, i * k.tile.slice)
        else:
            at = (0, i * (k.tile.slice * -(-k.weight.unit_bits // 8)), k.o0)
        ptx(self.load.format(len(at)) + self.hint, target, self.q, *at, full, *self.policy)

    def _tokens(self, k: Kernel, slot, i):
        """x of stage i."""
        full = self.ring.full(slot)
        for t in range(k.tile.slice if k.tile.tokens > 1 else 1):
            target = self.ring.views["x"].ptr(slot, t, 0, 0)
            ptx(self.load.format(2), target, self.x, (i * k.tile.slice + t) * 64, k.m0, full)
        if self.scales is None:
            return
        stage = Stage(k.weight, k.tile)
        with when(self.scales[0] != 0):
            for step in range(stage.steps):
                group = tirx.min(i * (64 * k.tile.slice) + step * stage.step, k.K - 1) // k.weight.group
                source = k.token_scale.ptr_to([wide(group), wide(k.m0)])
                target = self.ring.views["token_scale"].ptr(slot, step, 0)
                copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                ptx(copy, target, source, T.cast(self.rows, "uint32"), full)


def fill_groups(k: Kernel, ring: Ring, cursor: Cursor, warp, begin, end):
    """The warps that fill groups, each every so many'th: the scales and zeros of stages begin .. end of a part."""
    tile, step = k.tile, k.tile.fill_warps
    first = begin + warp if step > 1 else begin
    fills: list = [fill_of(k, role, ring.views[role], first * tile.slice) for role in k.weight.grouped]
    if k.weight.token_scale:
        fills.append(FillTokenScales(k, ring.views["token_scale"], first * tile.slice, whole_rows(k)))
    with T.serial(0, (end - first + (step - 1)) // step, unroll=False):
        slot = cursor.slot
        T.evaluate(T.cuda.mbarrier_wait(ring.empty(slot), cursor.phase))
        for fill in fills:
            fill.start(slot)
            fill.advance(tile.slice * step)
        for arrive in _arrivals(k.weight):
            ptx(arrive, ring.full(slot))
        cursor.advance(step)
