"""Products of bytes on Hopper: int8 and fp8, weights by activations that the step before has quantized.

Tokens are B, from shared memory; weights are A. Those of bytes come from shared memory, too, where they lie as wgmma wants them,
in matrices of 8 features by 16 bytes; those of nibbles from registers (`byte_weight`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, settled, when, wide
from qdsl.codegen.cuda.byte_weight import ONES, OPERANDS, ByteWeight
from qdsl.codegen.cuda.correct import floats, load_groups, scale_of_block
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.rescale import Rescaling
from qdsl.codegen.cuda.ring import ROW, Ring
from qdsl.codegen.cuda.warpgroup import Warpgroup

ROOM = 224  # registers of a thread for sums, products, their factors and fragments
WIDEST = 128  # tokens of an instruction: TVM knows none of 256 for integers
SHORT = 64  # of an instruction whose products are integers that become float32 every 128 inputs
# Codes in shared memory, as the descriptor of a matrix without swizzle has them: bytes of 8 features by 16 of k, and of 16
# features by a k tile; from one such matrix to the next along k and along features, in units of 16 bytes.
MATRIX, BLOCK = 128, 16 * ROW
LEADING, STRIDE = MATRIX // 16, BLOCK // 2 // 16


def store_ones(k: Kernel) -> None:
    """A matrix of 8 rows by 16 bytes, all 1, behind the barriers; whoever reads it has met all threads before."""
    place = k.table_start // 4
    ones = k.shared((place + ONES // 4,), "uint32")
    with when(k.thread < ONES // 4):
        T.buffer_store(ones, T.uint32(0x01010101), [place + k.thread])
    ptx("fence.proxy.async.shared::cta")


class Consumer(Warpgroup):
    """Weights that are read from the stage, or made out of nibbles.

    Promoted products have registers of their own, for a block of features and up to 128 tokens, or 64 where they are
    integers of groups: a pass. Where there is room for those of two, the multiplier has the next pass of a round before the
    last one's products are added; not the next round's: ptxas lets no products be in the making around a loop while others
    are read.
    """

    weight: ByteWeight
    tokens: int  # of an instruction: columns of its products
    passes: list[tuple[int, int]]  # of a k tile: block, first token
    deep: int  # passes whose products are in registers
    sums: tirx.Buffer  # of products
    rows: int  # of factors: 1 if features c and c + 8 have the same
    count: int  # factors of a row: one for each of a lane's tokens, or 1 for all
    factors: tirx.Buffer  # of the last pass's products
    codes: tirx.Expr  # how far the team's codes are from the stage's tokens, in a descriptor
    rescaling: Rescaling | None
    totals: tirx.Buffer | None  # of codes, by feature, where tokens are corrected by them

    def __init__(self, k: Kernel, stages: Ring):
        weight, tile = k.weight, k.tile
        assert isinstance(weight, ByteWeight)
        self.weight = weight
        self.from_registers = not weight.from_shared
        # Where products become float32 before they are added, short passes are faster: there is room for those of two.
        most = SHORT if weight.promoted and not weight.operand.is_float else WIDEST
        self.tokens = tile.features if tile.turned else min(tile.tokens, most)
        # The sums of 256 tokens leave registers for the fragments of one batch only.
        self.sets = 1 if weight.promoted and tile.blocks * tile.tokens > WIDEST else 2
        super().__init__(k, stages)
        self.totals = T.alloc_local([4 * tile.blocks], "uint32") if weight.ones else None
        self.rescaling = Rescaling(k) if weight.rescaled else None
        if not weight.promoted:
            self.sums = self.acc
        else:
            span = tile.span if tile.turned else self.tokens
            self.passes = [(f, first) for f in range(tile.blocks) for first in range(0, tile.tokens, span)]
            self.rows, self.count = self._factors()
            each, fragments = self.tokens // 2, 16 * self.sets * tile.blocks if self.from_registers else 0
            needed = tile.blocks * self.width + 2 * each + self.rows * self.count + fragments
            self.deep = 2 if needed <= ROOM and len(self.passes) * tile.slice * tile.together > 1 else 1
            assert tile.together == 1 or self.deep == 2, f"{tile}: stages are handed back between two passes"
            self.sums = T.alloc_local([self.deep * each], weight.products)
            self.factors = T.alloc_local([self.rows * self.count], "float32")
        if not self.from_registers:
            # From x's descriptor, from whose address and leading offset of 1 this one differs by the same in every stage.
            away = T.uint32((LEADING - 1 << 16) + self.stage.offset("q") // 16)
            self.codes = away if tile.turned else self._own(4 * tile.blocks * BLOCK) + away

    @property
    def early_release(self) -> bool:
        """Whether the last stage, whose products have ended with it, is handed back before the first pass of this one has
        ended: where others follow it."""
        return len(self.passes) > 1 or self.tile.together > 1

    def _own(self, size: int):
        """How far the warpgroup's share of an operand is from the first one's, in a descriptor: `size` bytes each. As all lanes
        say: the compiler is told that they agree."""
        own, group = T.alloc_local([1], "uint32"), T.cast(self.k.thread // 128 % self.tile.warpgroups, "uint32")
        ptx("shfl_sync.idx.b32", own[0], group, T.uint32(0), T.uint32(31), T.uint32(0xFFFFFFFF))
        return own[0] * T.uint32(size // 16)

    def _factors(self) -> tuple[int, int]:
        """Rows of factors, and how many each has."""
        weight = self.weight
        return 2 if weight.scale and not weight.uniform else 1, self.tokens // 4 if weight.token_scale else 1

    def multiply(self, begin, end):
        if self.weight.promoted:
            for r in range(self.tile.blocks * self.width):
                assign(self.acc, r, T.float32(0))
        return super().multiply(begin, end)

    # ---- promoted products: the next stage is waited for while the last ones of this one are in the making ------------------
    def begin(self, count) -> None:
        self.all_rounds = count
        if self.weight.promoted:
            with when(count > 0):
                self.wait()

    def enter(self) -> None:
        if not self.weight.promoted:
            self.wait()

    def leave(self, i, count) -> None:
        if not self.weight.promoted:
            self.advance()

    def fill(self, steps: Sequence[int]) -> None:
        """Of promoted products, only the first of a stage, where the others are made while those before are multiplied."""
        if self.from_registers and (steps[0] == 0 or not self.weight.promoted or self.sets == 1):
            self._unpack(steps)

    def _unpack(self, steps: Sequence[int]) -> None:
        for j in steps:
            if self.rescaling and j % 4 == 0:
                self.rescaling.begin(self.ring.views, self.cursor.slot, 16 * j // self.stage.step)
            for f in range(self.tile.blocks):
                self._load(j, f)

    def products(self, steps: Sequence[int], i) -> None:
        if not self.weight.promoted:
            return super().products(steps, i)
        a_stage = 4 * self.tile.slice  # times
        end, local = a_stage * self.tile.together, [j % a_stage for j in steps]
        ahead = range(steps[-1] + 1, min(steps[-1] + 1 + len(steps), end))
        all_passes = end // len(steps) * len(self.passes)
        for p, (f, first) in enumerate(self.passes):
            number = steps[0] // len(steps) * len(self.passes) + p  # of the pass in the round
            own, last = number % self.deep, self.deep == 1 or number == all_passes - 1
            begins, ends = p == 0 and local[0] == 0, p == len(self.passes) - 1 and local[-1] == a_stage - 1  # a stage
            ptx("wgmma.fence.sync.aligned")
            for j in local:
                self._multiply(self.sums, own * self.tokens // 2, j, f, first, j > local[0])
            ptx("wgmma.commit_group.sync.aligned")
            # What is loaded meanwhile stays behind the instructions, between which it would keep the next ones waiting.
            T.evaluate(T.cuda.warp_sync())
            if number == 0 and self.early_release:
                self.release(i)
            if self.from_registers and p == 0 and self.sets == 2:
                self._unpack(ahead)
            if self.deep == 2 and number > 0:
                ptx("wgmma.wait_group.sync.aligned", 1)
                if begins:  # the products of the stage before have ended
                    self.ring.release(self.previous[0])
                self._promote(*self.passes[p - 1], 1 - own)
            self._load_factors(local[0] // 4, f, first)
            if ends:
                if number == 0 and not self.early_release:
                    self.release(i)
                self._go_on(i, number < all_passes - 1)
            if last:
                ptx("wgmma.wait_group.sync.aligned", 0)
                self._promote(f, first, own)
        if steps[0] == 0 and len(steps) < end and not self.early_release:
            self.release(i)

    def _go_on(self, i, within: bool) -> None:
        """To the next stage, once it is there: within round i, or to the first of the next one, if there is one."""
        self.advance()
        if within:
            self.wait()
            self.locate()
        else:
            with when(i + 1 < self.all_rounds):
                self.wait()

    def issue(self, j: int, f: int, add) -> None:
        for first in range(0, self.tile.tokens, self.tokens):
            self._multiply(self.acc, (f * self.tile.tokens + first) // 2, j, f, first, add)
        if self.totals is not None:
            codes = self.fragment(j, f) if self.from_registers else [self._codes(j, f)]
            # One matrix of ones is all there is of eight tokens, of any number of inputs.
            ones = self._descriptor(self.base[0] + T.uint32(self.k.table_start // 16), T.uint32(0))
            totals = (self.totals[4 * f + r] for r in range(4))
            ptx("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8", *totals, *codes, ones, add)

    def correct(self, k: Kernel, correction) -> None:
        """acc += a token's correction times the sum of a feature's codes."""
        assert self.totals is not None
        settled(self.totals[r] for r in range(4 * self.tile.blocks))
        for i in range(self.tile.tokens // 8):
            for p in range(2):
                m = tirx.min(k.m0 + 8 * i + k.lane % 4 * 2 + p, k.M - 1)
                off = register("uint32", T.reinterpret("uint32", T.cast(correction(wide(m)), "int32")))[0]
                for f in range(self.tile.blocks):
                    for h in range(2):
                        at = f * self.width + 4 * i + 2 * h + p
                        assign(self.acc, at, self.acc[at] + off * self.totals[4 * f + 2 * h])

    def _multiply(self, sums, at: int, j: int, f: int, first: int, add) -> None:
        """Registers `at` .. of sums = block f by tokens first .. at times j, added to what they hold if `add`."""
        weight, operand = self.weight, OPERANDS[self.weight.operand.name]
        kind, signs = ("f32", (1, 1)) if weight.products == "float32" else ("s32", ())
        registers = (sums[at + r] for r in range(self.tokens // 2))
        instruction = f"wgmma.mma_async.sync.aligned.m64n{self.tokens}k32.{kind}.{operand}.{operand}"
        ptx(instruction, *registers, *self._operands(j, f, first), add, *signs)

    def _operands(self, j: int, f: int, first: int) -> list:
        return [*(self.fragment(j, f) if self.from_registers else [self._codes(j, f)]), self._tokens(j, first)]

    def _tokens(self, j: int, first: int):
        row = j // 4 * self.tile.tokens + first  # of the stage's x
        return self._descriptor(self.low[0] + T.uint32(row * ROW // 16 + j % 4 * 2), self.base[1])

    def _codes(self, j: int, f: int):
        block = j // 4 * (self.tile.features // 16) + 4 * f
        start = self.low[0] + self.codes + T.uint32((block * BLOCK + j % 4 * 2 * MATRIX) // 16)
        return self._descriptor(start, T.uint32(STRIDE))

    @staticmethod
    def _descriptor(low, high):
        """A matrix in shared memory; addresses are in units of 16 bytes."""
        descriptor = T.alloc_local([1], "uint64")
        ptx("mov.b64", descriptor[0], low, high)
        return descriptor[0]

    def _load_factors(self, i: int, f: int, first: int) -> None:
        """What the products of k tile i are multiplied by, for block f and tokens first ..: the group's scale of features c and
        c + 8 times those of the lane's tokens."""
        weight, views, slot, step = self.weight, self.ring.views, self.cursor.slot, 64 * i // self.stage.step
        scales: list = []
        if weight.uniform and weight.scale:
            scales = [scale_of_block(self.k, views, slot, self.k.block(f), step)]
        elif weight.scale:
            scales = floats(self.k, weight.scale, load_groups(self.k, views, slot, f, step)["scale"])
        if not weight.token_scale:
            for r, scale in enumerate(scales):
                assign(self.factors, r, scale)
            return
        pair = T.alloc_local([2], "float32")
        for j in range(self.tokens // 8):
            place = 4 * (first + 8 * j + self.k.lane % 4 * 2)
            ptx("ld.shared.v2.f32", pair[0], pair[1], views["token_scale"].ptr(slot, step, place))
            for r in range(self.rows):
                for t in range(2):
                    assign(self.factors, r * self.count + 2 * j + t, pair[t] * scales[r] if scales else pair[t])

    def _promote(self, f: int, first: int, own: int) -> None:
        """acc of block f and tokens first .. += the products, times their factors."""
        weight, start = self.weight, own * self.tokens // 2
        settled([self.sums[start + r] for r in range(self.tokens // 2)])
        place = self.passes.index((f, first)) * self.tokens // 2
        for j in range(self.tokens // 8):
            for r in range(4):
                at, value = place + 4 * j + r, weight.number(self.sums[start + 4 * j + r])
                if weight.scale or weight.token_scale:
                    token = 2 * j + r % 2 if self.count > 1 else 0
                    value = value * self.factors[(r // 2 if self.rows == 2 else 0) * self.count + token]
                assign(self.acc, at, self.acc[at] + value)

    def _load(self, j: int, f: int) -> None:
        """The A fragments for times j and j + 1 of block f, if j is even: a byte has a nibble of feature c and one of c + 8.

        Not before the instructions that read the registers last have ended, as whoever loads all of a k tile at once would
        find, for registers that only move are one.
        """
        if j % 2:
            return
        words = T.alloc_local([4], "uint32")
        at = self.ring.views["q"].ptr(self.cursor.slot, self.k.block(f), j // 4, self.k.lane + 32 * (j % 4 // 2), 0)
        ptx("ld.shared.v4.b32", *(words[i] for i in range(4)), at)
        for step in range(2):
            a = self.fragment(j + step, f)
            for h in range(2):
                for r in range(2):
                    if self.rescaling:
                        self.rescaling.bytes(words[2 * step + h], f, r, a[2 * h + r])
                    else:
                        ptx("mov.b32", a[2 * h + r], self.weight.unpacked(words[2 * step + h], bool(r)))


class Turned(Consumer):
    """Tokens are A and weights are B, both from the stage: a warpgroup has 64 of every 128 or 192 tokens, and all of the CTA's
    128 features, which share a scale.

    A thread's sums are then of two tokens of 64, whose scales it reads once, and not of two of every eight: what is read from
    shared memory to be multiplied would keep tensor cores from their operands.
    """

    def __init__(self, k: Kernel, stages: Ring):
        super().__init__(k, stages)
        self.rows_of_tokens = self._own(64 * ROW)

    early_release = True

    def _factors(self) -> tuple[int, int]:
        return 2, 1

    def _operands(self, j: int, f: int, first: int) -> list:
        row = j // 4 * self.tile.tokens + first
        start = self.low[0] + self.rows_of_tokens + T.uint32(row * ROW // 16 + j % 4 * 2)
        return [self._descriptor(start, self.base[1]), self._codes(j, 0)]

    def _load_factors(self, i: int, f: int, first: int) -> None:
        k, step, one = self.k, 64 * i // self.stage.step, T.alloc_local([1], "float32")
        scale = scale_of_block(k, self.ring.views, self.cursor.slot, 0, step)
        for r in range(2):
            place = 4 * (first + k.thread // 32 % (4 * self.tile.warpgroups) * 16 + k.lane // 4 + 8 * r)
            ptx("ld.shared.f32", one[0], self.ring.views["token_scale"].ptr(self.cursor.slot, step, place))
            assign(self.factors, r, one[0] * scale)
