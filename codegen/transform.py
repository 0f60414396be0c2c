"""Transforms of x before it is quantized: one kernel for each contraction, float32 in between. On a GPU, those that are products
of matrices are `cuda.contract`'s.

Every element of what a contraction makes is a sum of products in order of its digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import contract
from qdsl.codegen.function import Parameters, each, extents, local, open_function, store
from qdsl.codegen.plan import VECTOR, Plan, transform_steps
from qdsl.codegen.tir import as_float, f32, i64
from qdsl.manifest import Step
from qdsl.transform import Pass, passes


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """The functions of the plan's `transform_steps`."""
    block = plan.scheme.activation()
    found = zip(transform_steps(plan.scheme), passes(block.transforms) if block else (), strict=True)
    on_cpu, lowered = plan.target.kind == "cpu", {}
    for step, p in found:
        tiled = not on_cpu and contract.supported(p)
        lowered[step.function] = (contract.lower if tiled else _contraction)(plan, step, p)
    return lowered


@dataclass(frozen=True)
class _Contraction:
    """One pass, while its function is built: where digits are and how many positions they have."""

    own: Parameters
    of: Pass
    size: Mapping[str, tirx.Expr]
    m: tirx.Expr
    at: Mapping[str, tirx.Expr]

    def sums(self, lanes: int) -> None:
        """The elements from `at` on, so many neighbours on the last digit of the result."""
        source, made, parts = self.own.buffers[self.of.source], self.own.buffers[self.of.name], self.of.contraction
        last = parts.result[-1]
        total = local((lanes,), "float32")

        def for_lanes(body: Callable[[tirx.Expr], None]) -> None:
            if lanes == 1:
                body(i64(0))
                return
            with T.vectorized(i64(0), i64(lanes)) as v:
                body(v)

        def place(digits: Sequence[str], at: Mapping[str, tirx.Expr], v: tirx.Expr) -> tirx.Expr:
            return _place(digits, {**at, last: at[last] + v}, self.size)

        def nest(summed: Sequence[str], at: Mapping[str, tirx.Expr]) -> None:
            if summed:
                with T.serial(i64(0), self.size[summed[0]]) as i:
                    nest(summed[1:], {**at, summed[0]: i})
                return

            def add(v: tirx.Expr) -> None:
                value = T.cast(source[self.m, place(parts.source, at, v)], "float32")
                for f in parts.factors:
                    index = [place(digits, at, v) for digits in f.index]
                    value = value * as_float(self.own.element_at(self.own.plan.scheme.tensor(f.name), index))
                store(total, total[v] + value, v)

            for_lanes(add)

        for_lanes(lambda v: store(total, f32(0), v))
        nest(parts.summed, self.at)
        for_lanes(lambda v: store(made, total[v], self.m, place(parts.result, self.at, v)))


def _contraction(plan: Plan, step: Step, p: Pass) -> tirx.PrimFunc:
    """CPU: a vector of neighbours is one piece of work; GPU: an element, and neighbours are those of other threads."""
    lanes = VECTOR if plan.target.kind == "cpu" else 1
    *outer, last = p.contraction.result
    with open_function(plan, step.function, step.args) as (builder, own):
        size = extents(plan, own, p)
        blocks = T.truncdiv(size[last] + i64(lanes - 1), i64(lanes)) if lanes > 1 else size[last]
        count = own.sizes["m"] * blocks
        for digit in outer:
            count = count * size[digit]
        with each(plan, count, math.prod(size.values(), start=own.sizes["m"])) as flat:
            first, rest = T.truncmod(flat, blocks) * i64(lanes), T.truncdiv(flat, blocks)
            at = {last: first}
            for digit in reversed(outer):
                at[digit], rest = T.truncmod(rest, size[digit]), T.truncdiv(rest, size[digit])
            work = _Contraction(own, p, size, rest, at)
            if lanes == 1:
                work.sums(1)
            else:
                with T.If(first + i64(lanes) <= size[last]):
                    with T.Then():
                        work.sums(lanes)
                    with T.Else(), T.serial(i64(0), size[last] - first) as i:
                        replace(work, at={**at, last: first + i}).sums(1)
    return builder.get()


def _place(digits: Sequence[str], at: Mapping[str, tirx.Expr], size: Mapping[str, tirx.Expr]) -> tirx.Expr:
    """Where an index of several digits is, the last one fastest."""
    place = at[digits[0]]
    for digit in digits[1:]:
        place = place * size[digit] + at[digit]
    return place
