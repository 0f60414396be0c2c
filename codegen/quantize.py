"""Run-time quantization: one kernel for each tensor that an activation block computes.

Every element of the tensor is one piece of work: reductions over its group first (amax, …), then the equation, then one
rounding to the declared type.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import Parameters, each, local, open_function, store
from qdsl.codegen.plan import Plan, quantize_args
from qdsl.codegen.tir import as_float, encode, f32, i64, translate
from qdsl.expr import REDUCTIONS, Call, Expr, Ref, walk
from qdsl.scheme import Group, Index, Tensor, Var


def lower(plan: Plan, steps: Mapping[str, tuple[str, ...]]) -> dict[str, tirx.PrimFunc]:
    """`quantize_NAME` for every computed tensor, in declared order; or `quantize` for all, where the plan has that step.

    steps  the arguments of the plan's functions
    """
    if "quantize" in steps:
        from qdsl.codegen.cuda import quantize

        return {"quantize": quantize.lower(plan, steps["quantize"])}
    activation = plan.scheme.activation()
    computed = [t for t in activation.operand.tensors if not t.loaded] if activation else []
    return {f"quantize_{t.name}": _quantize(plan, t) for t in computed}


def _quantize(plan: Plan, tensor: Tensor) -> tirx.PrimFunc:
    """One computed activation tensor: a reduction per element where the equation has one, then one rounding."""
    args = quantize_args(plan.scheme, tensor)
    with open_function(plan, f"quantize_{tensor.name}", args) as (builder, own):
        extents = [own.extent(i) for i in tensor.index]
        count = i64(1)
        for extent in extents:
            count = count * extent
        with each(plan, count, own.sizes["m"] * own.sizes["k"]) as flat:
            index, rest = [], flat
            for extent in reversed(extents[1:]):
                index.insert(0, T.truncmod(rest, extent))
                rest = T.truncdiv(rest, extent)
            if extents:
                index.insert(0, rest)
            _element(own, tensor, index)
    return builder.get()


def _element(own: Parameters, tensor: Tensor, index: list[tirx.Expr]) -> None:
    starts = {  # the first position of the element's group on each axis
        _axis(i): position if isinstance(i, Var) else position * i64(i.size or 1)
        for i, position in zip(tensor.index, index, strict=True)
    }
    grouped = {i.axis: i.size for i in tensor.index if isinstance(i, Group)}
    found: dict[Call, tirx.Buffer] = {}
    for call in (e for e in walk(tensor.value) if isinstance(e, Call) and e.name in REDUCTIONS):
        found[call] = _reduction(own, call, starts, grouped)

    def look(e: Expr) -> tirx.Expr:
        if isinstance(e, Call):
            return found[e][0]
        return _activation_value(own, e, starts)

    value = as_float(translate(tensor.value, look))
    places = dict(zip(tensor.index, index, strict=True))
    store(own.buffers[tensor.name], encode(tensor.dtype, value), *([places[i] for i in tensor.held] or [i64(0)]))


def _reduction(own: Parameters, call: Call, starts: dict, grouped: dict) -> tirx.Buffer:
    start = {"amax": -np.inf, "amin": np.inf, "sum": 0.0}[call.name]
    combine = {"amax": T.max, "amin": T.min, "sum": lambda a, b: a + b}[call.name]
    result = local((1,), "float32")
    store(result, f32(start), 0)
    axes = [a for a in ("m", "k") if a not in starts or a in grouped]

    def nest(axes: list[str], at: dict[str, tirx.Expr]) -> None:
        if not axes:
            value = as_float(translate(call.args[0], lambda e: _activation_value(own, e, at)))
            # NaN must survive: max(NaN, x) is x on some targets
            kept = T.if_then_else(
                T.isnan(result[0]), result[0], T.if_then_else(T.isnan(value), value, combine(result[0], value))
            )
            store(result, kept, 0)
            return
        axis, size = axes[0], grouped.get(axes[0])
        first = starts.get(axis, i64(0))
        last = own.sizes[axis] if size is None else T.min(first + i64(size), own.sizes[axis])
        with T.serial(i64(0), last - first) as i:
            nest(axes[1:], {**at, axis: first + i})

    nest(axes, dict(starts))
    return result


def _activation_value(own: Parameters, e: Expr, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    if e == Ref("x"):
        return T.cast(own.buffers["x"][at["m"], at["k"]], "float32")
    assert isinstance(e, Ref), f"{e} in an activation equation"
    return own.element(e.name, at)


def _axis(i: Index) -> str:
    assert isinstance(i, Var | Group), f"{i} has no axis of its own"
    return i.axis
