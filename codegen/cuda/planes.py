"""One or two tokens and codes of 2 to 4 bits on Hopper: x as planes of bytes, products by mma.sync of bytes.

A product of 16-bit floats takes two weights a register, which cost a mask and often a shift. One of bytes takes four: codes
are bytes once they are masked, and a warp's instruction has 512 of them instead of 256. x becomes bytes, too. Of a token's
inputs of a stage, 256, the largest is between 64 and 127 once all are multiplied by a power of two, c; then four digits to the base
128, each rounded from what the digits before it left, are the planes:

    x = (d0 + d1 / 128 + d2 / 128^2 + d3 / 128^3) / c         d0 = -127 .. 127, the others -64 .. 64

A float16 that is no less than 2^-17 of the largest is exact so, others are off by 2^-28 of the largest at most (codes of 2 bits:
2^-13 and 2^-24, see below). Digits are found with fma.f16x2, which rounds to whole numbers beside 1536, in whose lowest
byte they then are. The eight columns of a product are planes by tokens:

    column 2 p + m    plane p of token m          a lane has the sums of plane t = lane % 4 of both tokens

Inputs may come in any order if those of x and of the weight are in the same one. So codes are taken as they are stored
(`fragments`), four of a word, of one feature, for a register:

    cells of 4 bits    byte 2 p + h of word s has inputs 16 s + 8 h + 2 t + p: of feature c in its lower half, of c + 8 in its
                       upper. Row c gets both, masks nothing, and sums q + 16 q'; row c + 8 gets 16 q', which is taken off then
    codes of 2 bits    byte 2 p + s % 2 of word s // 2 has inputs 16 s + 8 h + 2 t + p: q of feature c in bits 4 h, of c + 8 in
                       bits 4 h + 2. For h = 1 x is multiplied by c / 16, not c: then no code is shifted

Sums of a step are exact integers. They begin at the integer whose bits, as a float32, are 1.5 * 2^23 plus themselves; what zero
points make too much is taken off there, too: a product with -1 in place of every code says how much. After a step they are floats,
multiplied by the scale of the weight; after a stage by 1 / c; and in the end planes are added.

A token with an infinity or NaN gets NaN.
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

PLANES, BASE = 4, 128
WHOLE = 0x4B400000  # 1.5 * 2^23, beside which floats are whole numbers


@dataclass(frozen=True)
class Form:
    """How codes of a width lie in the bytes of an A fragment of 32 inputs.

    rows    bits by which those of feature c + 8 are above those of c
    lifts   bits by which those of the first and of the second half are above the lowest; x is divided by as much
    inputs  of those of a lane's bytes, those of two pairs of neighbours for either half, from 2 t on
    """

    rows: int
    lifts: tuple[int, int]
    inputs: tuple[int, int, int, int]

    @property
    def lows(self) -> tuple[int, ...]:
        """Where codes begin in the bytes of each register."""
        return tuple(self.lifts[r // 2] + self.rows * (r % 2) for r in range(4))


FORMS = {  # by bits
    2: Form(2, (0, 4), (0, 16, 8, 24)),
    3: Form(4, (0, 1), (0, 8, 16, 24)),
    4: Form(4, (0, 0), (0, 8, 16, 24)),
}


def tiles(weight) -> tuple[PlaneTile, ...]:
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
    return tuple(replace(tile, resident=hopper.residents(weight, tile)) for tile in found if hopper.fitted(weight, tile))


@dataclass(frozen=True)
class PlaneTile(WarpTile):
    """A warp tile whose teams are one warp each, which makes the planes of its own stages."""

    correct = "planes"
    stages_x = False
    swizzle = 128

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
    def plane_words(self) -> int:
        """Of a team's planes in shared memory: [plane, k tile, token, t, word]."""
        return PLANES * self.slice * self.tokens * 16

    @property
    def own_bytes(self) -> int:
        return 4 * self.plane_words * self.teams

    @property
    def result(self) -> tuple[int, ...]:
        return (0, 2) if self.tokens == 1 else (0, 1, 2, 3)

    def consumer(self, k: Kernel, stages: Ring) -> PlaneConsumer:
        return PlaneConsumer(k, stages)


