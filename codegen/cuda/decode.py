"""Stored codes -> pairs of 16-bit floats, with a few instructions for two codes at a time, exactly.

A lane has 32 codes of 16 features by 64 of k, two for each of 4 x 4 registers of A fragments (`fragments`). A code of 8, 4,
2 or 1 bits is stored as it is; any other in planes of these widths, 5 = 4 + 1 and 7 = 4 + 2 + 1, so that no bit is wasted.
Words of whole codes are put together from planes (`Merge`), a bitwise choice for each after the first:

    code of 3 bits, in cells of 4      plane of 2 bits    ddcc bbaa ...      plane of 1 bit    hgfe ...      cells of a word
    word 0 of cells                    ... bbaa & 0011    = 00aa             << 2 & 0100       = 0e00        0eaa
    word 1                             >> 2     & 0011    = 00bb             << 1 & 0100       = 0f00        0fbb

The two codes of a register are 16 bits apart, so that one shift and one mask take both out of a word (`Field`), and put them
where the float wants them:

    integer    or-ed into the mantissa of a power of two, whose unit is 1: the float is that power, `bias`, plus the code. If
               the mantissa has room for it, register r = 1 is taken by the shift of r = 0, as `factor` times the code
    float      sign, exponent and mantissa in their places: exponents count from another bias then, so that the float is
               `factor` times the code, subnormal codes included. Bits of whole codes are stored where few shifts take them
               there (`plan.places`)
    8 bits in bf16, whose mantissa has 7: the lower seven beside 128, and the highest as the exponent of what is added, -128 or -256
    table      any other function of a code: its values lie in shared memory, in float32, a word each. Up to 32 of them are
               in as many banks, and no two lanes get into each other's way
    pairs      codes of up to 4 bits that are looked up lie side by side, both of a register next to each other, so that
               they are one number, and one load finds both floats. Every lane has a table of pairs in a bank of its own,
               32 KB of them; kernels without that much room look up one code at a time

`Decoded` is one such way: it prints, `evaluate` says what the instructions give, and `Emitter` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, when
from qdsl.codegen.plan import cell, places, planes
from qdsl.dtype import DType


@dataclass(frozen=True)
class Half:
    """A 16-bit float type of the multiplier: its name in PTX, and its bits."""

    ptx: str
    mantissa: int
    exponent_bias: int

    @property
    def exponent(self) -> int:
        return 15 - self.mantissa

    @property
    def one(self) -> int:
        return self.power(0)

    def power(self, n: int) -> int:
        """The bits of 2^n."""
        return n + self.exponent_bias << self.mantissa

    def values(self, bits: np.ndarray) -> np.ndarray:
        """The values of 16-bit patterns, in float64."""
        if self.ptx == "f16":
            return bits.astype(np.uint16).view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


HALVES = {"float16": Half("f16", 10, 15), "bfloat16": Half("bf16", 7, 127)}
PAIRED = 4  # bits up to which codes that are looked up lie side by side


def words_of(bits: int) -> tuple[int, int]:
    """How a k tile of 64 is stored: lanes, and words of each. Codes of 8 bits have two lots of four words, for a lane loads
    no more than 16 bytes at once, and neighbours side by side. Two codes of 8 bits for a unit of x have four lots."""
    return (8 * bits, 4) if bits in (8, 16) else (32, bits)


@dataclass(frozen=True)
class Field:
    """Some bits of both codes of a register: (word >> shift) & mask; a negative shift is to the left."""

    word: int
    shift: int
    mask: int  # of one half

    def __str__(self) -> str:
        moved = f" >> {self.shift}" if self.shift > 0 else f" << {-self.shift}" if self.shift else ""
        return f"word {self.word}{moved} & {self.mask:#06x}"


@dataclass(frozen=True)
class Sum:
    """A pair of floats: bits that are the same in both, and fields that are put among them."""

    pattern: int  # of one half
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        return " ^ ".join([f"{self.pattern:#06x}", *(f"({field})" for field in self.fields)])


@dataclass(frozen=True)
class Merge:
    """A word of whole codes: fields of words of planes, those of all cells at once."""

    fields: tuple[Field, ...]  # masks of a whole word

    def __str__(self) -> str:
        return " | ".join(f"({field})" for field in self.fields)


@dataclass(frozen=True)
class Decoded:
    """Both codes of a register as floats: bias + factor * code, or the entries of a table.

    sums      one float, or two that are added; with a table, four times the code, or that of one code and of the other
    scaled    the float is multiplied by 2 to this power
    table     by code, in float32; empty: there is none
    pair      32 times the number of both codes, where they lie side by side: fields of a word, not of its halves
    merged    how the words of the step that `sums` is about are put together; empty: they are the lane's
    """

    half: Half
    sums: tuple[Sum, ...]
    bias: float
    factor: float
    scaled: int = 0
    table: tuple[float, ...] = ()
    pair: Sum | None = None
    merged: tuple[Merge, ...] = ()

    def __str__(self) -> str:
        text = str(self.sums[0])
        if self.pair:
            return f"table of {len(self.table)} pairs at {self.pair}"
        if self.table:
            return f"table of {len(self.table)} at {text}"
        if len(self.sums) > 1:
            text = f"({self.sums[1]}) + ({text})"
        return f"{text}{f' * 2^{self.scaled}' if self.scaled else ''} = {self.bias:g} + {self.factor:g} q"

    def evaluate(self, words: np.ndarray) -> np.ndarray:
        """The two floats, [..., 2], of words [..., lane's words]: what the instructions give."""
        if self.merged:
            words = np.stack([_number(one, words) for one in self.merged], -1)
        if self.table:
            if self.pair:
                places = np.stack([_number(one, words) for one in self.sums], -1)
            else:
                places = self._bits(self.sums[0], words)
            return _rounded(self.half, np.array(self.table, np.float32)[places // 4].astype(np.float64))
        found = [self.half.values(self._bits(one, words)) for one in self.sums]
        value = found[0] if len(found) == 1 else found[0] + found[1]
        with np.errstate(invalid="ignore"):  # what stands for infinities and NaN
            return _rounded(self.half, _rounded(self.half, value) * 2.0**self.scaled)

    def _bits(self, one: Sum, words: np.ndarray) -> np.ndarray:
        """Both halves, [..., 2]."""
        bits = np.full(words.shape[:-1], one.pattern * 0x10001, np.uint32)
        for field in one.fields:
            word = words[..., field.word].astype(np.uint32)
            moved = word >> np.uint32(field.shift) if field.shift >= 0 else word << np.uint32(-field.shift)
            bits = bits ^ (moved & np.uint32(field.mask * 0x10001))
        return np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1)


def _number(one: Sum | Merge, words: np.ndarray) -> np.ndarray:
    """The fields of whole words, together."""
    found = np.zeros(words.shape[:-1], np.uint32)
    for field in one.fields:
        word = words[..., field.word].astype(np.uint32)
        moved = word >> np.uint32(field.shift) if field.shift >= 0 else word << np.uint32(-field.shift)
        found |= moved & np.uint32(field.mask)
    return found


def _rounded(half: Half, values: np.ndarray) -> np.ndarray:
    if half.ptx == "f16":
        return values.astype(np.float16).astype(np.float64)
    import ml_dtypes

    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def decoded(code: DType, half: Half, step: int, register: int) -> Decoded:
    """How register 0 .. 3 of a step is made of the lane's words."""
    part = _part(code.bits, step, register)
    if code.is_float:
        return replace(_float(code, half, part), merged=merged(code.bits, step))
    if code.bits > half.mantissa:
        return _byte(code, half, part)
    taken = _shared_shift(code, half) * (register % 2)
    sign = 1 << code.bits - 1 if code.kind == "int" else 0
    bias = 1 << half.mantissa
    sums = (Sum(half.power(half.mantissa) ^ sign << taken, (_placed(part, taken),)),)
    return Decoded(half, sums, bias + float(sign << taken), float(1 << taken), merged=merged(code.bits, step))


def looked_up(code: DType, half: Half, table: tuple[float, ...], step: int, register: int) -> Decoded:
    """How register 0 .. 3 of a step is made of the lane's words and a table of what the codes stand for."""
    if code.bits <= PAIRED:
        parts = _side_by_side(code.bits, step, register)
        codes = (
            Sum(0, tuple(_moved(part, p * part.width, part.width, part.low + 2) for part in parts)) for p in range(2)
        )
        pair = Sum(0, tuple(_moved(part, 0, 2 * part.width, 2 * part.low + 5) for part in parts))
        return Decoded(half, tuple(codes), 0.0, 1.0, table=table, pair=pair)
    sums = (Sum(0, (_placed(_part(code.bits, step, register), 2),)),)
    return Decoded(half, sums, 0.0, 1.0, table=table, merged=merged(code.bits, step))


def factor(code: DType, half: Half, r: int) -> float:
    """What a code of feature c + 8 r is multiplied by, in every step."""
    return decoded(code, half, 0, r).factor


@dataclass(frozen=True)
class _Part:
    """Bits low .. low + width of a code, from bit `offset` of both halves of a word."""

    word: int
    offset: int
    low: int
    width: int


def _part(bits: int, step: int, register: int) -> _Part:
    """Where a code is: among the lane's words, or where these are planes, among those that a step has merged."""
    at = (4 * step + register) * bits
    if cell(bits) != bits:
        at = register * cell(bits)
    return _Part(at // 16, at % 16, 0, bits)


def merged(bits: int, step: int) -> tuple[Merge, ...]:
    """The words of cells of a step, one of 4 bits or two of 8; none where codes are stored whole."""
    size = cell(bits)
    if size == bits:
        return ()
    found = []
    for at in range(step * size // 4, (step + 1) * size // 4):  # in the order of `fragment_codes`
        fields, first = [], 0
        for low, width in planes(bits):
            word, inner = divmod(at, size // width)
            mask = sum((1 << width) - 1 << low + start for start in range(0, 32, size))
            fields.append(Field(first + word, inner * width - low, mask))
            first += width
        found.append(Merge(tuple(fields)))
    return tuple(found)


def _side_by_side(bits: int, step: int, register: int) -> tuple[_Part, ...]:
    """The same where the two codes of a register are neighbours: that of the first, `offset` from the low end of a word."""
    found, first, place = [], 0, register % 2 * 2 + register // 2  # registers of a feature are neighbours, too
    for low, width in planes(bits):
        at = 2 * (4 * step + place) * width
        found.append(_Part(first + at // 32, at % 32, low, width))
        first += width
    return tuple(found)


def _moved(part: _Part, start: int, width: int, position: int) -> Field:
    """Bits start .. start + width of a part that lies side by side, from bit `position` of a word on."""
    return Field(part.word, part.offset + start - position, (1 << width) - 1 << position)


def _placed(part: _Part, position: int, low: int = 0, width: int | None = None) -> Field:
    """Bits low .. low + width of the part, from bit `position` of the half on."""
    mask = (1 << (width or part.width)) - 1 << position
    return Field(part.word, part.offset + low - position, mask)


def _shared_shift(code: DType, half: Half) -> int:
    """By how many bits the code of r = 1 may stay higher than that of r = 0: then both are taken by one shift."""
    return cell(code.bits) if cell(code.bits) + code.bits <= half.mantissa else 0


def _byte(code: DType, half: Half, part: _Part) -> Decoded:
    """An 8-bit integer whose lower seven bits fill the mantissa of 128. Its highest is the lowest of the exponent of -128,
    which makes -256 of it; an unsigned one is off by 128 then, for what is 0 has another exponent altogether."""
    signed, top = code.kind == "int", 1 << half.mantissa
    low = Sum(half.power(half.mantissa), (_placed(part, 0, 0, 7),))
    high = Sum(0x8000 | half.power(half.mantissa) ^ (0 if signed else top), (_placed(part, 7, 7, 1),))
    return Decoded(half, (low, high), 0.0 if signed else -128.0, 1.0)


def _float(code: DType, half: Half, part: _Part) -> Decoded:
    """Exponent and mantissa side by side, so that the lowest bit of the exponent is in its place, and the sign on top."""
    magnitude, masks = code.bits - code.signed, {}
    wanted = [half.mantissa - code.mantissa + i for i in range(magnitude)] + [15] * code.signed
    stored = places(code, half.mantissa) or tuple(range(16))
    for i, place in enumerate(wanted):
        shift = stored[part.offset + i] - place
        masks[shift] = masks.get(shift, 0) | 1 << place
    fields = tuple(Field(part.word, shift, mask) for shift, mask in masks.items())
    power = code.bias - half.exponent_bias
    scaled = -power if half.ptx == "bf16" else 0  # so small a number would be lost in a sum
    return Decoded(half, (Sum(0, fields),), 0.0, 2.0 ** (power + scaled), scaled=scaled)


class Emitter:
    """Writes the instructions of one kernel, with the registers that they need on the way."""

    def __init__(self, ways: Decoded, table=None, pairs=None, lane=None):
        """`ways`: one of all that will be written; `table`: the shared address of theirs; `pairs`: that of pairs."""
        self.table, self.pairs, self.lane = table, pairs, lane
        self.other = T.alloc_local([1], "uint32") if ways.sums[1:] else [None]
        self.found = T.alloc_local([2], "float32") if ways.table else None

    def whole(self, way: Decoded, words) -> list:
        """The words that the step of a Decoded is about: the lane's, or what is put together from them."""
        if not way.merged:
            return words
        found = T.alloc_local([len(way.merged)], "uint32")
        for at, merge in enumerate(way.merged):
            first, *rest = merge.fields
            before, mask = shifted(first, words), first.mask
            for field in rest:  # (before & mask) | (field & ~mask): what then lies beside the code is never looked at
                ptx("lop3.b32", found[at], before, T.uint32(mask), shifted(field, words), 0xE2)
                before, mask = found[at], mask | field.mask
        return [found[at] for at in range(len(way.merged))]

    def halves(self, way: Decoded, words, out):
        """out = the pair of floats."""
        half = way.half
        if self.pairs is not None:
            place = T.alloc_local([1], "uint32")
            _number_of(way.pair, words, place[0], T.cast(self.lane, "uint32"))
            ptx("mov.b32", out, self.pairs[T.cast(place[0], "int32")])
            return
        if way.table:
            first, second = self.entries(way, words, out)
            ptx(f"cvt.rn.{half.ptx}x2.f32", out, second, first)
            return
        fma = f"fma.rn.{half.ptx}x2"
        for one, target in zip(way.sums, (out, self.other[0])):
            _put_together(one, words, target)
        if len(way.sums) > 1:
            ptx(fma, out, out, T.uint32(half.one * 0x10001), self.other[0])
        if way.scaled:
            ptx(fma, out, out, T.uint32(half.power(way.scaled) * 0x10001), T.uint32(0x80008000))

    def entries(self, way: Decoded, words, places) -> tuple:
        """The table's entries for both codes, in float32; `places`: a register."""
        if way.pair:
            for p, one in enumerate(way.sums):
                _number_of(one, words, places)
                ptx("ld.shared.f32", self.found[p], self.table + places)
            return self.found[0], self.found[1]
        _put_together(way.sums[0], words, places)
        for p, place in enumerate((places & T.uint32(0xFFFF), places >> T.uint32(16))):
            ptx("ld.shared.f32", self.found[p], self.table + place)
        return self.found[0], self.found[1]


def _put_together(one: Sum, words, out):
    before = T.uint32(one.pattern * 0x10001)
    for field in one.fields:
        ptx("lop3.b32", out, shifted(field, words), T.uint32(field.mask * 0x10001), before, 0x6A)  # (a & b) ^ c
        before = out


def _number_of(one: Sum, words, out, before=None):
    """out = the fields of whole words, together, and `before`."""
    before = T.uint32(0) if before is None else before
    for field in one.fields:
        ptx("lop3.b32", out, shifted(field, words), T.uint32(field.mask), before, 0xEA)  # (a & b) | c
        before = out


def shifted(field: Field, words):
    """The field's word, shifted."""
    word = words[field.word]
    if field.shift > 0:
        return word >> T.uint32(field.shift)
    return word << T.uint32(-field.shift) if field.shift < 0 else word


def store_table(table: tuple[float, ...], thread, target):
    """Threads 0 .. entries put the table into shared memory."""
    with when(thread < len(table)):
        T.buffer_store(target, _chosen([T.float32(value) for value in table], thread), [thread])


def store_pairs(code: DType, half: Half, table: tuple[float, ...], thread, threads: int, target):
    """All threads put the pairs of entries, rounded, into shared memory: each some pairs, and those once for every lane."""
    entries = [T.uint32(int(_bits_of(half, value))) for value in table]
    pairs = 1 << 2 * code.bits
    for first in range(0, pairs, threads):
        number = T.cast(first + thread, "uint32")
        codes = []
        for p in range(2):
            one = T.uint32(0)
            for low, width in planes(code.bits):
                one = one | (number >> T.uint32(2 * low + p * width) & T.uint32((1 << width) - 1)) << T.uint32(low)
            codes.append(_chosen(entries, T.cast(one, "int32")))
        value = T.alloc_local([1], "uint32")
        assign(value, 0, codes[0] | codes[1] << T.uint32(16))
        with when(first + thread < pairs), T.serial(0, 32, unroll=False) as lane:
            T.buffer_store(target, value[0], [(first + thread) * 32 + (lane + thread) % 32])  # in different banks


def _chosen(values: list, number):
    """Value `number` by a tree of choices among constants; beyond the last, the last."""

    def choice(first: int, count: int):
        if count == 1:
            return values[min(first, len(values) - 1)]
        half = count // 2
        return T.if_then_else((number & half) != 0, choice(first + half, half), choice(first, half))

    return choice(0, 1 << (len(values) - 1).bit_length())


def _bits_of(half: Half, value: float) -> int:
    """The bits of a value, rounded."""
    return bits(half, float(_rounded(half, np.array([value]))[0]))


def integer(code: DType, words, step: int, register: int, p: int):
    """Code p = 0, 1 of a register as an unsigned integer of its bits."""
    part = _part(code.bits, step, register)
    return (words[part.word] >> T.uint32(part.offset + 16 * p)) & T.uint32((1 << part.width) - 1)


def bits(half: Half, value: float) -> int:
    """The bits of a value that the type holds exactly."""
    if half.ptx == "f16":
        found = int(np.float16(value).view(np.uint16))
    else:
        found = int(np.float32(value).view(np.uint32)) >> 16
    assert half.values(np.array([found]))[0] == value, f"{value} is no {half.ptx} number"
    return found


def powers(bytes_, out):
    """out = two bytes of e8m0 as bf16: exponents, but for the smallest, 2^-127, which is subnormal, and for NaN."""
    ptx("prmt.b32", out, bytes_, T.uint32(0), T.uint32(0x1404))
    ptx("max.bf16x2", out, out >> T.uint32(1), T.uint32(0x00400040))
    ptx("fma.rn.bf16x2", out, out, T.uint32(0x80008000), out)  # -0 times infinity is NaN, and changes nothing else


def small_float(dtype: str, byte):
    """A byte -> its float32 value; every code, NaN included."""
    if dtype == "e8m0":  # 2^(byte - 127): an exponent, but for the smallest, which is subnormal, and for NaN
        power = byte << T.uint32(23)
        bits = T.if_then_else(
            byte == T.uint32(0),
            T.uint32(0x00400000),
            T.if_then_else(byte == T.uint32(255), T.uint32(0x7FFFFFFF), power),
        )
        return T.reinterpret("float32", bits)
    if dtype == "e5m2":  # the upper half of an f16
        return T.cast(T.reinterpret("float16", T.cast(byte << T.uint32(8), "uint16")), "float32")
    # e4m3: exponent and mantissa in their places in an f16 make 2^-8 of it; the code of all ones is NaN.
    bits = (byte & T.uint32(0x80)) << T.uint32(8) | (byte & T.uint32(0x7F)) << T.uint32(7)
    value = T.cast(T.reinterpret("float16", T.cast(bits, "uint16")), "float32") * T.float32(256)
    return T.if_then_else(
        (byte & T.uint32(0x7F)) == T.uint32(0x7F), T.reinterpret("float32", T.uint32(0x7FFFFFFF)), value
    )
