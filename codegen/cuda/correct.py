"""Registers -> accumulators, over one step: the extent along k that shares one scale and zero (`Stage.step`).

Scale and zero meet the codes in one of two places (`Tile.correct`): few tokens correct the sums of a group
(SumStep), many tokens correct the weights (WeightStep). Either way `begin` loads scale and zero, `multiply` takes
16 of k of one feature tile, and after `end` the accumulators have it all.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import decode
from qdsl.codegen.cuda.builder import assign, ptx
from qdsl.codegen.cuda.decode import Emitter
from qdsl.codegen.cuda.fragments import mma
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.stage import Stage, group_bytes
from qdsl.codegen.cuda.weight import BYTES, INTEGERS, NIBBLES, Weight


class SumStep:
    """A step that multiplies bias + factor * q and corrects the sum:

        acc += scale * (sum - (bias + factor * zero) * row_sum) + factor * offset * row_sum

    One more mma, with ones as A, gives row_sum, the sum of x, unless there is nothing to take off or to add. Where tokens are
    several times eight, bias + factor * zero is taken off every code instead, exactly (`Weight.taken_off`). Codes may be
    multiplied by a power of two (Weight.factor); that factor is divided out of the partial sums, exactly.
    """

    def __init__(self, k: Kernel):
        self.k, self.tile, self.weight = k, k.tile, k.weight
        tokens, features = self.tile.token_tiles, self.tile.feature_tiles
        self.sums = T.alloc_local([4 * features * tokens], "float32")
        self.row_sums = T.alloc_local([4 * tokens], "float32")
        self.a = T.alloc_local([4], "uint32")
        self.emit = Emitter(self.weight.decoded(0, 0), k.table, k.pairs, k.lane)
        self.scale = T.alloc_local([2 * features], "float32")
        self.taken_off = self.weight.taken_off(tokens)
        self.shift = T.alloc_local([2 * features], "uint32" if self.taken_off else "float32")
        self.offset = T.alloc_local([2 * features], "float32") if self.weight.offset else None
        shifted = self.weight.zero is not None or any(self.weight.nothing(r) for r in range(2))
        self.shifted = shifted and not self.taken_off
        self.start = True

    def begin(self, views, slot, step: int):
        self.start = True
        for f in range(self.tile.feature_tiles):
            words = load_groups(self.k, views, slot, f, step)
            if self.weight.scale:
                for r, value in enumerate(floats(self.k, self.weight.scale, words["scale"])):
                    assign(self.scale, 2 * f + r, value)
            if self.taken_off:
                for r in range(2):
                    zero = _zero(self.weight, words, r)
                    assign(self.shift, 2 * f + r, _negative(self.weight, r, zero, divided=False))
            elif self.shifted:
                for r, value in enumerate(self._shifts(words.get("zero"))):
                    assign(self.shift, 2 * f + r, value)
            if self.weight.offset:
                for r, value in enumerate(_offsets(self.k, words["offset"])):
                    assign(self.offset, 2 * f + r, value * T.float32(self.weight.factor(r)))

    @property
    def ones(self) -> list:
        """An A fragment whose product is row_sum."""
        return [T.uint32(self.weight.half.one * 0x10001)] * 4

    def _shifts(self, words):
        weight = self.weight
        factors = [weight.factor(r) for r in range(2)]
        constants = [weight.nothing(r) for r in range(2)]
        if words is None:
            return [T.float32(constant) for constant in constants]
        if weight.zero != "u4":
            zeros = floats(self.k, weight.zero, words)
            return [zeros[r] * T.float32(factors[r]) + T.float32(constants[r]) for r in range(2)]
        upper = words[0] & T.uint32(0xF0) if factors[1] == 16 else words[0] >> T.uint32(4)
        # An integer below 2^23 or-ed into the bits of 2^23 is 2^23 plus that integer.
        found = [T.reinterpret("float32", n | T.uint32(0x4B000000)) for n in (words[0] & T.uint32(15), upper)]
        return [found[r] + T.float32(constants[r] - 2**23) for r in range(2)]

    def multiply(self, acc, f: int, words, step: int, operands):
        words = self.emit.whole(self.weight.decoded(step, 0), words)
        for register in range(4):
            out = self.a[register]
            self.emit.halves(self.weight.decoded(step, register), words, out)
            if self.taken_off:
                half = self.weight.half
                ptx(f"fma.rn.{half.ptx}x2", out, out, T.uint32(half.one * 0x10001), self.shift[2 * f + register % 2])
        a = [self.a[register] for register in range(4)]
        operands = operands[: self.tile.token_tiles]
        for j, b in enumerate(operands):
            mma(self.weight, self.sums, 4 * (f * len(operands) + j), a, b, self.start)
        if f == self.tile.feature_tiles - 1:
            for j, b in enumerate(operands if self.shifted or self.weight.offset else ()):
                mma(self.weight, self.row_sums, 4 * j, self.ones, b, self.start)
            self.start = False

    def end(self, acc):
        tokens = self.tile.token_tiles
        for f in range(self.tile.feature_tiles):
            for j in range(tokens):
                for i in self.tile.result:
                    at, r = 4 * (f * tokens + j) + i, 2 * f + i // 2
                    value = self.sums[at]
                    if self.shifted:
                        value = value - self.shift[r] * self.row_sums[4 * j + i % 2]
                    value = self.scale[r] * value if self.weight.scale else value
                    if self.weight.offset:
                        value = value + self.offset[r] * self.row_sums[4 * j + i % 2]
                    assign(acc, at, acc[at] + value)


class WeightStep:
    """A step that multiplies finished weights: (bias + q) - (bias + zero), exact, times scale plus offset, rounded once.

    `Weight.arithmetic` says how.
    """

    def __init__(self, k: Kernel):
        self.k, self.tile, self.weight = k, k.tile, k.weight
        self.packed = self.weight.arithmetic != "floats"
        dtype = "uint32" if self.packed else "float32"
        self.a = T.alloc_local([4], "uint32")
        self.emit = Emitter(self.weight.decoded(0, 0), k.table)
        self.scale = T.alloc_local([2 * self.tile.feature_tiles], dtype)
        self.shift = T.alloc_local([2 * self.tile.feature_tiles], dtype)
        self.offset = T.alloc_local([2 * self.tile.feature_tiles], dtype) if self.weight.offset else None
        self.zero = None
        if self.packed and self.weight.zero not in (None, *INTEGERS):
            self.zero = T.alloc_local([2 * self.tile.feature_tiles], dtype)
        if self.weight.arithmetic == "split":
            self.scale_low, self.low = T.alloc_local([2 * self.tile.feature_tiles], dtype), T.alloc_local([1], dtype)

    def begin(self, views, slot, step: int):
        for f in range(self.tile.feature_tiles):
            words = load_groups(self.k, views, slot, f, step)
            if self.packed:
                self._pack(f, words)
                continue
            for role, target in (("scale", self.scale), ("zero", self.shift)):
                if role in words:
                    for r, value in enumerate(floats(self.k, self.weight.grouped[role], words[role])):
                        assign(target, 2 * f + r, value)
            if self.weight.offset:
                for r, value in enumerate(_offsets(self.k, words["offset"])):
                    assign(self.offset, 2 * f + r, value)

    def _pack(self, f: int, words):
        """Scale, -(bias / factor + zero) and offset as packed pairs of equal halves; a float zero stands apart."""
        weight, half = self.weight, self.weight.half
        for r in range(2):
            way, zero = weight.decoded(0, r), None
            if self.zero is not None:
                self._pair("zero", words, r, self.zero[2 * f + r])
                assign(self.zero, 2 * f + r, self.zero[2 * f + r] ^ T.uint32(0x80008000))
            else:
                zero = _zero(weight, words, r)
            nothing = weight.nothing(r) / way.factor
            if way.bias > 0:
                assign(self.shift, 2 * f + r, _negative(weight, r, zero, divided=True))
            elif zero is not None:
                value = T.float32(-nothing) - T.cast(T.reinterpret("int32", zero), "float32")
                ptx(f"cvt.rn.{half.ptx}x2.f32", self.shift[2 * f + r], value, value)
            else:
                assign(self.shift, 2 * f + r, T.uint32(decode.bits(half, -nothing) * 0x10001))
            if weight.arithmetic == "split":
                self._split(2 * f + r, floats(self.k, weight.scale, words["scale"])[r])
            elif weight.scale:
                self._pair("scale", words, r, self.scale[2 * f + r])
            if weight.offset:
                self._pair("offset", words, r, self.offset[2 * f + r])
                if weight.subtract:
                    assign(self.offset, 2 * f + r, self.offset[2 * f + r] ^ T.uint32(0x80008000))

    def _pair(self, role: str, words, r: int, out):
        """out = the role's number of feature c + 8 r, twice."""
        found = halves(self.k, self.weight.grouped[role], words[role])
        if found and found[0] == self.weight.compute:
            ptx("prmt.b32", out, found[1], found[1], T.uint32(0x3232 if r else 0x1010))
        else:
            value = floats(self.k, self.weight.grouped[role], words[role])[r]
            ptx(f"cvt.rn.{self.weight.half.ptx}x2.f32", out, value, value)

    def _split(self, at: int, scale):
        """The scale as a sum of two bf16 numbers, each as a packed pair."""
        ptx("cvt.rn.bf16x2.f32", self.scale[at], scale, scale)
        rest = scale - T.reinterpret("float32", self.scale[at] & T.uint32(0xFFFF0000))
        ptx("cvt.rn.bf16x2.f32", self.scale_low[at], rest, rest)

    def weights(self, f: int, words, step: int, a):
        """a = the A fragment of a step out of the lane's words of feature tile f, as finished weights."""
        words = self.emit.whole(self.weight.decoded(step, 0), words)
        for register in range(4):
            (self._packed_pair if self.packed else self._float_pair)(f, words, step, register, a[register])

    def multiply(self, acc, f: int, words, step: int, operands):
        a = [self.a[register] for register in range(4)]
        self.weights(f, words, step, a)
        operands = operands[: self.tile.token_tiles]
        for j, b in enumerate(operands):
            mma(self.weight, acc, 4 * (f * len(operands) + j), a, b, start=False)

    def _packed_pair(self, f: int, words, step: int, register: int, out):
        half, r = self.weight.half, 2 * f + register % 2
        way = self.weight.decoded(step, register)
        fma, inverse = f"fma.rn.{half.ptx}x2", T.uint32(decode.bits(half, 1 / way.factor) * 0x10001)
        self.emit.halves(way, words, out)
        nothing = T.uint32(0x80008000)  # -0
        if way.factor != 1 or self.weight.nothing(register % 2) or self.weight.zero:
            ptx(fma, out, out, inverse, self.shift[r])
        if self.zero is not None:
            ptx(fma, out, out, T.uint32(half.one * 0x10001), self.zero[r])
        if self.weight.arithmetic == "split":
            ptx(fma, self.low[0], out, self.scale_low[r], nothing)
            ptx(fma, out, out, self.scale[r], self.low[0])
        elif self.weight.scale or self.weight.offset:
            scale = self.scale[r] if self.weight.scale else T.uint32(half.one * 0x10001)
            ptx(fma, out, out, scale, self.offset[r] if self.weight.offset else nothing)

    def _float_pair(self, f: int, words, step: int, register: int, out):
        values = [self._weight(value, 2 * f + register % 2) for value in self._codes(words, step, register)]
        ptx(f"cvt.rn.{self.weight.half.ptx}x2.f32", out, values[1], values[0])

    def _weight(self, value, r: int):
        """What a code, less its constant zero point, stands for in float32; r: which of the warp's features c and c + 8."""
        if self.weight.zero:
            value = value - self.shift[r]
        value = value * self.scale[r] if self.weight.scale else value
        return value + self.offset[r] if self.weight.offset else value

    def _codes(self, words, step: int, register: int) -> list:
        """Both codes of a register less the constant zero point, in float32."""
        weight, code, way = self.weight, self.weight.code, self.weight.decoded(step, register)
        if weight.table:
            return list(self.emit.entries(way, words, T.alloc_local([1], "uint32")[0]))
        if code.is_integer:  # put into the mantissa of 2^23, whose unit is 1
            sign = 1 << code.bits - 1 if code.kind == "int" else 0
            found = []
            for p in range(2):
                number = decode.integer(code, words, step, register, p)
                value = T.reinterpret("float32", number ^ T.uint32(0x4B000000 + sign))
                found.append(value - T.float32(2**23 + sign + weight.bias))
            return found
        pair = T.alloc_local([1], "uint32")
        self.emit.halves(way, words, pair[0])
        return [value * T.float32(1 / way.factor) for value in floats(self.k, weight.compute, [pair[0]])]

    def end(self, acc):
        pass


