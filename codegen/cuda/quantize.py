"""Run-time quantization on a GPU: all that an activation block computes, in one kernel.

    x[m, :] --pieces of 8, HELD for each thread--> amax of the row --> scales of the row
                                               --> amax of groups --> scales of groups --> codes, 8 side by side

A CTA takes one token, or where nothing is computed of whole rows, a stretch of one. All pieces of a stretch are asked for
before the first has come; a token of one stretch is read once. A group lies within the pieces of a warp, whose lanes tell
each other what they have found. Equations are those of the portable kernels (`qdsl.codegen.quantize`), but for codes, which
are multiplied by the reciprocal of their scale: off by no more than two roundings.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when, wide
from qdsl.codegen.function import Parameters, open_function
from qdsl.codegen.plan import Plan
from qdsl.codegen.tir import as_float, divide, encode, round_to, translate
from qdsl.dtype import DType
from qdsl.expr import REDUCTIONS, Binary, Call, Expr, Ref, names, walk
from qdsl.scheme import Group, Scheme, Tensor, Var

THREADS = 512
PIECE = 8  # numbers of a thread, side by side: 16 bytes of x, and 8 of codes
HELD = 4  # pieces of a thread, THREADS pieces apart
TINY = 2.0**-100  # below it a scale may have no reciprocal
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # of a number of x
START = {"amax": -np.inf, "amin": np.inf}
COMBINE = {"amax": "max.NaN.f32", "amin": "min.NaN.f32"}  # a NaN among the numbers is what comes out
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
    with open_function(plan, "quantize", args) as (builder, own):
        T.device_entry()
        rows = [t for t in computed if _level(t, scheme) == ROW]
        whole = any(_reductions(t) for t in rows)
        held = HELD if whole else 1
        stretches = T.cast(ceildiv(own.sizes["k"], THREADS * PIECE * held), "int32")
        cta = T.cta_id([T.cast(own.sizes["m"], "int32") * (1 if whole else stretches)])
        thread = T.thread_id([THREADS])
        if plan.overlapped:
            overlap.let_in()  # the product, which asks for its weights before it waits
            overlap.wait()
        token = _Token(plan, own, thread, cta if whole else tirx.truncdiv(cta, stretches), held)
        for t in scheme.activation().operand.loaded:
            if t.role == "scale" and not t.index:
                token.invert(t, own.element(t.name, {}))
        if whole:
            token.reduce_row([call for t in rows for call in _reductions(t)], stretches)
        for t in rows:
            with when(thread == 0) if whole else when(tirx.all(thread == 0, tirx.truncmod(cta, stretches) == 0)):
                T.buffer_store(own.buffers[t.name], encode(t.dtype, token.value(t)), [token.m])
            token.keep(t)
        rest = [t for t in computed if t not in rows]
        if whole:
            with T.serial(0, stretches, unroll=False) as i:
                with when(stretches > 1):
                    token.ask(i)
                token.finish(rest, i)
        else:
            stretch = tirx.truncmod(cta, stretches)
            token.ask(stretch)
            token.finish(rest, stretch)
    return builder.get()


class _Token:
    """What a thread knows of its token: x, the results of reductions, and the scales that are made of them."""

    def __init__(self, plan: Plan, own: Parameters, thread, m, held: int):
        self.plan, self.own, self.thread, self.m, self.held = plan, own, thread, wide(m), held
        self.K = T.cast(own.sizes["k"], "int32")
        self.whole = self.K % PIECE == 0  # a piece is all there, or not at all
        self.found: dict[Call, tirx.Buffer] = {}
        self.kept: dict[str, tirx.Buffer] = {}
        self.scales: dict[str, tuple] = {}  # as a float32, and its reciprocal
        self.kind = str(own.buffers["x"].dtype)
        self.size, self.each = BYTES[self.kind], PIECE * BYTES[self.kind] // 4  # bytes of a number, words of a piece
        self.words = T.alloc_local([held * self.each], "uint32")
        self.x = T.alloc_local([PIECE], "float32")
        self.k = T.int32(0)  # of the piece's first number

    # ---- x ------------------------------------------------------------------------------------------------------
    def first(self, stretch, piece: int):
        """The piece's first number."""
        return ((stretch * self.held + piece) * THREADS + self.thread) * PIECE

    def ask(self, stretch) -> None:
        """The thread's pieces of a stretch, into registers; what lies beyond K is 0."""
        each, size, x = self.each, self.size, self.own.buffers["x"]
        for at in range(self.held * each):
            assign(self.words, at, T.uint32(0))
        with T.If(self.whole):
            with T.Then():
                for piece in range(self.held):
                    k = self.first(stretch, piece)
                    with when(k < self.K):
                        for half in range(0, each, 4):
                            words = (self.words[piece * each + half + j] for j in range(4))
                            ptx("ld.global.v4.b32", *words, x.ptr_to([self.m, wide(k + half * 4 // size)]))
            with T.Else():
                for piece in range(self.held):
                    for j in range(PIECE):
                        k = self.first(stretch, piece) + j
                        at, shift = piece * each + j * size // 4, j * size % 4 * 8
                        with when(k < self.K):
                            bits = T.reinterpret(f"uint{8 * size}", x[self.m, wide(k)])
                            assign(self.words, at, self.words[at] | T.cast(bits, "uint32") << T.uint32(shift))

    def reaches(self, stretch, piece: int):
        """Whether any thread has something of the piece."""
        return (stretch * self.held + piece) * (THREADS * PIECE) < self.K

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
        for call in calls:
            self.found[call] = register("float32", T.float32(START[call.name]))
        with T.serial(0, stretches, unroll=False) as i:
            self.ask(i)
            for piece in range(self.held):
                with when(self.reaches(i, piece)):
                    self.take(i, piece)
                    for call in calls:
                        self._combine_piece(call)
        warps = THREADS // 32
        pool = T.alloc_buffer((4 * len(calls) * warps,), "uint8", scope="shared.dyn")
        pool = T.decl_buffer((len(calls), warps), "float32", data=pool.data, scope="shared.dyn", elem_offset=0)
        for at, call in enumerate(calls):
            self._across(call, 32)
            with when(self.thread % 32 == 0):
                T.buffer_store(pool, self.found[call][0], [at, self.thread // 32])
        T.evaluate(T.cuda.cta_sync())
        for at, call in enumerate(calls):
            for warp in range(warps):
                self._combine(call, pool[at, warp])

    def reduce_group(self, call: Call, size: int) -> None:
        """The result of a reduction over the piece's group, in each of its threads."""
        self.found[call] = register("float32", T.float32(START[call.name]))
        self._combine_piece(call)
        self._across(call, size // PIECE)

    def _combine_piece(self, call: Call) -> None:
        def number(j: int):
            return as_float(translate(call.args[0], lambda e: self._look(e, j)))

        with T.If(self.whole):
            with T.Then(), when(self.k < self.K):
                for j in range(PIECE):
                    self._combine(call, number(j))
            with T.Else():
                for j in range(PIECE):
                    with when(self.k + j < self.K):
                        self._combine(call, number(j))

    def _across(self, call: Call, lanes: int) -> None:
        """Combines the results of so many neighbouring lanes."""
        other = T.alloc_local([1], "uint32")
        distance = lanes // 2
        while distance:
            own = T.reinterpret("uint32", self.found[call][0])
            ptx("shfl_sync.bfly.b32", other[0], own, T.uint32(distance), T.uint32(31), T.uint32(0xFFFFFFFF))
            self._combine(call, T.reinterpret("float32", other[0]))
            distance //= 2

    def _combine(self, call: Call, value) -> None:
        result = self.found[call]
        ptx(COMBINE[call.name], result[0], result[0], value)

    # ---- what is computed ---------------------------------------------------------------------------------------
    def value(self, t: Tensor, j: int = 0):
        """A tensor's number for number j of the piece, before it is rounded."""
        return as_float(translate(t.value, lambda e: self._look(e, j)))

    def multiplied(self, t: Tensor, j: int):
        """The same with reciprocals of scales."""
        return as_float(translate(_multiplied(t.value, set(self.scales)), lambda e: self._look(e, j)))

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

    def _look(self, e: Expr, j: int):
        if isinstance(e, Call):
            return self.found[e][0]
        assert isinstance(e, Ref), f"{e} in an activation equation"
        if e.name == "x":
            return self.x[j]
        if e.name.startswith(RECIPROCAL):
            return self.scales[e.name.removeprefix(RECIPROCAL)][1]
        if e.name in self.kept:
            return self.kept[e.name][0]
        return self.own.element(e.name, {"m": self.m, "k": wide(self.k + j)})

    def finish(self, rest: Sequence[Tensor], stretch) -> None:
        """Groups and codes of a stretch."""
        for piece in range(self.held):
            with when(self.reaches(stretch, piece)):
                self.take(stretch, piece)
                for t in rest:
                    self._finish(t)

    def _finish(self, t: Tensor) -> None:
        if t.index[1] == Var("k"):
            self._store_codes(t)
            return
        size = t.index[1].size
        for call in _reductions(t):
            self.reduce_group(call, size)
        with when(tirx.all(self.k < self.K, self.k % size == 0)):
            T.buffer_store(self.own.buffers[t.name], encode(t.dtype, self.value(t)), [wide(self.k // size), self.m])
        self.keep(t)

    def _store_codes(self, t: Tensor) -> None:
        codes, words = self.own.buffers[t.name], T.alloc_local([PIECE // 4], "uint32")
        divisors = [self.scales[name][0] for name in dict.fromkeys(names(t.value)) if name in self.scales]

        def pack(value: Callable) -> None:
            for at in range(PIECE // 4):
                assign(words, at, _packed(t.dtype, [value(t, 4 * at + j) for j in range(4)], self.plan))

        # A scale of zero counts as large: its reciprocal is 0, and so is what is divided by it.
        usual = [tirx.any(scale >= T.float32(TINY), scale == T.float32(0)) for scale in divisors]
        if not usual:
            pack(self.value)
        else:
            values = [register("float32", self.multiplied(t, j))[0] for j in range(PIECE)]
            small = _small(t.dtype)
            if small:  # a NaN among the numbers is one in their sum
                usual.append(tirx.Not(T.isnan(functools.reduce(operator.add, values))))
            with T.If(functools.reduce(tirx.all, usual)):
                with T.Then():
                    if small:
                        for at in range(PIECE // 4):
                            assign(words, at, _rounded(t.dtype, values[4 * at : 4 * at + 4], self.plan))
                    else:
                        pack(lambda t, j: values[j])
                with T.Else():
                    pack(self.value)
        with T.If(self.whole):
            with T.Then(), when(self.k < self.K):
                ptx("st.global.v2.b32", codes.ptr_to([self.m, wide(self.k)]), *(words[at] for at in range(PIECE // 4)))
            with T.Else():
                for j in range(PIECE):
                    with when(self.k + j < self.K):
                        byte = T.cast(words[j // 4] >> T.uint32(8 * (j % 4)) & T.uint32(255), "uint8")
                        T.buffer_store(codes, byte, [self.m, wide(self.k + j)])


RECIPROCAL = "1 / "  # before the name of a scale


def _multiplied(e: Expr, scales: set[str]) -> Expr:
    """The equation with reciprocals of scales instead of quotients."""
    match e:
        case Binary("/", left, Ref(name)) if name in scales:
            return Binary("*", _multiplied(left, scales), Ref(RECIPROCAL + name))
        case Binary(op, left, right):
            return Binary(op, _multiplied(left, scales), _multiplied(right, scales))
    return e


def _float(kind: str, half):
    if kind == "bfloat16":
        return T.reinterpret("float32", half << T.uint32(16))
    return T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32")


def _small(dtype: DType) -> bool:
    """Whether codes are two's complement, and fit into a byte."""
    return dtype.kind == "int" and dtype.bits <= 8


def _rounded(dtype: DType, values: Sequence, plan: Plan):
    """Four numbers that are no NaN as the bytes of a word: the bits of 1.5 * 2^23 plus a number end with it, rounded."""
    low, high, middle = T.float32(dtype.min), T.float32(dtype.max), T.float32(1.5 * 2**23)
    bits = [T.reinterpret("uint32", T.min(T.max(value, low), high) + middle) for value in values]
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