def _serves(weight) -> bool:
    if not isinstance(weight, Weight) or weight.table or weight.offset or not weight.code.is_integer:
        return False
    if weight.code.bits not in FORMS or weight.zero not in (None, *INTEGERS) or (weight.group or 32) % 32:
        return False
    # Sums of a step have 22 bits, if codes less their zero points have no more than codes.
    most, sign = (1 << weight.code.bits) - 1, _sign(weight)
    low, high = weight.bias, weight.bias
    if weight.zero:
        kind, bits = weight.zero[0], int(weight.zero[1:])
        low, high = (low - (1 << bits - 1), high + (1 << bits - 1) - 1) if kind == "i" else (low, high + (1 << bits) - 1)
    return max(most - sign - low, high + sign) <= most


def x_bits(weight: Weight) -> int:
    """Bits below the largest of a token that are kept of x: of 28 as many less as some of its codes are higher by."""
    return 27 - max(FORMS[weight.code.bits].lifts)


def _sign(weight: Weight) -> int:
    """What operands are above codes that have a sign."""
    return 1 << weight.code.bits - 1 if weight.code.kind == "int" else 0


class PlaneConsumer(Consumer):
    """A warp's share of the multiplication."""

    def __init__(self, k: Kernel, ring: Ring):
        super().__init__(k, ring)
        self.weight, self.form, tile = k.weight, FORMS[k.weight.code.bits], k.tile
        self.stage, self.planes = Stage(k.weight, tile), Planes(k, self.team, self.form)
        self.sums, self.anything = T.alloc_local([4 * tile.blocks], "uint32"), T.alloc_local([1], "uint32")
        self.less = T.alloc_local([4], "uint32")  # the sums of -1 in place of every code
        self.start = T.alloc_local([4], "uint32")
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
        """Whether anything is taken off sums."""
        return bool(self.weight.zero or self._constant)

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

    def _start(self, f: int, groups) -> list:
        """What the sums of a block begin with; in columns that nobody looks at, with anything."""
        found = [self.anything[0]] * 4
        for r in self.tile.result:
            found[r] = self.start[r] if self._weighed else T.uint32(WHOLE)
            if self.weight.zero:
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
            mask, flip = ((field << low) * 0x01010101 for field in ((1 << self.weight.code.bits) - 1, _sign(self.weight)))
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
        scales = correct.floats(self.k, self.weight.scale, groups["scale"]) if self.weight.scale else None
        for r in self.tile.result:
            at = 4 * f + r
            value = T.reinterpret("float32", self.sums[at]) - T.float32(1.5 * 2**23)
            value = value * scales[r // 2] if scales else value
            assign(self.scaled, at, self.scaled[at] + value if step else value)

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
    """The planes of a team's stages. While a stage is multiplied, the planes of the next are made, and the x of the one after
    that is on its way.

    A lane makes the digits of eight inputs of 64: two words of each plane, for the lanes with its t.
    """

    def __init__(self, k: Kernel, team, form: Form):
        self.k, self.tile, self.form, self.half = k, k.tile, form, HALVES[k.weight.compute]
        lane, tile, tokens = k.lane, k.tile, k.tile.tokens
        self.words = k.shared((k.table_start // 4 + tile.own_bytes // 4,), "uint32")
        first, plane_of = k.table_start // 4 + team * tile.plane_words, lane // 8
        self.base = T.alloc_local([2], "uint32")  # shared addresses: of what the lane stores, of what it loads
        stored = lane // 8 * (16 * tokens) + lane % 4 * 4 + lane // 4 % 2 * 2
        loaded = plane_of * (16 * tokens * tile.slice) + lane // 4 % 2 % tokens * 16 + lane % 4 * 4
        for at, place in enumerate((stored, loaded)):
            ptx("mov.b32", self.base[at], T.cuda.cvta_generic_to_shared(self.words.ptr_to([first + place])))
        self.raw, self.units = T.alloc_local([4 * tokens], "uint32"), T.alloc_local([tokens], "float32")
        self.left = T.alloc_local([1], "int32")  # inputs of x from the lane's first of a stage on
        self.address = T.alloc_local([tokens], "uint64")  # and where that is

    def unit(self, token: int):
        """1 / c of the stage whose planes these are."""
        return self.units[token]

    def begin(self, stage):
        """The planes of the team's first stage, which are stored, and the x of the second."""
        k, size = self.k, 64 * self.tile.slice
        column = stage * size + k.lane // 8 * 64 + k.lane // 4 % 2 * 32 + k.lane % 4 * 2
        assign(self.left, 0, k.K - column)
        for m in range(self.tile.tokens):
            row = k.m0 if self.tile.tokens == 1 else tirx.min(k.m0 + m, k.M - 1)
            ptx("cvta.to.global.u64", self.address[m], k.x.ptr_to([wide(row), wide(column)]))
        self._ask()
        self.make()

    def _ask(self):
        """For the x of a stage, pairs of neighbours, and on to the next."""
        size = 64 * self.tile.slice * self.tile.teams
        for m in range(self.tile.tokens):
            for at in range(4):
                apart = self.form.inputs[at]
                assign(self.raw, 4 * m + at, T.uint32(0))
                with when(self.left[0] > apart):
                    ptx("ld.global.b32", self.raw[4 * m + at], self.address[m] + T.uint64(2 * apart))
            assign(self.address, m, self.address[m] + T.uint64(2 * size))
        assign(self.left, 0, self.left[0] - size)

    def make(self):
        """The planes of the x that has been asked for, in place of those before, which all lanes have read; ask for the next."""
        T.evaluate(T.cuda.warp_sync())
        for m in range(self.tile.tokens):
            self._token(m)
        self._ask()
        T.evaluate(T.cuda.warp_sync())

    def _token(self, m: int):
        half, raw = self.half, [self.raw[4 * m + at] for at in range(4)]
        peak, found = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint32")
        assign(peak, 0, raw[0] & T.uint32(0x7FFF7FFF))
        for word in raw[1:]:
            ptx("max.u16x2", peak[0], peak[0], word & T.uint32(0x7FFF7FFF))
        assign(peak, 1, tirx.max(peak[0] >> T.uint32(16), peak[0] & T.uint32(0xFFFF)))
        ptx("redux_sync.max.u32", found[0], peak[1], T.uint32(0xFFFFFFFF))
        # Its exponent, one more if it is 127.5 or more of 128, and no less than that whose c is the largest.
        f16 = half.ptx == "f16"
        bits, least = half.mantissa, 6 if f16 else 7
        exponent = register("uint32", tirx.max(found[0] + T.uint32(1 << bits - 7) >> T.uint32(bits), T.uint32(least)))
        lower = [self.form.lifts[at // 2] for at in range(4)]
        if f16:
            c = [register("uint32", (T.uint32(36 - by) - exponent[0]) * T.uint32(0x04000400))[0] for by in lower]
            unit = exponent[0] + T.uint32(106)
        else:
            for word, by in zip(raw, lower, strict=True):
                scale = T.reinterpret("float32", T.uint32(260 - by) - exponent[0] << T.uint32(23))
                low, high = (T.reinterpret("float32", w) for w in (word << T.uint32(16), word & T.uint32(0xFFFF0000)))
                ptx("cvt.rn.f16x2.f32", word, high * scale, low * scale)
            c, unit = [T.uint32(0x3C003C00)] * 4, exponent[0] - T.uint32(6)
        nan = found[0] >= T.uint32(half.power(1 << half.exponent - 1))
        unit = T.if_then_else(nan, T.uint32(0x7FFFFFFF), unit << T.uint32(23))
        assign(self.units, m, T.reinterpret("float32", unit))
        fma, beside, minus = "fma.rn.f16x2", T.uint32(0x66006600), T.uint32(0xBC00BC00)
        digit, rest, words = (T.alloc_local([count], "uint32") for count in (4, 1, 2))
        for plane in range(PLANES):
            for at in range(4):
                ptx(fma, digit[at], raw[at], c[at], beside)
                if plane + 1 < PLANES:
                    ptx(fma, rest[0], digit[at], minus, beside)
                    ptx(fma, raw[at], raw[at], c[at], rest[0])
            for q in range(2):
                ptx("prmt.b32", words[q], digit[2 * q], digit[2 * q + 1], T.uint32(0x6240))
            at = T.uint32(64 * (plane * self.tile.slice * self.tile.tokens + m))
            ptx("st.shared.v2.b32", self.base[0] + at, words[0], words[1])
            c = [T.uint32(0x58005800)] * 4  # 128

    def load(self, i: int) -> list:
        """The B fragments of k tile i of the stage: of two times 32 inputs."""
        b = T.alloc_local([4], "uint32")
        address = self.base[1] + T.uint32(64 * i * self.tile.tokens)
        ptx("ld.shared.v4.b32", *(b[r] for r in range(4)), address)
        return [(b[0], b[1]), (b[2], b[3])]


def _mma(d: list, a: list, b, c: list, kind: str):
    """d = a b + c, of bytes: 16 features x 32 inputs x 8 columns."""
    ptx(f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32", *d, *a, *b, *c)
