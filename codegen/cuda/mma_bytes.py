"""Products of bytes by mma.sync: int8 since sm_80, fp8 since sm_89, quantized weights by quantized activations.

The kernel is that of `mma`, which sees units of 16 bits. Weights are A, from registers, tokens B: two units of a register
of m16n8k16 are four inputs of one of m16n8k32 (`byte_weight`).
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, wide, zeros
from qdsl.codegen.cuda.byte_weight import OPERANDS, ByteWeight
from qdsl.codegen.cuda.correct import floats, load_groups, scale_of_block
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.rescale import Rescaling
from qdsl.codegen.cuda.tile import Tile


def tiles(weight: ByteWeight) -> tuple[Tile, ...]:
    """The tiles, by rising number of tokens. A thread of the largest has 64 sums, and as many products where they are promoted;
    where they are not, twice as many, which spares it loads."""
    nothing = "nothing"
    most = {"split": (2, 4, 1)} if weight.promoted else {"split": (2, 2, 1)}
    return (
        Tile("b1", nothing, tokens=1, features=16, split=(1, 1, 8), slice=1, stages=4, resident=2),
        Tile("b8", nothing, tokens=8, features=32, split=(1, 1, 4), slice=1, stages=3, resident=2),
        Tile("b16", nothing, tokens=16, features=32, split=(1, 1, 4), slice=1, stages=3, resident=2),
        Tile("b32", nothing, tokens=32, features=32, split=(1, 1, 4), slice=1, stages=2, resident=2),
        Tile("b64", nothing, tokens=64, features=64, split=(1, 2, 2), slice=1, stages=3, resident=1),
        Tile("b128", nothing, tokens=128, features=128, **most, slice=1, stages=3, resident=1),
    )


class ByteStep:
    """A step that multiplies codes by codes, in the place of those of `correct`:

    acc += scale of the group * scale of the token * sum, or, where there are no scales of groups, acc += sum
    """

    k: Kernel
    tile: Tile
    weight: ByteWeight
    a: tirx.Buffer  # a fragment out of nibbles
    sums: tirx.Buffer | None  # of a step's products, where they are promoted
    scale: tirx.Buffer | None  # of the group: features c and c + 8 of every feature tile
    rescaling: Rescaling | None
    totals: tirx.Buffer | None  # of codes, by feature, where tokens are corrected by them
    start: bool  # the next products are the first of a step
    place: tuple  # of the step: views, slot, step

    def __init__(self, k: Kernel):
        weight = k.weight
        assert isinstance(weight, ByteWeight)
        self.k, self.tile, self.weight = k, k.tile, weight
        features, tokens = self.tile.feature_tiles, self.tile.token_tiles
        self.a = T.alloc_local([4], "uint32")
        promoted = self.weight.promoted
        self.sums = T.alloc_local([4 * features * tokens], self.weight.products) if promoted else None
        self.scale = T.alloc_local([2 * features], "float32") if weight.scale and promoted else None
        self.rescaling = Rescaling(k) if weight.rescaled else None
        self.totals = zeros(4 * features, "uint32") if self.weight.corrected else None
        self.start = True

    def begin(self, views, slot, step) -> None:
        self.start, self.place = True, (views, slot, step)
        if self.rescaling:
            self.rescaling.begin(views, slot, step)
        for f in range(self.tile.feature_tiles if self.scale is not None else 0):
            if self.weight.uniform:
                both = [scale_of_block(self.k, views, slot, self.k.block(f), step)] * 2
            else:
                both = floats(self.k, self.weight.scale, load_groups(self.k, views, slot, f, step)["scale"])
            for r, value in enumerate(both):
                assign(self.scale, 2 * f + r, value)

    def multiply(self, acc, f: int, words, step: int, operands) -> None:
        a, promoted = self._codes(f, words, step), self.sums is not None
        operands = operands[: self.tile.token_tiles]
        for j, b in enumerate(operands):
            self._mma(self.sums if promoted else acc, 4 * (f * len(operands) + j), a, b, self.start and promoted)
        if self.totals is not None:  # of eight tokens whose codes are all 1
            self._mma(self.totals, 4 * f, a, [T.uint32(0x01010101)] * 2, False)
        if f == self.tile.feature_tiles - 1:
            self.start = False

    def _codes(self, f: int, words, step: int) -> list:
        """The A fragment of a step out of the lane's words of feature tile f."""
        if self.weight.code == self.weight.operand:
            return [words[4 * step + 2 * h + r] for h in range(2) for r in range(2)]
        for h in range(2):
            for r in range(2):
                if self.rescaling:
                    self.rescaling.bytes(words[2 * step + h], f, r, self.a[2 * h + r])
                else:
                    ptx("mov.b32", self.a[2 * h + r], self.weight.unpacked(words[2 * step + h], bool(r)))
        return [self.a[i] for i in range(4)]

    def _mma(self, d, first: int, a, b, start: bool) -> None:
        """d[first : first + 4] += a b; with `start`, = a b."""
        operand, floats_ = OPERANDS[self.weight.operand.name], self.weight.products == "float32"
        out = [d[first + i] for i in range(4)]
        c = [T.float32(0) if floats_ else T.uint32(0)] * 4 if start else out
        kind = "f32" if floats_ else "s32"
        ptx(f"mma.sync.aligned.m16n8k32.row.col.{kind}.{operand}.{operand}.{kind}", *out, *a, *b, *c)

    def end(self, acc) -> None:
        if self.sums is None:
            return
        tokens = self.tile.token_tiles
        for j in range(tokens):
            of_tokens = self._token_scales(j)
            for f in range(self.tile.feature_tiles):
                for i in self.tile.result:
                    at, value = 4 * (f * tokens + j) + i, self.weight.number(self.sums[4 * (f * tokens + j) + i])
                    if self.scale is not None:
                        value = value * self.scale[2 * f + i // 2]
                    if of_tokens is not None:
                        value = value * of_tokens[i % 2]
                    assign(acc, at, acc[at] + value)

    def _token_scales(self, j: int):
        """Those of the lane's two tokens of eight; None: there are none of groups."""
        if not self.weight.token_scale:
            return None
        views, slot, step = self.place
        pair, token = T.alloc_local([2], "float32"), self._token(j)
        ptx("ld.shared.v2.f32", pair[0], pair[1], views["token_scale"].ptr(slot, step, 4 * token))
        return pair

    def _token(self, j: int):
        """The first of the lane's two tokens of eight, within the CTA's."""
        return self.k.token_warp * (8 * self.tile.token_tiles) + 8 * j + self.k.lane % 4 * 2

    def correct(self, acc, correction) -> None:
        """acc += a token's correction times the sum of a feature's codes."""
        assert self.totals is not None
        k, tokens = self.k, self.tile.token_tiles
        for j in range(tokens):
            for p in range(2):
                m = tirx.min(k.m0 + self._token(j) + p, k.M - 1)
                off = register("uint32", T.reinterpret("uint32", T.cast(correction(wide(m)), "int32")))[0]
                for f in range(self.tile.feature_tiles):
                    for h in range(2):
                        at = 4 * (f * tokens + j) + 2 * h + p
                        assign(acc, at, acc[at] + off * self.totals[4 * f + 2 * h])
