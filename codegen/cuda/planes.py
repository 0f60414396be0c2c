"""One or two tokens and codes of 2 to 4 bits on Hopper: x as planes of bytes, products of bytes by mma.sync.

Few tokens wait for instructions, not for memory, if codes are narrow. A product of 16-bit floats (`warp`) has 256 weights of a
warp, two in a register, which cost a mask and often a shift; one of bytes has 512, four in a register, and masked codes are bytes.
x becomes bytes, too. Multiplied by a power of two, c, the largest of a token's 256 inputs of a stage is between 63 and 127; then
four digits to the base 128, each rounded from what the ones before it left, are the planes:

    x = (d0 + d1 / 128 + d2 / 128^2 + d3 / 128^3) / c          d0 = -127 .. 127, the others -64 .. 64

So x is kept to 27 bits below the largest (`x_bits`). A digit is found beside 1536 as a float16, where fma rounds to whole numbers,
and then is the lowest byte. The eight columns of a product are planes by tokens:

    column 2 p + m     plane p of token m          lane 4 c + t has the sums of plane t, of both tokens

Inputs may be multiplied in any order, if x has the same one as the weight. So codes are taken as they are stored (`fragments`):
four bytes of a word, of the same feature, are a register of A, wherever in their bytes the codes are. What they are too high by
within a row is divided out at last; within a half of 32 inputs, x is divided by as much, instead of a shift (`Form`):

    bits of a byte       7   6   5   4   3   2   1   0
    codes of 4 bits      r1  r1  r1  r1  r0  r0  r0  r0       r0, r1: feature c, c + 8; byte 2 p + h of word s
    of 3, s even             r1  r1  r1      r0  r0  r0       s: inputs 16 s + 8 h + 2 t + p, a half of an instruction
          s odd          r1  r1  r1      r0  r0  r0           x / 2; lower two bits are a bit higher in storage, the third lower
    of 2                 r1  r1  r0  r0  r1  r1  r0  r0       h = 1 (x / 16), then h = 0, of two s: byte 2 p + s % 2

Sums of a step are whole numbers below 2^22. They begin with what is 1.5 * 2^23 as a float, so that they are floats in the end,
less what zero points make too much: a product with -1 in place of every code says how much that is. After a step they are multiplied
by its scale, after a stage by 1 / c; in the end, planes are added.

A token with a number that is infinite, or none, gets NaN everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import correct, decode, hopper
from qdsl.codegen.cuda.builder import assign, ptx, register, when, wide
from qdsl.codegen.cuda.decode import HALVES
from qdsl.codegen.cuda.fragments import load_block
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.ring import Ring
from qdsl.codegen.cuda.stage import Stage
from qdsl.codegen.cuda.warp import Consumer, WarpTile
from qdsl.codegen.cuda.weight import INTEGERS, Weight

PLANES = 4
WHOLE = 0x4B400000  # 1.5 * 2^23, beside which floats are whole numbers


@dataclass(frozen=True)
class Form:
    """How codes of a width lie in the bytes of an A fragment: 32 inputs in two halves, those of registers 0, 1 and of 2, 3.

    rows    bits by which codes of feature c + 8 are above those of c
    lifts   bits by which those of a half are above the lowest, by which x is divided
    inputs  from 2 t on, the pairs of neighbours that are a lane's bytes 0, 2 and 1, 3 of the first half, and of the second
    """

    rows: int
    lifts: tuple[int, int]
    inputs: tuple[int, int, int, int]

    @property
    def lows(self) -> tuple[int, ...]:
        """The bit that codes begin at, by register."""
        return tuple(self.lifts[r // 2] + self.rows * (r % 2) for r in range(4))


FORMS = {  # by bits
    2: Form(2, (0, 4), (0, 16, 8, 24)),
    3: Form(4, (0, 1), (0, 8, 16, 24)),
    4: Form(4, (0, 0), (0, 8, 16, 24)),
}


def tiles(weight: Weight) -> tuple[PlaneTile, ...]:
    """The tiles for a weight, by rising number of tokens; none where it has other codes or groups."""
    if not _serves(weight):
        return ()
    found = (
        PlaneTile("p1_narrow", 1, warps=1, blocks=2, teams=8, slice=4, stages=16, resident=2),
        PlaneTile("p1", 1, warps=1, blocks=4, teams=8, slice=4, stages=16, resident=2),
        PlaneTile("p1_wide", 1, warps=1, blocks=8, teams=8, slice=4, stages=16, resident=1),
        PlaneTile("p2", 2, warps=1, blocks=4, teams=8, slice=4, stages=16, resident=2),
    )
    # Stages of wide codes leave no room for another CTA: then it needs no registers, either.
    return tuple(
        replace(tile, resident=hopper.residents(weight, tile)) for tile in found if hopper.fitted(weight, tile)
    )


@dataclass(frozen=True)
class PlaneTile(WarpTile):
    """The part of y that one CTA computes. A warp is a team, and makes the planes of its own stages, of 256 inputs."""

    correct = "planes"
    stages_x = False

    def __post_init__(self):
        super().__post_init__()
        assert self.warps == 1 and self.tokens <= 2, f"{self}: a warp has planes of its own, of two tokens at most"
        assert self.slice == 4, f"{self}: a lane makes planes of eight inputs of a stage"

    def __str__(self):
        return f"{super().__str__()}, x in {PLANES} planes of bytes"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (0,)

    @property
    def swizzle(self) -> int:
        return 128

    @property
    def plane_bytes(self) -> int:
        """Of a team's planes in shared memory: words [plane, k tile, token, t, B fragments of the two times 32 inputs]."""
        return 4 * PLANES * self.slice * self.tokens * 4 * 4

    @property
    def own_bytes(self) -> int:
        return self.plane_bytes * self.teams

    def consumer(self, k: Kernel, stages: Ring) -> PlaneConsumer:
        return PlaneConsumer(k, stages)


