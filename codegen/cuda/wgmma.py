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

from qdsl.codegen.cuda import store, wgmma_bytes
from qdsl.codegen.cuda.builder import ptx
from qdsl.codegen.cuda.byte_weight import ByteWeight
from qdsl.codegen.cuda.correct import TableStep, WeightStep
from qdsl.codegen.cuda.fragments import load_codes
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.ring import ROW, Ring
from qdsl.codegen.cuda.warpgroup import Warpgroup


def tiles() -> tuple[WarpgroupTile, ...]:
    """The tiles, by rising number of tokens.

    Up to 128 tokens the weights' bytes count: few features and a split of k give every SM a part. Beyond, products do.
    """
    large = {"registers": (224, 56)}  # 128 sums a thread, and weights in the making
    # Short stages leave room beside the ring for what is being stored: the fewer barriers, the sooner products go on.
    most = {
        "warpgroups": 2,
        "blocks": 1,
        "teams": 1,
        "slice": 1,
        "stages": 5,
        "batch": 2,
        "persistent": True,
        "staged": 64,
        **large,
    }
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
        WarpgroupTile("w256", 256, **most),
        WarpgroupTile("w64_tail", 64, warpgroups=1, blocks=1, teams=2, slice=4, stages=4, persistent=True, tail=True),
        WarpgroupTile("w64_tail_wide", 64, warpgroups=2, blocks=1, teams=1, slice=4, stages=4, persistent=True, tail=True),
        WarpgroupTile("w32_tail", 32, warpgroups=1, blocks=1, teams=2, slice=4, stages=6, persistent=True, tail=True),
        WarpgroupTile("w128_tail", 128, warpgroups=2, blocks=1, teams=1, slice=2, stages=5, persistent=True, tail=True),
        WarpgroupTile("w256_tail", 256, **most, tail=True),
    )  # fmt: skip


def byte_tiles(weight: ByteWeight) -> list[WarpgroupTile]:
    """Those for products of bytes (`wgmma_bytes`)."""
    return [*_whole_byte_tiles(weight)] if weight.from_shared else _nibble_tiles(weight)


def _whole_byte_tiles(weight: ByteWeight) -> tuple[WarpgroupTile, ...]:
    """Codes that are operands: one warpgroup keeps up with memory, and many tokens may have many sums.

    Where products have sums of their own, a thread has those of 128 tokens beside those of all inputs.
    """
    one = {"warpgroups": 1, "blocks": 1, "teams": 1, "early": True}
    room = {"registers": (232, 40) if weight.scale else (240, 24)}
    two = {"warpgroups": 2, "blocks": 1, "teams": 1, **(room if weight.promoted else {})}
    # Short stages are filled again the sooner. Where products wait for each other at the end of a round, it has four of them
    # (`wgmma_bytes.Consumer`); CTAs that share k have long ones instead.
    short = {"slice": 1, "together": 4 if weight.promoted else 1}
    shared = {"slice": 2, "stages": 3} if weight.promoted else {"slice": 1, "stages": 6}
    deep = {"slice": 4, "stages": 5} if weight.promoted else {"slice": 2, "stages": 10}
    large = {"teams": 1, "slice": 1, "persistent": True, "staged": 64, **room}
    # While two add what they have multiplied, the third multiplies: of two, both would add now and then.
    third = {**large, "warpgroups": 3, "blocks": 1, "registers": (160, 32), "stages": 4, "tail": True}
    broad = []
    if weight.promoted and not weight.scale and not weight.token_scale:
        broad = [WarpgroupTile("w128_broad_tail", 128, **third)]
    turned = []
    if weight.promoted and weight.token_scale and weight.shared and weight.shared.features % 128 == 0:
        rows = {**two, "turned": True, "staged": 64, "persistent": True}
        turned = [
            WarpgroupTile("w128_turned", 128, **rows, **short, stages=6),
            WarpgroupTile("w128_turned_tail", 128, **rows, **short, stages=6, tail=True),
            WarpgroupTile("w192_turned_tail", 192, **third, turned=True),
            WarpgroupTile("w256_turned", 256, **rows, slice=1, stages=4),
            WarpgroupTile("w256_turned_tail", 256, **rows, slice=1, stages=4, tail=True),
        ]
    return (
        WarpgroupTile("w16", 16, **one, **short, stages=10, resident=2),
        WarpgroupTile("w16_deep", 16, **one, **deep),
        WarpgroupTile("w16_split", 16, **one, **deep, split=2),
        WarpgroupTile("w32", 32, **one, **short, stages=10, resident=2),
        WarpgroupTile("w32_deep", 32, **one, slice=2, stages=8),
        WarpgroupTile("w32_split", 32, **one, slice=2, stages=8, split=2),
        WarpgroupTile("w64", 64, **one, slice=2, stages=6),
        WarpgroupTile("w64_split", 64, **one, slice=2, stages=6, split=2),
        WarpgroupTile("w64_wide", 64, **two, **short, stages=8, early=True),
        WarpgroupTile("w128_narrow", 128, **one, slice=2, stages=4),
        WarpgroupTile("w128", 128, **two, **short, stages=6, early=True),
        WarpgroupTile("w128_split", 128, **two, **shared, split=2, early=True),
        WarpgroupTile("w128_tail", 128, **two, **short, stages=6, persistent=True, tail=True, staged=64),
        *turned,
        WarpgroupTile("w128_tall", 128, warpgroups=2, blocks=2, **large, stages=4),
        WarpgroupTile("w256", 256, warpgroups=2, blocks=1, **large, stages=4),
        WarpgroupTile("w256_tail", 256, warpgroups=2, blocks=1, **large, stages=4, tail=True),
        *broad,
    )


