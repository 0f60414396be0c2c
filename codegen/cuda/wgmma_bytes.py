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

from qdsl.codegen.cuda.builder import ptx
from qdsl.codegen.cuda.decode import HALVES, Half
from qdsl.codegen.cuda.ring import ROW
from qdsl.codegen.cuda.warpgroup import Warpgroup
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


class Consumer(Warpgroup):
    """Codes that are loaded as fragments, or made out of nibbles, by codes."""

    def fill(self, steps) -> None:
        for j in steps:
            for f in range(self.tile.blocks):
                self._load(j, f)

    def _load(self, j: int, f: int) -> None:
        """The A fragment for times j of block f, and with codes of 4 bits that of j + 1 as well.

        Bytes are loaded into the registers of the fragment: not before the instructions that read them last have ended, as
        whoever loads all of a k tile at once would find, for registers that only move are one.
        """
        each = 32 // self.k.weight.code.bits // 4  # steps of 16 bytes
        if j % each:
            return
        at = self.ring.views["q"].ptr(self.cursor.slot, self.k.block(f), j // 4, self.k.lane + 32 * (j % 4 // each), 0)
        if each == 1:
            ptx("ld.shared.v4.b32", *self.fragment(j, f), at)
            return
        words = T.alloc_local([4], "uint32")
        ptx("ld.shared.v4.b32", *(words[i] for i in range(4)), at)
        for step in range(each):
            a = self.fragment(j + step, f)
            for h in range(2):  # nibbles in the upper halves of bytes: of c in the lower of two, of c + 8 in the upper
                word = words[2 * step + h]
                for r, moved in enumerate((word << T.uint32(4), word)):
                    ptx("and.b32", a[2 * h + r], moved, T.uint32(0xF0F0F0F0))

    def issue(self, j: int, f: int, add) -> None:
        tile = self.tile
        tokens = min(tile.tokens, WIDEST)
        for first in range(0, tile.tokens, tokens):
            row = j // 4 * tile.tokens + first  # of the stage's x
            descriptor = T.alloc_local([1], "uint64")
            start = row * ROW // 16 + j % 4 * 2  # in units of 16 bytes
            ptx("mov.b64", descriptor[0], self.low[0] + T.uint32(start), self.base[1])
            acc = (self.acc[(f * tile.tokens + first) // 2 + r] for r in range(tokens // 2))
            instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.s8.s8"
            ptx(instruction, *acc, *self.fragment(j, f), descriptor[0], add)
