"""Many tokens on Hopper: warpgroups with wgmma.

The same equation and the same stored fragments as in `mma`, which see. Here a warpgroup, four warps, multiplies blocks of
64 output features by up to 256 tokens with one instruction: A, the weights, from registers, made out of the stored
codes in their own order; B, the tokens, from shared memory. `hopper` has the kernel around it. One CTA of two warpgroups
of two blocks each:

                  tokens 0 .. 255
    features   0 |  warpgroup 0  |
              64 |       "       |
             128 |  warpgroup 1  |
             192 |       "       |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import wgmma_bytes
from qdsl.codegen.cuda.builder import assign, ptx, register, settled, when
from qdsl.codegen.cuda.correct import WeightStep
from qdsl.codegen.cuda.fragments import load_codes
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.ring import ROW, Cursor, Ring
from qdsl.codegen.cuda.stage import Stage


def tiles() -> tuple[WarpgroupTile, ...]:
    """The tiles, by rising number of tokens.

    Up to 128 tokens the weights' bytes count: few features and a split of k give every SM a part. Beyond, products do.
    """
    large = {"registers": (224, 56)}  # 128 sums a thread, and weights in the making
    return (
        WarpgroupTile("w32", 32, warpgroups=2, blocks=1, teams=2, slice=2, stages=8),
        WarpgroupTile("w32_wide", 32, warpgroups=2, blocks=2, teams=1, slice=2, stages=8),
        WarpgroupTile("w32_narrow", 32, warpgroups=1, blocks=1, teams=2, slice=4, stages=6, split=2),
        WarpgroupTile("w64", 64, warpgroups=2, blocks=1, teams=1, slice=4, stages=4),
        WarpgroupTile("w64_wide", 64, warpgroups=2, blocks=2, teams=1, slice=2, stages=6, batch=2),
        WarpgroupTile("w128", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5),
        WarpgroupTile("w128_wide", 128, warpgroups=2, blocks=2, teams=1, slice=2, stages=4, batch=2, persistent=True, **large),
        WarpgroupTile("w128_split", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5, split=2),
        WarpgroupTile("w152", 152, warpgroups=2, blocks=1, teams=1, slice=2, stages=4, persistent=True, **large),
        WarpgroupTile("w256", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, persistent=True, **large),
        WarpgroupTile("w64_tail", 64, warpgroups=1, blocks=1, teams=2, slice=4, stages=4, persistent=True, tail=True),
        WarpgroupTile("w64_tail_wide", 64, warpgroups=2, blocks=1, teams=1, slice=4, stages=4, persistent=True, tail=True),
        WarpgroupTile("w32_tail", 32, warpgroups=1, blocks=1, teams=2, slice=4, stages=6, persistent=True, tail=True),
        WarpgroupTile("w128_tail", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5, persistent=True, tail=True),
        WarpgroupTile("w256_tail", 256, warpgroups=2, blocks=1, teams=1, slice=2, stages=3, persistent=True, tail=True, **large),
    )  # fmt: skip


def byte_tiles() -> list[WarpgroupTile]:
    """Those for products of bytes (`wgmma_bytes`), of which there are few tokens or a multiple of 16."""
    few = [
        WarpgroupTile("w16", 16, warpgroups=2, blocks=1, teams=2, slice=2, stages=8),
        WarpgroupTile("w16_narrow", 16, warpgroups=1, blocks=1, teams=2, slice=2, stages=8),
        WarpgroupTile("w16_split", 16, warpgroups=1, blocks=1, teams=2, slice=2, stages=8, split=2),
    ]
    return [*few, *(t for t in tiles() if t.tokens % 16 == 0)]


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
    batch: int = 4  # times 16 of k whose weights are made, and multiplied, together
    resident: int = 1  # CTAs that an SM must be able to hold: a limit on registers
    registers: tuple[int, int] | None = None  # of a consumer and of a producer thread, if they are redistributed
    persistent: bool = False  # as many clusters as the GPU has room for, instead of one for every part of y
    tail: bool = (
        False  # a persistent kernel's last round is shared by the two CTAs of a cluster along k, if it is short
    )

    correct = "weights"
    result = (0, 1, 2, 3)  # registers of eight tokens, as in `Tile.result`
    rings = 1
    converts_fp8 = True  # in hardware, since sm_89
    looks_up_pairs = False
    early = False
    swizzle = 1024  # bytes that the stages are aligned to
    fillers, fill_warps = 32, 1  # threads that fill scales and zeros of a stage, and warps that take turns

    def __post_init__(self):
        assert 4 * self.slice // self.batch % 2 == 0, f"{self}: the batches of a stage alternate between register sets"
        # A slot belongs to one team: a team that met the slots of others could be a whole phase ahead of them, and a
        # barrier does not tell the phase after the next from the last.
        assert self.stages % self.teams == 0 and self.threads <= 1024, self
        if self.registers:  # a consumer would wait forever for more than producers give back
            consumer, producer = self.registers
            launched = 65536 // self.threads // 8 * 8
            assert consumer * self.consumers + producer * 128 <= launched * self.threads, self
        # A slot is released once the next is being multiplied.
        assert self.stages >= 2 * self.teams, self
        assert not self.persistent or self.split == 1, self
        assert not self.tail or self.persistent, self

    def __str__(self):
        parts = f"{self.tokens} tokens x {self.features} features, {self.warpgroups}x{self.teams} warpgroups"
        parts += f", {self.stages} stages of {64 * self.slice}"
        parts += f", {self.split} CTAs along k" if self.split > 1 else ""
        parts += ", persistent" if self.persistent else ""
        return f"{self.name}: {parts}{', the last round in halves' if self.tail else ''}"

    @property
    def direct(self) -> bool:
        """One warpgroup has all of a sum: it goes to y without the detour through partial sums."""
        return self.split == self.teams == 1

    @property
    def halved(self) -> WarpgroupTile | None:
        """The same with stages half as long, and twice as many of them; None: there are no shorter ones."""
        if self.slice == 1:
            return None
        return replace(self, slice=self.slice // 2, stages=2 * self.stages, batch=min(self.batch, self.slice))

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
        """CTAs that share k, those of a tail included."""
        return 2 if self.tail else self.split

    def block(self, warp, f: int):
        return (warp // 4 % self.warpgroups * self.blocks + f) * 4 + warp % 4

    @property
    def token_tiles(self) -> int:
        return self.tokens // 8

    def token_warp(self, warp) -> int:
        return 0  # every warp has all tokens

    def consumer(self, k: Kernel, stages: Ring) -> Consumer | wgmma_bytes.Consumer:
        kind = wgmma_bytes.Consumer if k.weight.arithmetic == "bytes" else Consumer
        return kind(k, stages)

    @property
    def partials(self) -> tuple[int, int, int]:
        return (self.teams, self.tokens, self.features + 4)


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
            T.evaluate(T.cuda.mbarrier_wait(self.ring.full(cursor.slot), cursor.phase))
            assign(self.low, 0, self.base[0] + T.cast(cursor.slot * (stage.offset() // 16), "uint32"))
            codes = {}
            for b in range(4 * tile.slice // tile.batch):
                steps = range(b * tile.batch, (b + 1) * tile.batch)
                for j in steps:
                    if j % 4 == 0:
                        codes[j // 4] = load_codes(self.k, self.ring.views["q"], cursor.slot, j // 4)
                    if 16 * j % stage.step == 0:
                        self.steps.begin(self.ring.views, cursor.slot, 16 * j // stage.step)
                    for f in range(tile.blocks):
                        self.steps.weights(f, codes[j // 4][f], j % 4, self._fragment(j, f))
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
        settled(self.acc, tile.blocks * self.width)
        with when(count[0] > 0):
            self.ring.release(self.previous[0])
        return count[0] > 0

    def _fragment(self, j: int, f: int) -> list:
        """Registers of the A fragment for times j of block f."""
        first = 4 * (j % (2 * self.tile.batch) * self.tile.blocks + f)
        return [self.fragments[first + r] for r in range(4)]

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