def _nibble_tiles(weight: ByteWeight) -> list[WarpgroupTile]:
    """Codes that become operands in registers; integer products have a multiple of 16 tokens."""
    one = {"warpgroups": 1, "blocks": 1, "early": True}
    few = [
        WarpgroupTile("w16", 16, **one, teams=1, slice=4, stages=4, resident=2),
        WarpgroupTile("w16_deep", 16, **one, teams=1, slice=4, stages=8),
        WarpgroupTile("w16_teams", 16, **one, teams=2, slice=4, stages=8),
        WarpgroupTile("w16_split", 16, **one, teams=2, slice=2, stages=12, split=2),
        WarpgroupTile("w16_wide", 16, warpgroups=2, blocks=1, teams=2, slice=2, stages=10, early=True),
    ]
    found = [*few, *(t for t in tiles() if t.tokens % 16 == 0)]
    if not weight.promoted:
        return found
    sums = {tile.name: tile.blocks * tile.tokens // 2 for tile in found}  # of a thread, and as many products up to 64
    large, most = {"registers": (224, 56)}, {"registers": (232, 40), "batch": 4}
    found = [replace(t, **most) if t.tokens == 256 else t for t in found if sums[t.name] <= 64 or t.tokens == 256]
    return [replace(t, **large) if sums[t.name] == 64 else t for t in found]


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
    tail: bool = False  # a persistent kernel's last round is shared by two CTAs along k, if it is short
    early: bool = False  # codes are asked for while the kernel before still runs
    staged: int = 16  # tokens that a warpgroup stores at once, beside the ring
    together: int = 1  # stages of a round of the loop, around which no products can be in the making
    turned: bool = False  # a warpgroup has 64 tokens of every `span`, and all 128 features (`wgmma_bytes.Turned`)

    correct = "weights"
    result = (0, 1, 2, 3)  # registers of eight tokens, as in `Tile.result`
    rings = 1
    converts_fp8 = True  # in hardware, since sm_89
    looks_up_pairs = False
    stages_x, own_bytes = True, 0  # see `warp.WarpTile`
    swizzle = 1024  # bytes that the stages are aligned to
    fillers, fill_warps = 32, 1  # threads that fill scales and zeros of a stage, and warps that take turns

    def __post_init__(self):
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
        assert self.together == 1 or self.split == self.teams == self.slice == 1, self
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
    def stored(self) -> int:
        """Tokens that a warpgroup stores at once; where it can do so over the ring, there is room for many."""
        return self.staged if self.persistent else 64

    @property
    def halved(self) -> WarpgroupTile | None:
        """The same with stages half as long, and twice as many of them; None: there are no shorter ones."""
        if self.slice == 1:
            return None
        return replace(self, slice=self.slice // 2, stages=2 * self.stages, batch=min(self.batch, self.slice))

    @property
    def features(self) -> int:
        return 128 if self.turned else 64 * self.warpgroups * self.blocks

    @property
    def span(self) -> int:
        """Tokens of which every warpgroup has 64, if it is turned."""
        return 64 * self.warpgroups

    @property
    def sums(self) -> int:
        """Of a thread, for one block."""
        return self.tokens * self.features // (128 * self.warpgroups * self.blocks)

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
        return self.sums // 4

    def token_warp(self, warp) -> int:
        return 0  # every warp has all tokens

    def consumer(self, k: Kernel, stages: Ring) -> Consumer | wgmma_bytes.Consumer:
        if k.weight.arithmetic != "bytes":
            return Consumer(k, stages)
        return (wgmma_bytes.Turned if self.turned else wgmma_bytes.Consumer)(k, stages)

    def finish(self, *given) -> store.Direct:
        return (store.Turned if self.turned else store.Direct)(*given)

    @property
    def partials(self) -> tuple[int, int, int]:
        return (self.teams, self.tokens, self.features + 4)


class Consumer(Warpgroup):
    """Weights that are made out of codes, by 16-bit tokens."""

    def __init__(self, k: Kernel, stages: Ring):
        super().__init__(k, stages)
        self.steps = (TableStep if TableStep.serves(k) else WeightStep)(k)
        self.codes: list = []  # of the k tile that is being multiplied

    def fill(self, steps) -> None:
        slot, views = self.cursor.slot, self.ring.views
        for j in steps:
            if j % 4 == 0:
                self.codes = load_codes(self.k, views["q"], slot, j // 4)
            if 16 * j % self.stage.step == 0:
                self.steps.begin(views, slot, 16 * j // self.stage.step)
            for f in range(self.tile.blocks):
                self.steps.weights(f, self.codes[f], j % 4, self.fragment(j, f))

    def issue(self, j: int, f: int, add) -> None:
        half, width = self.k.weight.half.ptx, self.width
        at = j // 4 * (self.tile.tokens * ROW // 16) + j % 4 * 2  # in units of 16 bytes, from the stage's x on
        descriptor = T.alloc_local([1], "uint64")
        ptx("mov.b64", descriptor[0], self.low[0] + T.uint32(at), self.base[1])
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.tile.tokens}k16.f32.{half}.{half}"
        ptx(
            instruction,
            *(self.acc[f * width + r] for r in range(width)),
            *self.fragment(j, f),
            descriptor[0],
            add,
            1,
            1,
            0,
        )