class TableStep(WeightStep):
    """The same for codes of 4 bits that are looked up: once a step, all 16 weights that a feature may have are finished, and
    found by their codes in registers.

    Of the four lanes that have a feature, lane t finishes entries 4 t .. 4 t + 3 and hands them to the others, so that register
    j of lane t has entries 4 (t ^ j) .., lower bytes in one and upper bytes in another:

        code ^ 4 t    bits 0 .. 2    which of the bytes of two registers: prmt, of registers 0 and 1 and of 2 and 3
                      bit 3          which of these two: prmt again, for four codes at a time

    From shared memory, code by code, entries would take more of what tokens come through.
    """

    def __init__(self, k: Kernel):
        super().__init__(k)
        t = T.cast(k.lane % 4, "uint32")
        self.entries = T.alloc_local([4], "float32")
        ptx("ld.shared.v4.f32", *(self.entries[i] for i in range(4)), k.table + t * T.uint32(16))
        self.own, self.choice = (T.alloc_local([1], "uint32") for _ in range(2))
        assign(self.own, 0, t * T.uint32(0x44444444))
        assign(self.choice, 0, (self.own[0] >> T.uint32(1)) & T.uint32(0x44444444) ^ T.uint32(0x32103210))
        self.lower, self.upper = (T.alloc_local([8 * self.tile.feature_tiles], "uint32") for _ in range(2))

    @staticmethod
    def serves(k: Kernel) -> bool:
        """Whether it takes fewer instructions: not if a step is short, for tables cost as much as 32 codes."""
        return len(k.weight.table) == 16 and k.weight.side_by_side and Stage(k.weight, k.tile).step >= 64

    def begin(self, views, slot, step: int):
        super().begin(views, slot, step)
        for f in range(self.tile.feature_tiles):
            for r in range(2):
                self._finish(f, r)

    def _finish(self, f: int, r: int):
        """The table of feature c + 8 r."""
        pairs, first = T.alloc_local([2], "uint32"), 4 * (2 * f + r)
        values = [self._weight(self.entries[i], 2 * f + r) for i in range(4)]
        for i in range(2):
            ptx(f"cvt.rn.{self.weight.half.ptx}x2.f32", pairs[i], values[2 * i + 1], values[2 * i])
        for bytes_, selector in ((self.lower, 0x6420), (self.upper, 0x7531)):
            ptx("prmt.b32", bytes_[first], pairs[0], pairs[1], T.uint32(selector))
            for j in range(1, 4):
                ptx(
                    "shfl_sync.bfly.b32", bytes_[first + j], bytes_[first], T.uint32(j), T.uint32(31),
                    T.uint32(0xFFFFFFFF),
                )  # fmt: skip

    def weights(self, f: int, words, step: int, a):
        word = words[step]
        codes, choice = T.alloc_local([2], "uint32"), T.alloc_local([2], "uint32")
        ptx("lop3.b32", codes[0], word, self.own[0], T.uint32(0x77777777), 0x28)  # (a ^ b) & c
        ptx("lop3.b32", choice[0], word >> T.uint32(1), T.uint32(0x44444444), self.choice[0], 0x6A)  # (a & b) ^ c
        for r in range(2):
            if r:
                assign(codes, 1, codes[0] >> T.uint32(16))
                assign(choice, 1, choice[0] >> T.uint32(16))
            found = [self._bytes(bytes_, 4 * (2 * f + r), codes[r], choice[r]) for bytes_ in (self.lower, self.upper)]
            for h, selector in enumerate((0x5140, 0x7362)):
                ptx("prmt.b32", a[2 * h + r], *found, T.uint32(selector))

    def _bytes(self, bytes_, first: int, codes, choice):
        """Those of a feature's four codes."""
        found = T.alloc_local([3], "uint32")
        for i in range(2):
            ptx("prmt.b32", found[i], bytes_[first + 2 * i], bytes_[first + 2 * i + 1], codes)
        ptx("prmt.b32", found[2], found[0], found[1], choice)
        return found[2]