def _serves(weight: Weight) -> bool:
    if weight.table or not weight.code.is_integer or weight.code.bits not in FORMS or (weight.group or 32) % 32:
        return False
    # Sums are below 2^22 if codes less their zero points have no more bits than codes.
    most, sign = (1 << weight.code.bits) - 1, _sign(weight)
    low, high = weight.bias, weight.bias
    if weight.zero in INTEGERS:
        kind, bits = weight.zero[0], int(weight.zero[1:])
        low, high = (
            (low - (1 << bits - 1), high + (1 << bits - 1) - 1) if kind == "i" else (low, high + (1 << bits) - 1)
        )
    return max(most - sign - low, high + sign) <= most


def x_bits(weight: Weight) -> int:
    """Bits below the largest of a token that are kept of x: fewer where it is divided."""
    return 27 - max(FORMS[weight.code.bits].lifts)


def _sign(weight: Weight) -> int:
    """What operands are above codes with a sign, whose highest bit is the other way round there."""
    return 1 << weight.code.bits - 1 if weight.code.kind == "int" else 0


class PlaneConsumer(Consumer):
    """A warp's share of the multiplication: its stages, a step and a block of features after the other."""

    def __init__(self, k: Kernel, ring: Ring):
        super().__init__(k, ring)
        self.weight, self.form, tile = k.weight, FORMS[k.weight.code.bits], k.tile
        self.stage, self.planes = Stage(k.weight, tile), Planes(k, self.team, self.form)
        self.sums, self.anything = T.alloc_local([4 * tile.blocks], "uint32"), T.alloc_local([1], "uint32")
        self.less = T.alloc_local([4], "uint32")  # the sums of -1 in place of every code
        self.start, self.taken = T.alloc_local([4], "uint32"), T.alloc_local([4], "float32")  # `less` as floats
        self.scaled = T.alloc_local([4 * tile.blocks], "float32")
        self.a, self.word = T.alloc_local([4], "uint32"), T.alloc_local([1], "uint32")

    def multiply(self, begin, end):
        """acc = the part's features x tokens, over the team's share of stages begin .. end; -> whether to store it."""
        teams, cursor, planes = self.tile.teams, self.cursor, self.planes
        count = register("int32", (end - begin - self.team + (teams - 1)) // teams)
        read = register("int32", T.int32(-1))
        planes.begin(begin + self.team)
        with T.serial(0, count[0], unroll=False):
            with when(read[0] >= 0):
                self.ring.release(read[0])
            T.evaluate(T.cuda.mbarrier_wait(self.ring.full(cursor.slot), cursor.phase))
            self._stage(cursor.slot)
            planes.make()
            assign(read, 0, cursor.slot)
            cursor.advance(teams)
        self._finish()
        return None

    def _stage(self, slot):
        """acc += one stage."""
        k, tile = self.k, self.tile
        units = self.stage.step // 32  # 32 inputs are an instruction's
        for step in range(self.stage.steps):
            pairs = [divmod(u, 2) for u in range(step * units, (step + 1) * units)]
            tokens = {i: self.planes.load(i) for i, _ in pairs}
            if self._weighed:
                self._weigh([tokens[i][j] for i, j in pairs])
            for f in range(tile.blocks):
                d = [self.sums[4 * f + r] for r in range(4)]
                groups = correct.load_groups(k, self.views, slot, f, step)
                for at, (i, j) in enumerate(pairs):
                    if j == 0 or at == 0:
                        codes = load_block(k, self.views["q"], slot, f, i)
                    a = self._operand(codes, j)
                    _mma(d, a, tokens[i][j], d if at else self._start(f, groups), "u8")
                self._scale(f, groups, step)
        for f in range(tile.blocks):
            for r in tile.result:
                at = 4 * f + r
                assign(self.acc, at, self.acc[at] + self.scaled[at] * self.planes.unit(r % 2))

    @property
    def _weighed(self) -> bool:
        """Whether anything is taken off sums, or added for every number of x."""
        return bool(self.weight.zero or self._constant or self.weight.offset)

    @property
    def _whole(self) -> bool:
        """Whether zero points are loaded that are whole numbers."""
        return self.weight.zero in INTEGERS

    @property
    def _constant(self) -> int:
        """What all operands are above what they stand for."""
        return self.weight.bias + _sign(self.weight)

    def _weigh(self, operands):
        """What sums of a step begin with, as far as all features agree."""
        # -1 where the codes of a register are
        a = [T.uint32((-1 << low & 0xFF) * 0x01010101) for low in self.form.lows]
        less = [self.less[r] for r in range(4)]
        for at, b in enumerate(operands):
            _mma(less, a, b, less if at else [T.uint32(0)] * 4, "s8")
        for r in self.tile.result:
            assign(self.start, r, less[r] * T.uint32(self._constant) + T.uint32(WHOLE))
            if self.weight.offset or (self.weight.zero and not self._whole):
                assign(self.taken, r, _float(less[r] + T.uint32(WHOLE)))

    def _start(self, f: int, groups) -> list:
        """What the sums of a block begin with; in columns that nobody looks at, with anything."""
        found = [self.anything[0]] * 4
        for r in self.tile.result:
            found[r] = self.start[r] if self._weighed else T.uint32(WHOLE)
            if self._whole:
                zero = correct.zero_point(self.weight, groups, r // 2)
                assign(self.sums, 4 * f + r, zero * self.less[r] + self.start[r])
                found[r] = self.sums[4 * f + r]
        return found

    def _operand(self, words, j: int) -> list:
        """The A fragment of 32 inputs: the j'th of a lane's words for 64."""
        a, word = [self.a[r] for r in range(4)], None
        for r, low in enumerate(self.form.lows):
            if r % 2 == 0:
                word = self._word(words, j, r // 2)
            mask, flip = (
                (field << low) * 0x01010101 for field in ((1 << self.weight.code.bits) - 1, _sign(self.weight))
            )
            ptx("lop3.b32", a[r], word, T.uint32(mask), T.uint32(flip), 0x6A)  # (a & b) ^ c
        return a

    def _word(self, words, j: int, h: int):
        """What has the codes of half of 32 inputs: of 3 bits, put together from planes of them, higher by so many bits."""
        bits, lift = self.weight.code.bits, self.form.lifts[h]
        if bits == 2:
            return words[j]
        if bits == 4:
            return words[2 * j + h]
        (merge,) = decode.merged(bits, 2 * j + h)
        lower, upper = (decode.shifted(replace(field, shift=field.shift - lift), words) for field in merge.fields)
        ptx("lop3.b32", self.word[0], lower, T.uint32(merge.fields[0].mask << lift), upper, 0xE2)  # (a & b) | (c & ~b)
        return self.word[0]

    def _scale(self, f: int, groups, step: int):
        """The sums of a block and a step, as floats, times their scales."""
        weight = self.weight
        scales = correct.floats(self.k, weight.scale, groups["scale"]) if weight.scale else None
        zeros = correct.floats(self.k, weight.zero, groups["zero"]) if weight.zero and not self._whole else None
        offsets = correct.offsets(self.k, groups["offset"]) if weight.offset else None
        for r in self.tile.result:
            at, value = 4 * f + r, _float(self.sums[4 * f + r])
            value = value + zeros[r // 2] * self.taken[r] if zeros else value
            value = value * scales[r // 2] if scales else value
            total = self.scaled[at] + value if step else value
            assign(self.scaled, at, total - offsets[r // 2] * self.taken[r] if offsets else total)

    def _finish(self):
        """Of a feature and a token, the lanes' sums of planes are added."""
        plane = T.reinterpret("float32", T.cast(127 - 7 * (self.k.lane % 4), "uint32") << T.uint32(23))
        high = 1 << self.form.rows
        for f in range(self.tile.blocks):
            for r in self.tile.result:
                at = 4 * f + r
                assign(self.acc, at, self.acc[at] * (plane * T.float32(1 / high) if r >= 2 else plane))
                for apart in (1, 2):
                    other = T.alloc_local([1], "uint32")
                    own = T.reinterpret("uint32", self.acc[at])
                    ptx("shfl_sync.bfly.b32", other[0], own, T.uint32(apart), T.uint32(31), T.uint32(0xFFFFFFFF))
                    assign(self.acc, at, self.acc[at] + T.reinterpret("float32", other[0]))


class Planes:
    """The planes of a team's stages, one stage at a time; while it is multiplied, the x of the next is on its way.

    A lane makes a word of every plane for each half of 32 inputs, of eight numbers of x.
    """

    def __init__(self, k: Kernel, team, form: Form):
        self.k, self.tile, self.form, self.half = k, k.tile, form, HALVES[k.weight.compute]
        lane, tile, tokens = k.lane, k.tile, k.tile.tokens
        i, part, t = lane // 8, lane // 4 % 2, lane % 4  # k tile, which 32 of its inputs, which of them
        planes = k.shared((k.table_start + tile.own_bytes,), "uint8")
        stored = (i * tokens * 4 + t) * 16 + part * 8
        loaded = ((lane // 8 * tile.slice * tokens + part % tokens) * 4 + t) * 16  # column 2 p + m is lane // 4
        self.stored, self.loaded = (T.alloc_local([1], "uint32") for _ in range(2))
        for address, place in ((self.stored, stored), (self.loaded, loaded)):
            first = planes.ptr_to([k.table_start + team * tile.plane_bytes + place])
            ptx("mov.b32", address[0], T.cuda.cvta_generic_to_shared(first))
        self.first = i * 64 + part * 32 + 2 * t  # input of a stage
        self.left = T.alloc_local([1], "int32")  # inputs from there to the end of x
        self.address = T.alloc_local([tokens], "uint64")  # where that is
        self.raw, self.units = T.alloc_local([4 * tokens], "uint32"), T.alloc_local([tokens], "float32")

    def unit(self, m: int):
        """1 / c of a token; NaN if not all of its numbers are finite."""
        return self.units[m]

    def begin(self, stage):
        """The planes of the team's first stage."""
        k, column = self.k, stage * (64 * self.tile.slice) + self.first
        assign(self.left, 0, k.K - column)
        for m in range(self.tile.tokens):
            row = k.m0 if self.tile.tokens == 1 else tirx.min(k.m0 + m, k.M - 1)
            ptx("cvta.to.global.u64", self.address[m], k.x.ptr_to([wide(row), wide(column)]))
        self._ask()
        self.make()

    def make(self):
        """The planes of the stage that was asked for, in place of those before, which all lanes have read."""
        T.evaluate(T.cuda.warp_sync())
        for m in range(self.tile.tokens):
            self._token(m, [self.raw[4 * m + at] for at in range(4)])
        self._ask()
        T.evaluate(T.cuda.warp_sync())

    def load(self, i: int) -> list:
        """The B fragments of k tile i: of two times 32 inputs."""
        b = T.alloc_local([4], "uint32")
        ptx("ld.shared.v4.b32", *(b[r] for r in range(4)), self.loaded[0] + T.uint32(64 * i * self.tile.tokens))
        return [(b[0], b[1]), (b[2], b[3])]

    def _ask(self):
        """For the lane's x of the team's next stage: pairs of neighbours, zeros beyond the end."""
        size = 64 * self.tile.slice * self.tile.teams
        for m in range(self.tile.tokens):
            for at, apart in enumerate(self.form.inputs):
                assign(self.raw, 4 * m + at, T.uint32(0))
                with when(self.left[0] > apart):
                    ptx("ld.global.b32", self.raw[4 * m + at], self.address[m] + T.uint64(2 * apart))
            assign(self.address, m, self.address[m] + T.uint64(2 * size))
        assign(self.left, 0, self.left[0] - size)

    def _token(self, m: int, x: list):
        """Digits of a token's x, plane by plane, to shared memory."""
        c = self._scale(m, x)
        fma, beside, minus = "fma.rn.f16x2", T.uint32(0x66006600), T.uint32(0xBC00BC00)  # 1536, -1
        digit, rest, words = (T.alloc_local([count], "uint32") for count in (4, 1, 2))
        for plane in range(PLANES):
            for at in range(4):
                ptx(fma, digit[at], x[at], c[at], beside)
                if plane + 1 < PLANES:
                    ptx(fma, rest[0], digit[at], minus, beside)
                    ptx(fma, x[at], x[at], c[at], rest[0])
            for h in range(2):
                ptx("prmt.b32", words[h], digit[2 * h], digit[2 * h + 1], T.uint32(0x6240))
            place = T.uint32(64 * (plane * self.tile.slice * self.tile.tokens + m))
            ptx("st.shared.v2.b32", self.stored[0] + place, words[0], words[1])
            c = [T.uint32(0x58005800)] * 4  # 128

    def _scale(self, m: int, x: list) -> list:
        """c, of each of a lane's pairs, which are float16 then; 1 if they are multiplied already."""
        half, lifts = self.half, [self.form.lifts[at // 2] for at in range(4)]
        peak, largest = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint32")
        assign(peak, 0, x[0] & T.uint32(0x7FFF7FFF))
        for pair in x[1:]:
            ptx("max.u16x2", peak[0], peak[0], pair & T.uint32(0x7FFF7FFF))
        assign(peak, 1, tirx.max(peak[0] >> T.uint32(16), peak[0] & T.uint32(0xFFFF)))
        ptx("redux_sync.max.u32", largest[0], peak[1], T.uint32(0xFFFFFFFF))
        # c is 2^6 over the exponent of the largest, or half of that if the largest would be rounded to 128; but not beyond its
        # type, where all that x can be is kept anyway.
        f16 = half.ptx == "f16"
        exponent = largest[0] + T.uint32(1 << half.mantissa - 7) >> T.uint32(half.mantissa)
        exponent = register("uint32", tirx.max(exponent, T.uint32(6 if f16 else 7)))[0]
        unit = exponent + T.uint32(106) if f16 else exponent - T.uint32(6)
        finite = largest[0] < T.uint32(half.power(1 << half.exponent - 1))
        unit = T.if_then_else(finite, unit << T.uint32(23), T.uint32(0x7FFFFFFF))
        assign(self.units, m, T.reinterpret("float32", unit))
        if f16:
            return [register("uint32", (T.uint32(36 - by) - exponent) * T.uint32(0x04000400))[0] for by in lifts]
        for pair, by in zip(x, lifts, strict=True):
            c = T.reinterpret("float32", T.uint32(260 - by) - exponent << T.uint32(23))
            low, high = (T.reinterpret("float32", bits) for bits in (pair << T.uint32(16), pair & T.uint32(0xFFFF0000)))
            ptx("cvt.rn.f16x2.f32", pair, high * c, low * c)
        return [T.uint32(0x3C003C00)] * 4


def _float(bits):
    """A sum that began with `WHOLE`."""
    return T.reinterpret("float32", bits) - T.float32(1.5 * 2**23)


def _mma(d: list, a: list, b, c: list, kind: str):
    """d = a b + c, of bytes: 16 features x 32 inputs x 8 columns."""
    ptx(f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32", *d, *a, *b, *c)
