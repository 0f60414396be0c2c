"""One contraction of x before it is quantized (`qdsl.transform`), as a product of matrices in float32:

    made[c, (m j)] = sum over i of factor[i, c] * source[i, (m j)]

j are the digits that stay as they are. A CTA makes 64 x 64 numbers, a thread 4 x 4; both operands come through shared
memory, 32 of i at a time. A number is a sum in order of i, whatever m is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ptx, register, zeros
from qdsl.codegen.function import Parameters, extents, open_function
from qdsl.codegen.plan import Plan
from qdsl.codegen.tir import as_float, i64
from qdsl.manifest import Step
from qdsl.transform import Pass

TILE, CHUNK, THREADS, EACH = 64, 32, 256, 4
PITCH = TILE + 4  # numbers of a row in shared memory: 16 bytes on, so that a column is in eight banks


def supported(p: Pass) -> bool:
    """One tensor of two digits, of which one is summed and the other new; the rest of x stays in its order."""
    c = p.contraction
    if len(c.factors) != 1 or len(c.summed) != 1 or any(len(digits) != 1 for digits in c.factors[0].index):
        return False
    (summed,), new = c.summed, [d for d in c.factors[0].digits if d not in c.summed]
    if len(c.factors[0].index) != 2 or len(new) != 1 or summed not in c.source or new[0] in c.source:
        return False
    return [d for d in c.source if d != summed] == [d for d in c.result if d != new[0]]


@dataclass(frozen=True)
class _Digits:
    """The digits of source or made around one of them: `before` it and `after` it, of which j are made."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    size: dict[str, tirx.Expr]

    @property
    def step(self):
        """From one position of the digit to the next."""
        return math.prod((self.size[d] for d in self.after), start=i64(1))

    def place(self, j, extent):
        """Where position 0 of the digit, which has so many, is for j."""
        if not self.before:
            return j
        return T.truncdiv(j, self.step) * (extent * self.step) + (T.truncmod(j, self.step) if self.after else i64(0))


def _around(digits: tuple[str, ...], digit: str, size: dict[str, tirx.Expr]) -> _Digits:
    at = digits.index(digit)
    return _Digits(digits[:at], digits[at + 1 :], size)


def lower(plan: Plan, step: Step, p: Pass) -> tirx.PrimFunc:
    """The kernel of a step, for a pass that is supported."""
    c = p.contraction
    (summed,), (new,) = c.summed, (d for d in c.factors[0].digits if d not in c.summed)
    with open_function(plan, step.function, step.args) as (builder, own):
        size = extents(plan, own, p)
        old, made = _around(c.source, summed, size), _around(c.result, new, size)
        rest = math.prod((size[d] for d in c.source if d != summed), start=i64(1))
        columns, across = own.sizes["m"] * rest, T.truncdiv(size[new] + i64(TILE - 1), i64(TILE))
        T.device_entry()
        cta = T.cta_id([T.cast(T.truncdiv(columns + i64(TILE - 1), i64(TILE)) * across, "int32")])
        thread = T.thread_id([THREADS])
        pool = T.alloc_buffer((2 * 4 * CHUNK * PITCH,), "uint8", scope="shared.dyn")
        held = T.decl_buffer((2, CHUNK, PITCH), "float32", data=pool.data, scope="shared.dyn", elem_offset=0)
        if plan.overlapped:
            overlap.wait()
            overlap.let_in()
        first = T.cast(T.truncdiv(T.cast(cta, "int64"), across) * i64(TILE), "int64")
        top = T.truncmod(T.cast(cta, "int64"), across) * i64(TILE)
        load = _Loads(own, p, summed, new, old, thread, first, top, columns, rest)
        acc, parts = zeros(EACH * EACH, "float32"), T.alloc_local([2 * EACH], "float32")
        right, down = thread % (TILE // EACH) * EACH, thread // (TILE // EACH) * EACH
        with T.serial(i64(0), T.truncdiv(size[summed] + i64(CHUNK - 1), i64(CHUNK)), unroll=False) as chunk:
            T.evaluate(T.cuda.cta_sync())
            load.chunk(held, chunk * i64(CHUNK))
            T.evaluate(T.cuda.cta_sync())
            for i in range(CHUNK):
                for operand, place in ((0, down), (1, right)):
                    numbers = (parts[operand * EACH + v] for v in range(EACH))
                    ptx("ld.shared.v4.f32", *numbers, held.ptr_to([operand, i, place]))
                for v in range(EACH * EACH):
                    assign(acc, v, acc[v] + parts[v // EACH] * parts[EACH + v % EACH])
        target = own.buffers[p.name]
        for u in range(EACH):
            column = register("int64", first + T.cast(right + u, "int64"))[0]
            m, j = T.truncdiv(column, rest), T.truncmod(column, rest)
            for v in range(EACH):
                row = top + T.cast(down + v, "int64")
                with T.If(tirx.all(column < columns, row < size[new])), T.Then():
                    T.buffer_store(target, acc[v * EACH + u], [m, made.place(j, size[new]) + row * made.step])
    return builder.get()


class _Loads:
    """What a thread brings to shared memory: neighbours in memory are those of neighbouring threads."""

    def __init__(self, own: Parameters, p: Pass, summed, new, old: _Digits, thread, first, top, columns, rest):
        self.own, self.p, self.summed, self.new, self.old = own, p, summed, new, old
        self.thread, self.top, self.size = thread, top, old.size
        count = CHUNK * TILE // THREADS
        self.source = own.buffers[p.source]
        self.at = [self._spread(n, bool(old.after)) for n in range(count)]
        self.m, self.places = T.alloc_local([count], "int64"), T.alloc_local([count], "int64")  # places of i = 0
        for n, (_, column) in enumerate(self.at):
            found = first + T.cast(column, "int64")
            inside = found < columns
            assign(self.m, n, T.if_then_else(inside, T.truncdiv(found, rest), i64(-1)))
            assign(self.places, n, old.place(T.truncmod(found, rest), self.size[summed]))

    def _spread(self, n: int, columns: bool) -> tuple:
        """(i, column or row) of the thread's n'th number: neighbouring columns, or else neighbours in i."""
        item = n * THREADS + self.thread
        return (item // TILE, item % TILE) if columns else (item % CHUNK, item // CHUNK)

    def chunk(self, held, start) -> None:
        for n, (i, column) in enumerate(self.at):
            at = start + T.cast(i, "int64")
            inside = tirx.all(self.m[n] >= i64(0), at < self.size[self.summed])
            number = T.cast(self.source[self.m[n], self.places[n] + at * self.old.step], "float32")
            T.buffer_store(held, T.if_then_else(inside, number, T.float32(0)), [1, i, column])
        (factor,) = self.p.contraction.factors
        tensor, by_row = self.own.plan.scheme.tensor(factor.name), factor.digits[0] == self.summed
        for n in range(CHUNK * TILE // THREADS):
            i, row = self._spread(n, by_row)
            at, of = start + T.cast(i, "int64"), self.top + T.cast(row, "int64")
            inside = tirx.all(at < self.size[self.summed], of < self.size[self.new])
            value = as_float(self.own.element_at(tensor, [at, of] if by_row else [of, at]))
            T.buffer_store(held, T.if_then_else(inside, value, T.float32(0)), [0, i, row])