def load_groups(k: Kernel, views, slot, f: int, step) -> dict[str, list]:
    """By role, the words of feature tile f that hold the values of features c and c + 8."""
    loaded = {}
    for role, dtype in k.weight.grouped.items():
        count = 2 if dtype == "float32" else 1
        words = T.alloc_local([count], "uint32")
        address = views[role].ptr(slot, k.block(f), step, group_place(k, dtype))
        loaded[role] = [words[i] for i in range(count)]
        load = {8: "u8", 16: "u16", 32: "b32", 64: "v2.b32"}[group_bytes(dtype)]
        ptx(f"ld.shared.{load}", *loaded[role], address)
    return loaded


def scale_of_block(k: Kernel, views, slot, block, step):
    """The scale that all features of a block of 16 have (`Weight.uniform`), in float32."""
    word, kind = T.alloc_local([1], "uint32"), k.weight.scale
    load = {1: "u8", 2: "u16", 4: "b32"}[BYTES[kind]]
    ptx(f"ld.shared.{load}", word[0], views["scale"].ptr(slot, block, step, 0))
    return floats(k, kind, [word[0]])[0]


def group_place(k: Kernel, dtype: str):
    """Where the values of the lane's features begin in those of a group, in bytes."""
    return k.lane // 4 * (group_bytes(dtype) // 8)


