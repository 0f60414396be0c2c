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
from qdsl.codegen.cuda.stage import group_bytes
from qdsl.codegen.cuda.weight import INTEGERS, NIBBLES


class SumStep:
    """A step that multiplies bias + factor * q and corrects the sum:

        acc += scale * (sum - (bias + factor * zero) * row_sum) + factor * offset * row_sum

    One more mma, with ones as A, gives row_sum, the sum of x, unless there is nothing to take off or to add. Codes may be
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
        self.shift = T.alloc_local([2 * features], "float32")
        self.offset = T.alloc_local([2 * features], "float32") if self.weight.offset else None
        self.shifted = self.weight.zero is not None or any(self.weight.nothing(r) for r in range(2))
        self.start = True

    def begin(self, views, slot, step: int):
        self.start = True
        for f in range(self.tile.feature_tiles):
            words = load_groups(self.k, views, slot, f, step)
            if self.weight.scale:
                for r, value in enumerate(floats(self.k, self.weight.scale, words["scale"])):
                    assign(self.scale, 2 * f + r, value)
            if self.shifted:
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
            self.emit.halves(self.weight.decoded(step, register), words, self.a[register])
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
        """Scale, -(bias / factor + zero) and offset as packed pairs of equal halves; a float zero stands apart.

        From bias / factor upwards halves are equidistant in value and in bits: integers are added to bits.
        """
        weight, half = self.weight, self.weight.half
        for r in range(2):
            way, zero = weight.decoded(0, r), None
            if self.zero is not None:
                self._pair("zero", words, r, self.zero[2 * f + r])
                assign(self.zero, 2 * f + r, self.zero[2 * f + r] ^ T.uint32(0x80008000))
            elif weight.zero:
                zero = T.cast(_integers(weight.zero, words["zero"])[r], "uint32")  # a negative one wraps around
            if way.bias:
                shrink = int(way.factor).bit_length() - 1
                above = int(weight.nothing(r)) - (1 << half.mantissa)
                bits = 0x8000 + half.power(half.mantissa - shrink) + above
                shift = T.uint32(bits * 0x10001)
                if zero is not None:
                    shift = ((zero << T.uint32(shrink)) + T.uint32(bits)) * T.uint32(0x10001)
                assign(self.shift, 2 * f + r, shift)
            elif zero is not None:
                value = T.float32(-weight.bias) - T.cast(T.reinterpret("int32", zero), "float32")
                ptx(f"cvt.rn.{half.ptx}x2.f32", self.shift[2 * f + r], value, value)
            else:
                assign(self.shift, 2 * f + r, T.uint32(decode.bits(half, -float(weight.bias)) * 0x10001))
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
        if self.weight.grouped[role] == self.weight.compute:
            word = words[role][0]
            ptx("prmt.b32", out, word, word, T.uint32(0x3232 if r else 0x1010))
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
        r, values = 2 * f + register % 2, []
        for value in self._codes(words, step, register):
            if self.weight.zero:
                value = value - self.shift[r]
            value = value * self.scale[r] if self.weight.scale else value
            values.append(value + self.offset[r] if self.weight.offset else value)
        ptx(f"cvt.rn.{self.weight.half.ptx}x2.f32", out, values[1], values[0])

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


def load_groups(k: Kernel, views, slot, f: int, step) -> dict[str, list]:
    """By role, the words of feature tile f that hold the values of features c and c + 8."""
    loaded = {}
    for role, dtype in k.weight.grouped.items():
        count = 2 if dtype == "float32" else 1
        words = T.alloc_local([count], "uint32")
        at = k.lane // 4 * (group_bytes(dtype) // 8)
        address = views[role].ptr(slot, k.block(f), step, at)
        loaded[role] = [words[i] for i in range(count)]
        load = {8: "u8", 16: "u16", 32: "b32", 64: "v2.b32"}[group_bytes(dtype)]
        ptx(f"ld.shared.{load}", *loaded[role], address)
    return loaded


def floats(k: Kernel, dtype: str, words) -> list:
    """Loaded words -> the float32 values of features c and c + 8."""
    if dtype in INTEGERS:
        return [T.cast(number, "float32") for number in _integers(dtype, words)]
    if dtype in ("e4m3", "e5m2") and k.tile.converts_fp8:
        pair = T.alloc_local([1], "uint32")
        ptx(f"cvt.rn.f16x2.{dtype}x2", pair[0], T.cast(words[0], "uint16"))
        return floats(k, "float16", [pair[0]])
    if dtype in ("e4m3", "e5m2", "e8m0"):
        return [decode.small_float(dtype, byte) for byte in _integers("u8", words)]
    if dtype == "float32":
        return [T.reinterpret("float32", word) for word in words]
    low, high = words[0] & T.uint32(0xFFFF), words[0] >> T.uint32(16)
    if dtype == "bfloat16":
        return [T.reinterpret("float32", half << T.uint32(16)) for half in (low, high)]
    return [T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32") for half in (low, high)]


def _offsets(k: Kernel, words) -> list:
    """Loaded words -> what is added to the weights of features c and c + 8."""
    return [-value if k.weight.subtract else value for value in floats(k, k.weight.offset, words)]


def _integers(dtype: str, words) -> list:
    """Loaded words -> the integers of features c and c + 8: two nibbles or two bytes, extended by their sign if need be."""
    bits = 4 if dtype in NIBBLES else 8
    found = [words[0] & T.uint32((1 << bits) - 1), words[0] >> T.uint32(bits)]
    if dtype[0] == "u":
        return found
    sign = 1 << int(dtype[1:]) - 1
    mask = T.uint32(2 * sign - 1)  # of a number in a byte of its own the upper bits are zero
    return [T.reinterpret("int32", (number & mask) ^ T.uint32(sign)) - sign for number in found]
