"""Transforms of x before it is quantized: one kernel for each contraction, float32 in between.

Every element of what a contraction makes is one piece of work: a sum of products in order of its digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import Parameters, each, local, open_function, store
from qdsl.codegen.plan import Plan, transform_steps
from qdsl.codegen.tir import as_float, f32, i64
from qdsl.manifest import Step
from qdsl.transform import Factor, Pass, passes, solved


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """The functions of the plan's `transform_steps`."""
    block = plan.scheme.activation()
    found = zip(transform_steps(plan.scheme), passes(block.transforms) if block else (), strict=True)
    return {step.function: _contraction(plan, step, p) for step, p in found}


def _contraction(plan: Plan, step: Step, p: Pass) -> tirx.PrimFunc:
    with open_function(plan, step.function, step.args) as (builder, own):
        size = _extents(plan, own, p)
        source, made, result = own.buffers[p.source], own.buffers[p.name], p.contraction.result
        width = made.shape[1]
        with each(plan, own.sizes["m"] * width) as flat:
            at, rest = {}, T.truncmod(flat, width)
            m = T.truncdiv(flat, width)
            for digit in reversed(result[1:]):
                at[digit], rest = T.truncmod(rest, size[digit]), T.truncdiv(rest, size[digit])
            at[result[0]] = rest
            total = local((1,), "float32")
            store(total, f32(0), 0)

            def nest(summed: Sequence[str], at: Mapping[str, tirx.Expr]) -> None:
                if summed:
                    with T.serial(i64(0), size[summed[0]]) as i:
                        nest(summed[1:], {**at, summed[0]: i})
                    return
                value = T.cast(source[m, _place(p.contraction.source, at, size)], "float32")
                for f in p.contraction.factors:
                    value = value * _element(own, f, at, size)
                store(total, total[0] + value, 0)

            nest(p.contraction.summed, at)
            store(made, total[0], m, _place(result, at, size))
    return builder.get()


def _extents(plan: Plan, own: Parameters, p: Pass) -> dict[str, tirx.Expr]:
    size: dict[str, tirx.Expr] = {}
    for found in solved(p.transform):
        if found.tensor == "x":
            whole = own.sizes["k"]
        else:
            whole = own.extent(plan.scheme.tensor(found.tensor).index[found.axis])
        for digit in found.others:
            whole = T.truncdiv(whole, size[digit])
        size[found.digit] = whole
    return size


def _place(digits: Sequence[str], at: Mapping[str, tirx.Expr], size: Mapping[str, tirx.Expr]) -> tirx.Expr:
    """Where an index of several digits is, the last one fastest."""
    place = at[digits[0]]
    for digit in digits[1:]:
        place = place * size[digit] + at[digit]
    return place


def _element(own: Parameters, f: Factor, at: Mapping[str, tirx.Expr], size: Mapping[str, tirx.Expr]) -> tirx.Expr:
    tensor = own.plan.scheme.tensor(f.name)
    return as_float(own.element_at(tensor, [_place(digits, at, size) for digits in f.index]))