def floats(k: Kernel, dtype: str, words) -> list:
    """Loaded words -> the float32 values of features c and c + 8."""
    if dtype in INTEGERS:
        return [T.cast(number, "float32") for number in integers(dtype, words)]
    if dtype == "float32":
        return [T.reinterpret("float32", word) for word in words]
    pair = halves(k, dtype, words)
    if pair is None:
        return [decode.small_float(dtype, byte) for byte in integers("u8", words)]
    kind, word = pair
    if kind == "bfloat16":
        return [T.reinterpret("float32", half) for half in (word << T.uint32(16), word & T.uint32(0xFFFF0000))]
    low, high = word & T.uint32(0xFFFF), word >> T.uint32(16)
    return [T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32") for half in (low, high)]


def halves(k: Kernel, dtype: str, words) -> tuple | None:
    """Loaded words -> the numbers of features c and c + 8 in a register: (their 16-bit type, the word); None if they are of
    no such type, nor turn into it as a pair."""
    if dtype in ("float16", "bfloat16"):
        return dtype, words[0]
    pair = T.alloc_local([1], "uint32")
    if dtype == "e8m0":
        decode.powers(words[0], pair[0])
        return "bfloat16", pair[0]
    if dtype in ("e4m3", "e5m2") and k.tile.converts_fp8:
        ptx(f"cvt.rn.f16x2.{dtype}x2", pair[0], T.cast(words[0], "uint16"))
        return "float16", pair[0]
    return None


def _offsets(k: Kernel, words) -> list:
    """Loaded words -> what is added to the weights of features c and c + 8."""
    return [-value if k.weight.subtract else value for value in floats(k, k.weight.offset, words)]


def _zero(weight: Weight, words, r: int):
    """The integer zero point of feature c + 8 r, a negative one wrapped around; None: there is none."""
    return T.cast(integers(weight.zero, words["zero"])[r], "uint32") if weight.zero else None


def _negative(weight: Weight, r: int, zero, divided: bool):
    """-(bias + factor * zero), or that divided by the factor, as a packed pair of equal halves.

    From the bias, a power of two, upwards halves are equidistant in value and in bits: integers are added to bits.
    """
    half, shift = weight.half, int(weight.factor(r)).bit_length() - 1
    power = half.power(half.mantissa - (shift if divided else 0))
    bits = 0x8000 + power + int(weight.nothing(r)) - (1 << half.mantissa)
    if zero is None:
        return T.uint32(bits * 0x10001)
    return ((zero << T.uint32(shift)) + T.uint32(bits)) * T.uint32(0x10001)


def integers(dtype: str, words) -> list:
    """Loaded words -> the integers of features c and c + 8: two nibbles or two bytes, extended by their sign if need be."""
    bits = 4 if dtype in NIBBLES else 8
    found = [words[0] & T.uint32((1 << bits) - 1), words[0] >> T.uint32(bits)]
    if dtype[0] == "u":
        return found
    sign = 1 << int(dtype[1:]) - 1
    mask = T.uint32(2 * sign - 1)  # of a number in a byte of its own the upper bits are zero
    return [T.reinterpret("int32", (number & mask) ^ T.uint32(sign)) - sign for number in found]
