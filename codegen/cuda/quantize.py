"""Run-time quantization on a GPU: all that an activation block computes, in one kernel.

    x[m, :] --pieces of 8, HELD for each thread--> amax of the row --> scales of the row
                                               --> amax of groups --> scales of groups --> codes, 8 side by side

A team of warps takes one token, or where nothing is computed of whole rows, a stretch of one: as few warps as can hold it,
up to all of a CTA where tokens are few. All pieces of a stretch are asked for before the first has come; a token of one
stretch is read once. A group lies within the pieces of a warp, whose lanes tell each other what they have found.

Equations are those of the portable kernels (`qdsl.codegen.quantize`), and so are the codes, to the bit: what is divided by
a scale is multiplied by its reciprocal, and mended (`_Token.quotient`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ptx, register, when, wide
from qdsl.codegen.function import Parameters, open_function
from qdsl.codegen.plan import Plan
from qdsl.codegen.tir import as_float, divide, encode, round_to, translate
from qdsl.dtype import DType
from qdsl.expr import REDUCTIONS, Binary, Call, Expr, Number, Ref, names, walk
from qdsl.scheme import Group, Scheme, Tensor, Var

THREADS = 512  # of a CTA
WARPS = THREADS // 32
PIECE = 8  # numbers of a thread, side by side: 16 bytes of x, and 8 of codes
HELD = 4  # pieces of a thread, as many pieces apart as its team has threads
ENOUGH = 1 << 17  # threads that keep the memory of a GPU busy
RESIDENT = 2  # CTAs that an SM must be able to hold: a limit on registers
# Scales whose reciprocals are normal numbers, and so is all that `quotient` does with what is not rounded to zero.
SMALL, LARGE = 2.0**-60, 2.0**120
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of a number of x
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
START = {"amax": -np.inf, "amin": np.inf}
COMBINE = {"amax": "max.NaN", "amin": "min.NaN"}  # a NaN among the numbers is what comes out
ROW, GROUP, CODE = "row", "group", "code"


def supported(scheme: Scheme) -> bool:
    """Whether this kernel can compute the scheme's activations: maxima and minima of x over rows and over groups of
    8 to 256 inputs, a power of two; codes of up to 8 bits."""
    activation = scheme.activation()
    return activation is not None and all(_level(t, scheme) is not None for t in _computed(scheme))


def _computed(scheme: Scheme) -> list[Tensor]:
    return [t for t in scheme.activation().operand.tensors if not t.loaded]


def _level(t: Tensor, scheme: Scheme) -> str | None:
    """What the tensor has a number for; None: anything that the kernel does not know."""
    calls = _reductions(t)
    found: dict[str, Tensor] = {c.name: c for c in _computed(scheme)}
    if any(c.name not in COMBINE or any(name in found for name in names(c.args[0])) for c in calls):
        return None
    match t.index:
        case (Var("m"),):
            return ROW
        case (Var("m"), Group("k", int(size))) if size in (8, 16, 32, 64, 128, 256):
            return GROUP
        case (Var("m"), Var("k")) if t.dtype.bits <= 8 and not calls:
            return CODE
    return None


def _reductions(t: Tensor) -> list[Call]:
    return [e for e in walk(t.value) if isinstance(e, Call) and e.name in REDUCTIONS]


def lower(plan: Plan, args: tuple[str, ...]) -> tirx.PrimFunc:
    """The kernel (x [M, K], what the block loads, what it computes)."""
    scheme, computed = plan.scheme, _computed(plan.scheme)
    rows = [t for t in computed if _level(t, scheme) == ROW]
    rest = [t for t in computed if t not in rows]
    whole = any(_reductions(t) for t in rows)
    with open_function(plan, "quantize", args) as (builder, own):
        m, k = own.sizes["m"], own.sizes["k"]
        T.device_entry()
        shift, stretch = _team(m, k) if whole else (T.int32(5), _stretch(m, k))
        stretches = T.cast(_over(k, stretch), "int32")
        shares = m if whole else m * stretches
        cta = T.cta_id([T.cast(_over(shares, 9 - shift), "int32")])
        thread = T.thread_id([THREADS])
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT}):
            if plan.overlapped:
                overlap.let_in()  # the product, which asks for its weights before it waits
            shift, stretch, stretches = (_settled(value) for value in (shift, stretch, stretches))
            share = (cta << (9 - shift)) + (thread >> shift)
            row = _settled(share if whole else tirx.truncdiv(share, stretches))
            if plan.overlapped:
                overlap.wait()
            with when(share < T.cast(shares, "int32")):
                token = _Token(plan, own, thread, shift, stretch, row)
                first = T.int32(0) if whole else share - row * stretches
                for t in scheme.activation().operand.loaded:
                    if t.role == "scale" and not t.index:
                        token.invert(t, own.element(t.name, {}))
                if whole:
                    token.reduce_row([call for t in rows for call in _reductions(t)], stretches)
                for t in rows:
                    with when(tirx.all(token.thread == 0, first == 0)):
                        T.buffer_store(own.buffers[t.name], encode(t.dtype, token.value(t)), [token.m])
                    token.keep(t)
                if whole:
                    with T.serial(0, stretches, unroll=False) as i:
                        with when(stretches > 1):
                            token.ask(i)
                        token.finish(rest, i)
                else:
                    token.ask(first)
                    token.finish(rest, first)
    return builder.get()


def _team(m, k):
    """The binary logarithms of a token's threads, and of the numbers that they hold: enough to hold the token, or to keep the
    GPU busy."""
    shift = T.int32(5)
    for more in range(6, 10):
        needed = k > (PIECE * HELD << more - 1)
        shift = T.if_then_else(tirx.any(needed, m <= ENOUGH >> more), T.int32(more), shift)
    return shift, shift + (PIECE * HELD).bit_length() - 1


def _stretch(m, k):
    """The binary logarithm of what a warp holds: as few pieces as keep the GPU busy."""
    one = (32 * PIECE).bit_length() - 1
    pieces = m * (k >> one)  # of warps
    few, some = (T.int32(one + more) for more in (0, 1))
    enough = ENOUGH // 32
    return T.if_then_else(pieces <= enough, few, T.if_then_else(pieces <= 2 * enough, some, T.int32(one + 2)))


def _over(number, shift):
    """An int64 over a power of two, rounded up."""
    shift = wide(shift)
    return number + (T.int64(1) << shift) - 1 >> shift


def _settled(value):
    """An int32 that is computed here, and not again where it is needed: what asm returns is kept."""
    found = T.alloc_local([1], "int32")
    ptx("mov.b32", found[0], value)
    return found[0]


class _Token:
    """What a thread knows of its token: x, the results of reductions, and the scales that are made of them."""

    def __init__(self, plan: Plan, own: Parameters, thread, shift, stretch, m):
        """`shift`, `stretch`: binary logarithms of the threads that share it, and of what they hold at once."""
        self.plan, self.own, self.m, self.stretch = plan, own, wide(m), stretch
        self.lane, self.warp, self.shift = thread % 32, thread // 32, shift
        self.team, self.thread = T.int32(1) << shift, thread & (T.int32(1) << shift) - 1  # threads, and which of them
        self.K = T.cast(own.sizes["k"], "int32")
        self.found: dict[Call, tirx.Buffer] = {}
        self.kept: dict[str, tirx.Buffer] = {}
        self.scales: dict[str, tuple] = {}  # as a float32, and its reciprocal
        self.kind = str(own.buffers["x"].dtype)
        self.size, self.each = BYTES[self.kind], PIECE * BYTES[self.kind] // 4  # bytes of a number, words of a piece
        self.words = T.alloc_local([HELD * self.each], "uint32")
        self.x = T.alloc_local([PIECE], "float32")
        self.k = T.int32(0)  # of the piece's first number
        self.x_row = self._address(own.buffers["x"])
        self.aligned = tirx.all(self.K % PIECE == 0, self.x_row % T.uint64(16) == T.uint64(0))

    def _address(self, buffer):
        """Of the token's row: what asm returns is kept, not computed again for every piece."""
        found = T.alloc_local([1], "uint64")
        ptx("cvta.to.global.u64", found[0], buffer.ptr_to([self.m, T.int64(0)]))
        return found[0]

    # ---- x ------------------------------------------------------------------------------------------------------
    def first(self, stretch, piece: int):
        """The piece's first number."""
        return (stretch << self.stretch) + (piece * self.team + self.thread) * PIECE

    def reaches(self, stretch, piece: int):
        """Whether any of the team's threads has something of the piece."""
        start = piece * self.team * PIECE
        return tirx.all(start < T.int32(1) << self.stretch, (stretch << self.stretch) + start < self.K)

    def ask(self, stretch) -> None:
        """The thread's pieces of a stretch, into registers. Those beyond K have the last numbers of the token again, which
        no maximum or minimum minds, nor that of its last group."""
        with T.If(self.aligned):
            with T.Then():
                for piece in range(HELD):
                    with when(self.reaches(stretch, piece)):
                        at = self.x_row + T.cast(
                            T.min(self.first(stretch, piece), self.K - PIECE) * self.size, "uint64"
                        )
                        for word in range(piece * self.each, (piece + 1) * self.each, 4):
                            words = (self.words[word + j] for j in range(4))
                            ptx("ld.global.v4.b32", *words, at + T.uint64(4 * (word - piece * self.each)))
            with T.Else():
                for piece in range(HELD):
                    with when(self.reaches(stretch, piece)):
                        for word in range(self.each):
                            assign(self.words, piece * self.each + word, self._word(self.first(stretch, piece), word))

    def _word(self, k, word: int):
        """A word of the piece from k on, number by number."""
        found, count = T.uint32(0), 4 // self.size
        for j in range(count):
            number = self.own.buffers["x"][self.m, wide(T.min(k + (word * count + j), self.K - 1))]
            bits = T.cast(T.reinterpret(f"uint{8 * self.size}", number), "uint32")
            found = found | bits << T.uint32(8 * self.size * j) if j else bits
        return found

    def take(self, stretch, piece: int) -> None:
        """One of the pieces as numbers."""
        self.k = self.first(stretch, piece)
        for j in range(PIECE):
            word = self.words[piece * self.each + j * self.size // 4]
            half = word >> T.uint32(16) if j % 2 else word & T.uint32(0xFFFF)
            assign(self.x, j, T.reinterpret("float32", word) if self.size == 4 else _float(self.kind, half))

    # ---- reductions ---------------------------------------------------------------------------------------------
    def reduce_row(self, calls: Sequence[Call], stretches) -> None:
        """The results of reductions over all of the token, in every thread."""
        found = [_Reduction(self, call) for call in calls]
        with T.serial(0, stretches, unroll=False) as i:
            self.ask(i)
            for piece in range(HELD):
                with when(self.reaches(i, piece)):
                    for one in found:
                        one.add(i, piece)
        pool = T.alloc_buffer((4 * len(calls) * WARPS,), "uint8", scope="shared.dyn")
        pool = T.decl_buffer((len(calls), WARPS), "float32", data=pool.data, scope="shared.dyn", elem_offset=0)
        for at, one in enumerate(found):
            one.across(32)
            with when(self.lane == 0):
                T.buffer_store(pool, one.result[0], [at, self.warp])
        ptx("bar.sync", T.cast((self.warp * 32) >> self.shift, "uint32"), T.cast(self.team, "uint32"))
        warps = self.team // 32 - 1  # of the team: the lower bits of a warp's number
        for at, (call, one) in enumerate(zip(calls, found, strict=True)):
            assign(one.result, 0, pool[at, self.warp & T.bitwise_not(warps) | self.lane & warps])
            one.across(WARPS)
            self.found[call] = one.result

    def reduce_group(self, call: Call, stretch, piece: int, size: int) -> None:
        """The result of a reduction over the piece's group, in each of its threads."""
        one = _Reduction(self, call)
        one.add(stretch, piece)
        one.across(size // PIECE)
        self.found[call] = one.result

    # ---- what is computed ---------------------------------------------------------------------------------------
    def value(self, t: Tensor, j: int = 0):
        """A tensor's number for number j of the piece, before it is rounded."""
        return self.number(t.value, j)

    def number(self, e: Expr, j: int):
        """An equation's number for number j of the piece."""
        return as_float(translate(e, lambda e: self._look(e, j)))

    def keep(self, t: Tensor) -> None:
        """Its rounded number, for the equations after it."""
        rounded = round_to(t.dtype, self.value(t))
        self.kept[t.name] = register(str(rounded.ty.dtype), rounded)
        if t.role == "scale":
            self.invert(t, self.kept[t.name][0])

    def invert(self, t: Tensor, value) -> None:
        """A scale's reciprocal, 0 for 0: 0 / 0 is 0."""
        scale = register("float32", as_float(value))[0]
        one = T.if_then_else(scale == T.float32(0), T.float32(0), divide(T.float32(1), scale))
        self.scales[t.name] = scale, register("float32", one)[0]

    def quotient(self, value, name: str):
        """A number over a scale, rounded as division rounds it.

        The product is within two units of its last place, and the first sum within one. Then the remainder is exact, and by
        Markstein's theorem (IBM J. Res. Dev. 34, 1990) the second sum is the quotient rounded to nearest, for the
        reciprocal is rounded to nearest as well.
        """
        scale, one = self.scales[name]
        value = register("float32", value)[0]
        found, rest = register("float32", value * one), T.alloc_local([1], "float32")
        for _ in range(2):
            ptx("fma.rn.f32", rest[0], -scale, found[0], value)
            ptx("fma.rn.f32", found[0], rest[0], one, found[0])
        return found[0]

    def _look(self, e: Expr, j: int):
        if isinstance(e, Call) and e.name.startswith(OVER):
            return self.quotient(self.number(e.args[0], j), e.name.removeprefix(OVER))
        if isinstance(e, Call):
            return self.found[e][0]
        assert isinstance(e, Ref), f"{e} in an activation equation"
        if e.name == "x":
            return self.x[j]
        if e.name in self.kept:
            return self.kept[e.name][0]
        whole, single = T.min(self.k, self.K - PIECE) + j, T.min(self.k + j, self.K - 1)  # where x is from (`ask`)
        return self.own.element(e.name, {"m": self.m, "k": wide(T.if_then_else(self.aligned, whole, single))})

    def finish(self, rest: Sequence[Tensor], stretch) -> None:
        """Groups and codes of a stretch."""
        rows = {t.name: self._address(self.own.buffers[t.name]) for t in rest if t.index[1] == Var("k")}
        for piece in range(HELD):
            with when(self.reaches(stretch, piece)):
                self.take(stretch, piece)
                for t in rest:
                    if t.name in rows:
                        self._store_codes(t, rows[t.name])
                    else:
                        self._group(t, stretch, piece)

    def _group(self, t: Tensor, stretch, piece: int) -> None:
        size = t.index[1].size
        for call in _reductions(t):
            self.reduce_group(call, stretch, piece, size)
        with when(tirx.all(self.k < self.K, self.k % size == 0)):
            T.buffer_store(self.own.buffers[t.name], encode(t.dtype, self.value(t)), [wide(self.k // size), self.m])
        self.keep(t)

    def _store_codes(self, t: Tensor, row) -> None:
        codes, words = self.own.buffers[t.name], T.alloc_local([PIECE // 4], "uint32")

        def pack(value: Callable) -> None:
            for at in range(PIECE // 4):
                assign(words, at, _packed(t.dtype, [value(4 * at + j) for j in range(4)], self.plan))

        divisors = [name for name in dict.fromkeys(names(t.value)) if name in self.scales]
        if not divisors:
            pack(lambda j: self.value(t, j))
        else:
            # A scale of zero counts as usual: its reciprocal is 0, and so is what is divided by it.
            scales = [self.scales[name][0] for name in divisors]
            usual = [tirx.any(tirx.all(s >= T.float32(SMALL), s < T.float32(LARGE)), s == T.float32(0)) for s in scales]
            quick = _mended(t.value, set(self.scales))
            values = [register("float32", self.number(quick, j))[0] for j in range(PIECE)]
            bounded = _bounded(t, self.plan.scheme)
            if not bounded:  # a NaN, or two infinities, make one of their sum
                usual.append(tirx.Not(T.isnan(functools.reduce(operator.add, values))))
            with T.If(functools.reduce(tirx.all, usual)):
                with T.Then():
                    if _small(t.dtype):
                        for at in range(PIECE // 4):
                            assign(words, at, _rounded(t.dtype, values[4 * at : 4 * at + 4], self.plan, bounded))
                    else:
                        pack(lambda j: values[j])
                with T.Else():
                    pack(lambda j: self.value(t, j))
        with T.If(self.aligned):
            with T.Then(), when(self.k < self.K):
                ptx("st.global.v2.b32", row + T.cast(self.k, "uint64"), *(words[at] for at in range(PIECE // 4)))
            with T.Else():
                for j in range(PIECE):
                    with when(self.k + j < self.K):
                        byte = T.cast(words[j // 4] >> T.uint32(8 * (j % 4)) & T.uint32(255), "uint8")
                        T.buffer_store(codes, byte, [self.m, wide(self.k + j)])


class _Reduction:
    """A maximum or minimum: of what a thread has, then of what its neighbours have as well."""

    def __init__(self, token: _Token, call: Call):
        self.token, self.call, self.result = token, call, register("float32", T.float32(START[call.name]))
        # Of 16-bit numbers as they are, or without their signs, two at once.
        self.absolute = call.args[0] == Call("abs", (Ref("x"),))
        self.paired = (self.absolute or call.args[0] == Ref("x")) and token.kind in INFINITY
        if self.paired:
            self.half = "bf16" if token.kind == "bfloat16" else "f16"
            infinity = INFINITY[token.kind] | (0x8000 if START[call.name] < 0 else 0)
            self.pair = register("uint32", T.uint32(infinity * 0x10001))

    def add(self, stretch, piece: int) -> None:
        """The numbers of a piece."""
        token = self.token
        if self.paired:
            for at in range(piece * token.each, (piece + 1) * token.each):
                word = token.words[at] & T.uint32(0x7FFF7FFF) if self.absolute else token.words[at]
                ptx(f"{COMBINE[self.call.name]}.{self.half}x2", self.pair[0], self.pair[0], word)
            return
        token.take(stretch, piece)
        for j in range(PIECE):
            self._combine(token.number(self.call.args[0], j))

    def across(self, lanes: int) -> None:
        """With what so many neighbouring lanes have, a power of two."""
        if self.paired:
            for half in (self.pair[0] & T.uint32(0xFFFF), self.pair[0] >> T.uint32(16)):
                self._combine(_float(self.token.kind, half))
            self.paired = False
        other, distance = T.alloc_local([1], "uint32"), lanes // 2
        while distance:
            own = T.reinterpret("uint32", self.result[0])
            ptx("shfl_sync.bfly.b32", other[0], own, T.uint32(distance), T.uint32(31), T.uint32(0xFFFFFFFF))
            self._combine(T.reinterpret("float32", other[0]))
            distance //= 2

    def _combine(self, value) -> None:
        ptx(f"{COMBINE[self.call.name]}.f32", self.result[0], self.result[0], value)


def _bounded(t: Tensor, scheme: Scheme) -> bool:
    """Whether codes are x over a scale that is the largest |x| over what codes go up to, or less: a usual scale is then of
    finite numbers, and its quotients round to codes."""
    match t.value:
        case Binary("/", Ref("x"), Ref(name)) if not scheme.tensor(name).loaded:
            scale = scheme.tensor(name)
        case _:
            return False
    match scale.value:
        case Binary("/", Call("amax", (Call("abs", (Ref("x"),)),)), Number(most)):
            return scale.dtype.name == "f32" and 0 < most <= min(t.dtype.max, -t.dtype.min)
    return False


OVER = "over "  # before the name of a scale: a call of one argument


def _mended(e: Expr, scales: set[str]) -> Expr:
    """The equation with quotients as reciprocals make them."""
    match e:
        case Binary("/", left, Ref(name)) if name in scales:
            return Call(OVER + name, (_mended(left, scales),))
    return e.map(lambda child: _mended(child, scales))


def _float(kind: str, half):
    if kind == "bfloat16":
        return T.reinterpret("float32", half << T.uint32(16))
    return T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32")


def _small(dtype: DType) -> bool:
    """Whether codes are two's complement, and fit into a byte."""
    return dtype.kind == "int" and dtype.bits <= 8


def _rounded(dtype: DType, values: Sequence, plan: Plan, bounded: bool):
    """Four numbers that are no NaN as the bytes of a word: the bits of 1.5 * 2^23 plus a number end with it, rounded."""
    low, high, middle = T.float32(dtype.min), T.float32(dtype.max), T.float32(1.5 * 2**23)
    values = values if bounded else [T.min(T.max(value, low), high) for value in values]
    bits = [T.reinterpret("uint32", value + middle) for value in values]
    pairs = [T.alloc_local([1], "uint32") for _ in range(3)]
    for pair, (a, b), order in zip(
        pairs, ((bits[0], bits[1]), (bits[2], bits[3]), (pairs[0][0], pairs[1][0])), (0x40, 0x40, 0x5410), strict=True
    ):
        ptx("prmt.b32", pair[0], a, b, T.uint32(order))
    if dtype.bits < 8 and plan.main_loop is None:  # portable kernels look at the code's bits alone
        return pairs[2][0] & T.uint32(dtype.mask * 0x01010101)
    return pairs[2][0]


def _packed(dtype: DType, values: Sequence, plan: Plan):
    """Four numbers, rounded, as the bytes of a word. Where bytes are multiplied, those of a signed integer of fewer bits have
    its sign in all of the upper ones, which portable kernels do not look at."""
    if dtype.name in ("e4m3", "e5m2") and plan.target.converts_fp8:
        pairs = T.alloc_local([2], "uint16")
        for p in range(2):
            ptx(f"cvt.rn.satfinite.{dtype.name}x2.f32", pairs[p], values[2 * p + 1], values[2 * p])
        return T.cast(pairs[0], "uint32") | T.cast(pairs[1], "uint32") << T.uint32(16)
    word = None
    for j, value in enumerate(values):
        byte = T.cast(encode(dtype, value), "uint32")
        if dtype.kind == "int" and dtype.bits < 8 and plan.main_loop is not None:
            byte = (byte ^ T.uint32(1 << dtype.bits - 1)) - T.uint32(1 << dtype.bits - 1) & T.uint32(255)
        byte = byte << T.uint32(8 * j)
        word = byte if word is None else word | byte
    return word
