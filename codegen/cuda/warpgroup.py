"""A warpgroup's share of a multiplication with wgmma: around the ring, a batch of fragments at a time.

What fragments of weights are made of, and which instruction multiplies them, `wgmma` and `wgmma_bytes` say.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, settled, when
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.ring import Cursor, Ring
from qdsl.codegen.cuda.stage import Stage


class Warpgroup:
    """A batch of wgmmas runs while the fragments of the next are made, in another set of registers."""

    from_registers = True  # the weights
    sets = 2  # batches whose fragments are in registers

    def __init__(self, k: Kernel, stages: Ring):
        self.k, self.ring, self.tile, self.stage = k, stages, k.tile, Stage(k.weight, k.tile)
        tile, self.width = self.tile, k.tile.sums
        # From lane 0, so that the compiler knows that the warp agrees, and computes addresses once for all lanes.
        team = T.alloc_local([1], "int32")
        ptx("shfl_sync.idx.b32", team[0], k.team, T.uint32(0), T.uint32(31), T.uint32(0xFFFFFFFF))
        self.team = team[0] if tile.teams > 1 else T.int32(0)
        self.cursor, self.previous = Cursor(tile.stages, self.team, 0), register("int32", T.int32(0))
        if self.from_registers:  # those of a batch are read until it is done
            batches = 4 * tile.slice // tile.batch
            assert batches % self.sets == 0, f"{tile}: batches of a stage alternate between fragments"
            self.fragments = T.alloc_local([self.sets * tile.batch * tile.blocks * 4], "uint32")
        self.acc = T.alloc_local([tile.blocks * self.width], k.weight.sums)  # [block, token tile, register]
        base, words = T.alloc_local([1], "uint64"), T.alloc_local([2], "uint32")
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(base[0]), k.pool.ptr_to([0]), 1, 64, 3))
        ptx("mov.b64", words[0], words[1], base[0])
        self.base, self.low = words, T.alloc_local([1], "uint32")

    def multiply(self, begin, end):
        """acc = the part's features x tokens, over the team's share of stages begin .. end, `together` at a time; -> whether there
        is one."""
        tile = self.tile
        count = register("int32", (end - begin - self.team + (tile.teams - 1)) // tile.teams // tile.together)
        self.begin(count[0])
        with T.serial(0, count[0], unroll=False) as i:
            self.enter()
            self.locate()
            for b in range(4 * tile.slice * tile.together // tile.batch):
                steps = range(b * tile.batch, (b + 1) * tile.batch)
                self.fill(steps)
                self.products(steps, i)
            self.leave(i, count[0])
        ptx("wgmma.wait_group.sync.aligned", 0)
        settled(self.acc[r] for r in range(tile.blocks * self.width))
        with when(count[0] > 0):
            self.ring.release(self.previous[0])
        return count[0] > 0

    def begin(self, count) -> None:
        """Before the first of the team's `count` stages."""

    def enter(self) -> None:
        """A stage begins: wait for it."""
        self.wait()

    def leave(self, i, count) -> None:
        """Stage i has ended."""
        self.advance()

    def locate(self) -> None:
        """The cursor's stage is the one whose matrices are multiplied."""
        assign(self.low, 0, self.base[0] + T.cast(self.cursor.slot * (self.stage.offset() // 16), "uint32"))

    def wait(self) -> None:
        T.evaluate(T.cuda.mbarrier_wait(self.ring.full(self.cursor.slot), self.cursor.phase))

    def advance(self) -> None:
        assign(self.previous, 0, self.cursor.slot)
        self.cursor.advance(self.tile.teams)

    def fill(self, steps: Sequence[int]) -> None:
        """The A fragments for some times of the stage, of every block."""
        raise NotImplementedError

    def release(self, i) -> None:
        """The stage before the team's stage i has been read. Said once the first products of this one are on their way, for it
        takes a while."""
        with when(i > 0):
            self.ring.release(self.previous[0])

    def products(self, steps: Sequence[int], i) -> None:
        """Fragments by tokens, of those times of the team's stage i; when it ends, the batch before is done."""
        ptx("wgmma.fence.sync.aligned")
        for j in steps:
            for f in range(self.tile.blocks):
                self.issue(j, f, j > 0 or i > 0)  # the first overwrites acc
        ptx("wgmma.commit_group.sync.aligned")
        ptx("wgmma.wait_group.sync.aligned", 1)
        if steps[0] == 0:
            self.release(i)

    def issue(self, j: int, f: int, add) -> None:
        """acc of block f = its fragment of time j, times the tokens, added to acc if `add`."""
        raise NotImplementedError

    def fragment(self, j: int, f: int) -> list:
        """Registers of the A fragment for times j of block f."""
        first = 4 * (j % (self.sets * self.tile.batch) * self.tile.blocks + f)
        return [self.fragments[first + r] for r in range(4)]
