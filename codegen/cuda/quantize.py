"""Run-time quantization on a GPU: all that an activation block computes, in one kernel.

    x[m, :] --a piece of 8 for each thread--> amax of the row --> scales of the row
            --again, out of the cache-------> amax of groups --> scales of groups --> codes, 8 side by side

A CTA takes one token, or where nothing is computed of whole rows, a stretch of one. A group lies within the pieces of a
warp, whose lanes tell each other what they have found. Equations are those of the portable kernels (`qdsl.codegen.quantize`),
and so are the bits that come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when, wide
from qdsl.codegen.function import Parameters, open_function
from qdsl.codegen.plan import Plan
from qdsl.codegen.target import Target
from qdsl.codegen.tir import as_float, encode, round_to, translate
from qdsl.dtype import DType
from qdsl.expr import REDUCTIONS, Call, Expr, Ref, names, walk
from qdsl.scheme import Group, Scheme, Tensor, Var

THREADS = 256
PIECE = 8  # numbers of a thread, side by side: 16 bytes of x, and 8 of codes
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
        stretches = T.cast(ceildiv(own.sizes["k"], THREADS * PIECE), "int32")
        cta = T.cta_id([T.cast(own.sizes["m"], "int32") * (1 if whole else stretches)])
        thread = T.thread_id([THREADS])
        if plan.overlapped:
            overlap.wait()
            overlap.let_in()
        token = _Token(plan, own, thread, cta if whole else tirx.truncdiv(cta, stretches))
        if whole:
            token.reduce_row([call for t in rows for call in _reductions(t)], stretches)
        for t in rows:
            with when(thread == 0) if whole else when(tirx.all(thread == 0, tirx.truncmod(cta, stretches) == 0)):
                T.buffer_store(own.buffers[t.name], encode(t.dtype, token.value(t)), [token.m])
            token.keep(t)
        rest = [t for t in computed if t not in rows]
        if whole:
            with T.serial(0, stretches, unroll=False) as i:
                token.finish(rest, i)
        else:
            token.finish(rest, tirx.truncmod(cta, stretches))
    return builder.get()


class _Token:
    """What a thread knows of its token: x, the results of reductions, and the scales that are made of them."""

    def __init__(self, plan: Plan, own: Parameters, thread, m):
        self.plan, self.own, self.thread, self.m = plan, own, thread, wide(m)
        self.K = T.cast(own.sizes["k"], "int32")
        self.found: dict[Call, tirx.Buffer] = {}
        self.kept: dict[str, tirx.Buffer] = {}
        self.x = T.alloc_local([PIECE], "float32")
        self.k = T.int32(0)  # of the piece's first number

    # ---- x ------------------------------------------------------------------------------------------------------
    def read(self, stretch) -> None:
        """The thread's piece of a stretch; what lies beyond K is 0."""
        self.k = (stretch * THREADS + self.thread) * PIECE
        x = self.own.buffers["x"]
        kind = str(x.dtype)
        for j in range(PIECE):
            assign(self.x, j, T.float32(0))
        if kind == "float32":
            return self._numbers(x)
        words = T.alloc_local([PIECE // 2], "uint32")
        with T.If(self.K % PIECE == 0):
            with T.Then(), when(self.k < self.K):
                ptx("ld.global.v4.b32", *(words[j] for j in range(PIECE // 2)), x.ptr_to([self.m, wide(self.k)]))
                for j in range(PIECE):
                    half = words[j // 2] >> T.uint32(16) if j % 2 else words[j // 2] & T.uint32(0xFFFF)
                    assign(self.x, j, _float(kind, half))
            with T.Else():
                self._numbers(x)

    def _numbers(self, x) -> None:
        for j in range(PIECE):
            with when(self.k + j < self.K):
                assign(self.x, j, T.cast(x[self.m, wide(self.k + j)], "float32"))

    # ---- reductions ---------------------------------------------------------------------------------------------
    def reduce_row(self, calls: Sequence[Call], stretches) -> None:
        """The results of reductions over all of the token, in every thread."""
        for call in calls:
            self.found[call] = register("float32", T.float32(START[call.name]))
        with T.serial(0, stretches, unroll=False) as i:
            self.read(i)
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
        for j in range(PIECE):
            with when(self.k + j < self.K):
                self._combine(call, as_float(translate(call.args[0], lambda e, j=j: self._look(e, j))))

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

    def keep(self, t: Tensor) -> None:
        """Its rounded number, for the equations after it."""
        rounded = round_to(t.dtype, self.value(t))
        self.kept[t.name] = register(str(rounded.ty.dtype), rounded)

    def _look(self, e: Expr, j: int):
        if isinstance(e, Call):
            return self.found[e][0]
        assert isinstance(e, Ref), f"{e} in an activation equation"
        if e.name == "x":
            return self.x[j]
        if e.name in self.kept:
            return self.kept[e.name][0]
        return self.own.element(e.name, {"m": self.m, "k": wide(self.k + j)})

    def finish(self, rest: Sequence[Tensor], stretch) -> None:
        """Groups and codes of a stretch."""
        self.read(stretch)
        for t in rest:
            if t.index[1] == Var("k"):
                self._store_codes(t)
                continue
            size = t.index[1].size
            for call in _reductions(t):
                self.reduce_group(call, size)
            with when(tirx.all(self.k < self.K, self.k % size == 0)):
                T.buffer_store(self.own.buffers[t.name], encode(t.dtype, self.value(t)), [self.m, wide(self.k // size)])
            self.keep(t)

    def _store_codes(self, t: Tensor) -> None:
        codes, words = self.own.buffers[t.name], T.alloc_local([PIECE // 4], "uint32")
        for at in range(PIECE // 4):
            assign(words, at, _packed(t.dtype, [self.value(t, 4 * at + j) for j in range(4)], self.plan.target))
        with T.If(self.K % PIECE == 0):
            with T.Then(), when(self.k < self.K):
                ptx("st.global.v2.b32", codes.ptr_to([self.m, wide(self.k)]), *(words[at] for at in range(PIECE // 4)))
            with T.Else():
                for j in range(PIECE):
                    with when(self.k + j < self.K):
                        byte = T.cast(words[j // 4] >> T.uint32(8 * (j % 4)) & T.uint32(255), "uint8")
                        T.buffer_store(codes, byte, [self.m, wide(self.k + j)])


def _float(kind: str, half):
    if kind == "bfloat16":
        return T.reinterpret("float32", half << T.uint32(16))
    return T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32")


def _packed(dtype: DType, values: Sequence, target: Target):
    """Four numbers, rounded, as the bytes of a word."""
    if dtype.name in ("e4m3", "e5m2") and target.converts_fp8:
        pairs = T.alloc_local([2], "uint16")
        for p in range(2):
            ptx(f"cvt.rn.satfinite.{dtype.name}x2.f32", pairs[p], values[2 * p + 1], values[2 * p])
        return T.cast(pairs[0], "uint32") | T.cast(pairs[1], "uint32") << T.uint32(16)
    word = None
    for j, value in enumerate(values):
        byte = T.cast(encode(dtype, value), "uint32") << T.uint32(8 * j)
        word = byte if word is None else word | byte
    return word
