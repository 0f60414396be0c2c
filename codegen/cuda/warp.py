"""Few tokens on Hopper: warps with mma.sync, fed by TMA.

The same products and corrections as in `mma`, which see. But there every warp copies what it multiplies, and spends as
many instructions on addresses as on codes; here two producer warps do, for all (`hopper` has the kernel around it).
Memory is what few tokens wait for: what a tile is good for is that enough bytes are on their way, and that the warps keep
up with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, when, zeros
from qdsl.codegen.cuda.correct import SumStep, group_place
from qdsl.codegen.cuda.fragments import token_place
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.mma import multiply_tiles
from qdsl.codegen.cuda.ring import Cursor, Ring
from qdsl.codegen.cuda.stage import KeptView, declare_views


def tiles() -> tuple[WarpTile, ...]:
    """The tiles, by rising number of tokens."""
    return (
        WarpTile("t1", 1, warps=1, blocks=2, teams=8, slice=4, stages=16, resident=2),
        WarpTile("t1_wide", 1, warps=2, blocks=2, teams=4, slice=4, stages=12, resident=2),
        WarpTile("t8", 8, warps=1, blocks=2, teams=8, slice=2, stages=16, resident=2, fill_warps=2),
        WarpTile("t8_long", 8, warps=1, blocks=2, teams=6, slice=4, stages=12, resident=2),
        WarpTile("t8_split", 8, warps=2, blocks=2, teams=4, slice=2, stages=16, resident=2, split=2, fill_warps=2),
        WarpTile("t8_wide", 8, warps=2, blocks=2, teams=4, slice=2, stages=16, resident=2, fill_warps=2),
        WarpTile("t8_wide_long", 8, warps=2, blocks=2, teams=4, slice=4, stages=8, resident=2),
        WarpTile("t8_tall", 8, warps=2, blocks=4, teams=4, slice=2, stages=8, resident=2),
        WarpTile("t16", 16, warps=1, blocks=2, teams=8, slice=2, stages=16, resident=2),
        WarpTile("t16_split", 16, warps=2, blocks=2, teams=4, slice=2, stages=12, resident=2, split=2),
        WarpTile("t16_wide", 16, warps=2, blocks=2, teams=4, slice=2, stages=12, resident=2),
        WarpTile("t16_broad", 16, warps=4, blocks=2, teams=2, slice=2, stages=8, resident=2),
        WarpTile("t16_alone", 16, warps=2, blocks=2, teams=4, slice=2, stages=20, resident=1),
    )


@dataclass(frozen=True)
class WarpTile:
    """The part of y that one CTA computes, and how its warps and its cluster share the work.

    Right for every M and N, and every K that is a multiple of 8: TMA wants rows of x on 16 bytes.
    """

    name: str
    tokens: int  # tokens of one CTA
    warps: int  # warps of a team, side by side along features
    blocks: int  # blocks of 16 features of one warp
    teams: int  # teams along k: team t takes every teams'th stage, beginning with stage t
    slice: int  # tiles of 64 along k in one stage
    stages: int  # at most: as many as fit
    resident: int  # CTAs that an SM must be able to hold: a limit on registers and stages
    split: int = 1  # CTAs of a cluster along k
    fill_warps: int = 1  # that take turns to fill scales and zeros

    correct = "sums"
    rings = 1
    fillers = 32  # threads that fill scales and zeros of a stage
    registers = None
    converts_fp8 = True  # in hardware, since sm_89
    looks_up_pairs = True
    stages_x = True  # tokens come through the ring, too
    direct = persistent = tail = turned = False
    together = 1
    halved = None
    early = True  # codes are asked for while the kernel before still runs

    def __post_init__(self):
        assert self.stages % self.teams == 0 and self.stages >= 2 * self.teams, f"{self}: a slot belongs to one team"
        assert self.stages % self.fill_warps == 0, f"{self}: and is filled by one warp"

    def __str__(self):
        parts = f"{self.tokens} tokens x {self.features} features, {self.warps}x{self.teams} warps"
        parts += f", {self.stages} stages of {64 * self.slice}, corrects {self.correct}"
        return f"{self.name}: {parts}{f', {self.split} CTAs along k' if self.split > 1 else ''}"

    @property
    def features(self) -> int:
        return 16 * self.warps * self.blocks

    @property
    def team_threads(self) -> int:
        return 32 * self.warps

    @property
    def consumers(self) -> int:
        return self.team_threads * self.teams

    @property
    def threads(self) -> int:
        return self.consumers + 32 * (1 + self.fill_warps)

    @property
    def own_bytes(self) -> int:
        """Of shared memory that the consumers have for themselves."""
        return 0

    @property
    def swizzle(self) -> int:
        """Bytes that the stages are aligned to."""
        return 1024 if self.tokens > 1 else 128

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.slice, self.tokens, 64)

    def x_index(self, i, row, column):
        """Where a stage has a number of x: k tile i, its column; before the swizzle."""
        return i, row, column

    @property
    def longest_step(self) -> int:
        return min(64 * self.slice, 128)

    @property
    def feature_tiles(self) -> int:
        return self.blocks

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // 8)

    def token_warp(self, warp) -> int:
        return 0  # every warp has all tokens

    def block(self, warp, f: int):
        return warp % self.warps * self.blocks + f

    @property
    def result(self) -> tuple[int, ...]:
        """Registers of eight tokens, as in `Tile.result`."""
        return (0, 2) if self.tokens == 1 else (0, 1, 2, 3)

    @property
    def cluster(self) -> int:
        """CTAs that share k."""
        return self.split

    @property
    def partials(self) -> tuple[int, int, int]:
        return (self.teams, self.tokens, self.features + 4)

    def consumer(self, k: Kernel, stages: Ring) -> Consumer:
        return Consumer(k, stages)


class Consumer:
    """A warp's share of the multiplication: it waits for a stage of its team, and hands it back when it has used it."""

    def __init__(self, k: Kernel, stages: Ring):
        self.k, self.ring, self.tile = k, stages, k.tile
        # From lane 0, so that the compiler knows that the warp agrees, and computes addresses once for all lanes.
        team = T.alloc_local([1], "int32")
        ptx("shfl_sync.idx.b32", team[0], k.team, T.uint32(0), T.uint32(31), T.uint32(0xFFFFFFFF))
        self.team, self.cursor = team[0], Cursor(k.tile.stages, team[0], 0)
        self.views = self._views()
        self.acc = zeros(4 * k.tile.feature_tiles * k.tile.token_tiles, "float32")

    def _views(self) -> dict[str, KeptView]:
        """The stages, with the lane's places in registers."""
        k, base = self.k, T.alloc_local([1], "uint32")
        ptx("mov.b32", base[0], T.cuda.cvta_generic_to_shared(k.pool.ptr_to([0])))
        views = {operand: KeptView(**vars(view)) for operand, view in declare_views(k, base[0]).items()}
        views["q"].keep(k.block(0), 0, k.lane, 0)
        for s in range(0, 4 if k.tile.stages_x else 0, 1 if k.tile.token_tiles > 1 else 2):
            views["x"].keep(*token_place(k, 0, s, 0))
        for role, dtype in k.weight.grouped.items():
            views[role].keep(k.block(0), 0, group_place(k, dtype))
        return views

    def multiply(self, begin, end):
        """acc = the part's features x tokens, over the team's share of stages begin .. end; -> whether to store it."""
        teams, cursor = self.tile.teams, self.cursor
        count = register("int32", (end - begin - self.team + (teams - 1)) // teams)
        steps, read = SumStep(self.k), register("int32", T.int32(-1))
        with T.serial(0, count[0], unroll=False):
            # A slot is released where the next stage begins: all that was loaded has been used there, and nobody fills the
            # last one again. Right behind the products, ptxas would release it while loads of it are still on their way,
            # and the next tokens have been seen to come before these were read.
            with when(read[0] >= 0):
                self.ring.release(read[0])
            T.evaluate(T.cuda.mbarrier_wait(self.ring.full(cursor.slot), cursor.phase))
            multiply_tiles(self.k, self.views, self.acc, cursor.slot, steps, 0, self.tile.slice)
            assign(read, 0, cursor.slot)
            cursor.advance(teams)
        return None
