"""Products of int8 on Hopper: weights by activations that the step before has quantized.

To everything but the multiplication two neighbouring inputs are one unit of 16 bits, so that `hopper`, its ring and its
stages know nothing of bytes: 64 units are a k tile, and an instruction multiplies 16 units, 32 inputs. Weights are A, from
registers, stored as the registers of a fragment; tokens are B, from shared memory.

               k: 4t .. 4t+3   16+4t .. 16+4t+3
    feature c      [ reg 0 ]       [ reg 2 ]            lane = 4 c + t
    feature c + 8  [ reg 1 ]       [ reg 3 ]            c = 0 .. 7, t = 0 .. 3

Integers are summed exactly, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, settled, when
from qdsl.codegen.cuda.decode import HALVES, Half
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.ring import ROW, Cursor, Ring
from qdsl.codegen.cuda.stage import Stage
from qdsl.dtype import DType

WIDEST = 128  # tokens of an instruction: TVM knows none of 256 for integers


@dataclass(frozen=True)
class ByteWeight:
    """What a kernel of bytes needs to know of a weight: w = q, where the epilogue has the rest of it.

    code     i8, or i4, which is multiplied as 16 times itself
    compute  the type of y: "float16" or "bfloat16"
    """

    code: DType
    compute: str

    unit = 2
    x_type, staged_x, sums = "uint8", "uint16", "uint32"  # registers that have the bits of integers
    table, group, side_by_side = (), None, False
    arithmetic = "bytes"
    problem = ""
    excess = 0.0

    @property
    def grouped(self) -> dict[str, str]:
        return {}

    @property
    def half(self) -> Half:
        return HALVES[self.compute]

    @property
    def unit_bits(self) -> int:
        return 2 * self.code.bits

    def finished(self, value):
        """A sum as float32."""
        value = T.cast(T.reinterpret("int32", value), "float32")
        return value if self.code.bits == 8 else value * T.float32(1 / 16)

    def table_bytes(self, pairs: bool) -> int:
        return 0

    def place(self, role: str) -> None:
        return None


class Consumer:
    """A warpgroup's share of the multiplication, as in `wgmma`: its fragments are loaded, and made out of nibbles."""

    def __init__(self, k: Kernel, stages: Ring):
        self.k, self.ring, self.tile, self.weight, self.stage = k, stages, k.tile, k.weight, Stage(k.weight, k.tile)
        tile, self.width = self.tile, self.tile.tokens // 2
        # From lane 0, so that the compiler knows that the warp agrees, and computes addresses once for all lanes.
        team = T.alloc_local([1], "int32")
        ptx("shfl_sync.idx.b32", team[0], k.team, T.uint32(0), T.uint32(31), T.uint32(0xFFFFFFFF))
        self.team = team[0] if tile.teams > 1 else T.int32(0)
        self.cursor, self.previous = Cursor(tile.stages, self.team, 0), register("int32", T.int32(0))
        self.fragments = T.alloc_local([2 * tile.batch * tile.blocks * 4], "uint32")
        self.acc = T.alloc_local([tile.blocks * self.width], self.weight.sums)  # [block, token tile, register]
        base, words = T.alloc_local([1], "uint64"), T.alloc_local([2], "uint32")
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(base[0]), k.pool.ptr_to([0]), 1, 64, 3))
        ptx("mov.b64", words[0], words[1], base[0])
        self.base, self.low = words, T.alloc_local([1], "uint32")

    def multiply(self, begin, end):
        """acc = the part's features x tokens, over the team's share of stages begin .. end; -> whether there is one."""
        tile, cursor = self.tile, self.cursor
        count = register("int32", (end - begin - self.team + (tile.teams - 1)) // tile.teams)
        with T.serial(0, count[0], unroll=False) as i:
            T.evaluate(T.cuda.mbarrier_wait(self.ring.full(cursor.slot), cursor.phase))
            assign(self.low, 0, self.base[0] + T.cast(cursor.slot * (self.stage.offset() // 16), "uint32"))
            for b in range(4 * tile.slice // tile.batch):
                steps = range(b * tile.batch, (b + 1) * tile.batch)
                for j in steps:
                    for f in range(tile.blocks):
                        self._load(j, f)
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

    def _load(self, j: int, f: int) -> None:
        """The A fragment for times j of block f, and with codes of 4 bits that of j + 1 as well.

        Bytes are loaded into the registers of the fragment: not before the instructions that read them last have ended, as
        whoever loads all of a k tile at once would find, for registers that only move are one.
        """
        each = 32 // self.weight.code.bits // 4  # steps of 16 bytes
        if j % each:
            return
        at = self.ring.views["q"].ptr(self.cursor.slot, self.k.block(f), j // 4, self.k.lane + 32 * (j % 4 // each), 0)
        if each == 1:
            ptx("ld.shared.v4.b32", *self._fragment(j, f), at)
            return
        words = T.alloc_local([4], "uint32")
        ptx("ld.shared.v4.b32", *(words[i] for i in range(4)), at)
        for step in range(each):
            a = self._fragment(j + step, f)
            for h in range(2):  # nibbles in the upper halves of bytes: of c in the lower of two, of c + 8 in the upper
                word = words[2 * step + h]
                for r, moved in enumerate((word << T.uint32(4), word)):
                    ptx("and.b32", a[2 * h + r], moved, T.uint32(0xF0F0F0F0))

    def _fragment(self, j: int, f: int) -> list:
        """Registers of the A fragment for times j of block f."""
        first = 4 * (j % (2 * self.tile.batch) * self.tile.blocks + f)
        return [self.fragments[first + r] for r in range(4)]

    def _issue(self, j: int, f: int, add) -> None:
        tile = self.tile
        tokens = min(tile.tokens, WIDEST)
        for first in range(0, tile.tokens, tokens):
            row = j // 4 * tile.tokens + first  # of the stage's x
            descriptor = T.alloc_local([1], "uint64")
            start = row * ROW // 16 + j % 4 * 2  # in units of 16 bytes
            ptx("mov.b64", descriptor[0], self.low[0] + T.uint32(start), self.base[1])
            acc = (self.acc[(f * tile.tokens + first) // 2 + r] for r in range(tokens // 2))
            instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.s8.s8"
            ptx(instruction, *acc, *self._fragment(j, f), descriptor[0], add)
