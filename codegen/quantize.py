"""Run-time quantization: one kernel for each tensor that an activation block computes.

Reductions over an element's group come first (amax, …), then the equation, then one rounding to the declared type.  On a
GPU every element is one piece of work; a CPU takes a token at a time, in vectors along k.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import (
    Parameters,
    decoded,
    each,
    for_tokens,
    in_lanes,
    in_vectors,
    local,
    open_function,
    store,
)
from qdsl.codegen.plan import VECTOR, Plan, quantize_args
from qdsl.codegen.tir import as_float, choose, encode, f32, i64, is_nan, round_bf16, translate
from qdsl.expr import REDUCTIONS, Call, Expr, Ref, walk
from qdsl.scheme import Group, Index, Tensor, Var
from qdsl.split import WIDENED

WIDE = 2 * VECTOR  # lanes of a reduction: two chains
PIECE = 8  # neighbours of a token that a thread of a GPU widens


def lower(plan: Plan, steps: Mapping[str, tuple[str, ...]]) -> dict[str, tirx.PrimFunc]:
    """`quantize_NAME` for every computed tensor, in declared order, or `quantize` for all, where the plan has these steps.

    steps  the arguments of the plan's functions
    """
    if "quantize" in steps:
        from qdsl.codegen.cuda import quantize

        return {"quantize": quantize.lower(plan, steps["quantize"])}
    activation = plan.scheme.activation()
    computed = [t for t in activation.operand.tensors if not t.loaded] if activation else []
    return {name: _quantize(plan, t) for t in computed if (name := f"quantize_{t.name}") in steps}


def _quantize(plan: Plan, tensor: Tensor) -> tirx.PrimFunc:
    """One computed activation tensor: a reduction per element where the equation has one, then one rounding."""
    args = quantize_args(plan.scheme, tensor)
    with open_function(plan, f"quantize_{tensor.name}", args) as (builder, own):
        (_by_token if plan.target.kind == "cpu" else _by_element)(plan, own, tensor)
    return builder.get()


def _by_element(plan: Plan, own: Parameters, tensor: Tensor) -> None:
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


def _by_token(plan: Plan, own: Parameters, tensor: Tensor) -> None:
    if of_tokens(tensor):
        m, k = own.sizes["m"], own.sizes["k"]
        for_tokens(m, m * k, lambda m: compute(own, tensor, m))
    else:
        compute(own, tensor)


def of_tokens(tensor: Tensor) -> bool:
    """Whether every token has elements of its own, which need no other token's x."""
    return tensor.index[:1] == (Var("m"),)


def _reduces(tensor: Tensor) -> bool:
    return any(isinstance(e, Call) and e.name in REDUCTIONS for e in walk(tensor.value))


def compute(own: Parameters, tensor: Tensor, *token: tirx.Expr) -> None:
    """On a CPU, all elements of a token, or all; those along k in vectors, if nothing is reduced for each."""

    def nest(rest: list[Index], index: list[tirx.Expr]) -> None:
        if not rest:
            _element(own, tensor, index)
        elif rest == [Var("k")] and not _reduces(tensor):
            in_vectors(i64(0), own.sizes["k"], lambda k: _element(own, tensor, [*index, k]))
        else:
            with T.serial(i64(0), own.extent(rest[0])) as i:
                nest(rest[1:], [*index, i])

    nest(list(tensor.index[len(token) :]), [*token])


def widen(plan: Plan) -> tirx.PrimFunc:
    """On a GPU, the operand of x as 16-bit floats, where a product of codes has no multiplier: `MainLoop.widened`."""
    args, x = (*plan.main_loop.made_of, WIDENED), plan.activation
    with open_function(plan, "widen", args) as (builder, own):
        m, k = own.sizes["m"], own.sizes["k"]
        pieces = T.truncdiv(k + i64(PIECE - 1), i64(PIECE))
        with each(plan, m * pieces, m * k) as flat:
            row, first = T.truncdiv(flat, pieces), T.truncmod(flat, pieces) * i64(PIECE)
            with T.serial(i64(0), T.min(i64(PIECE), k - first)) as i:
                at = {"m": row, "k": first + i}
                value = as_float(translate(x.core, lambda e: _activation_value(own, e, at)))
                if x.fold is not None:
                    value = value * as_float(translate(x.fold, lambda e: _activation_value(own, e, at)))
                store(own.buffers[WIDENED], T.cast(value, str(own.buffers[WIDENED].dtype)), row, first + i)
    return builder.get()


def inline(own: Parameters, tensor: Tensor) -> bool:
    """Let a tensor with an element for every x be computed where it is read; False for any other."""
    if set(tensor.index) != {Var("m"), Var("k")} or _reduces(tensor):
        return False
    own.inlined[tensor.name] = lambda at: decoded(tensor, _value(own, tensor, [at[i.axis] for i in tensor.index]))
    return True


def _element(own: Parameters, tensor: Tensor, index: list[tirx.Expr]) -> None:
    places = dict(zip(tensor.index, index, strict=True))
    store(own.buffers[tensor.name], _value(own, tensor, index), *([places[i] for i in tensor.held] or [i64(0)]))


def _value(own: Parameters, tensor: Tensor, index: list[tirx.Expr]) -> tirx.Expr:
    """An element, as its buffer holds it."""
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
    # A buffer of bfloat16 that is local to a function holds what TVM did not round.
    return encode(tensor.dtype, round_bf16(value) if tensor.dtype.name == "bf16" else value)


def _reduction(own: Parameters, call: Call, starts: dict, grouped: dict) -> tirx.Buffer:
    """A reduction over what the element's group has; on a CPU of every 32nd input in each lane first.

    NaN must survive: max(NaN, x) is x on some targets.  In lanes it is kept aside, where it is no part of a chain.
    """
    start = {"amax": -np.inf, "amin": np.inf, "sum": 0.0}[call.name]
    combine = {"amax": T.max, "amin": T.min, "sum": lambda a, b: a + b}[call.name]
    on_cpu = own.plan.target.kind == "cpu"
    result = local((1,), "float32") if not on_cpu else T.alloc_buffer((1,), "float32", scope="global")
    store(result, f32(start), 0)
    axes = [a for a in ("m", "k") if a not in starts or a in grouped]
    lanes = nans = None
    if on_cpu and "k" in axes:
        lanes, nans = (T.alloc_buffer((WIDE,), "float32", scope="global") for _ in range(2))
        in_lanes(lambda v: store(lanes, f32(start), v), WIDE)
        in_lanes(lambda v: store(nans, f32(0), v), WIDE)

    def kept(old: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
        return choose(is_nan(old), old, choose(is_nan(value), value, combine(old, value)))

    def nest(axes: list[str], at: dict[str, tirx.Expr]) -> None:
        if not axes:
            value = as_float(translate(call.args[0], lambda e: _activation_value(own, e, at)))
            store(result, kept(result[0], value), 0)
            return
        axis, size = axes[0], grouped.get(axes[0])
        first = starts.get(axis, i64(0))
        last = own.sizes[axis] if size is None else T.min(first + i64(size), own.sizes[axis])
        if axis == "k" and lanes is not None:
            whole = T.floordiv(last - first, i64(WIDE))

            def lane(i: tirx.Expr, v: tirx.Expr) -> None:
                here = {**at, "k": first + i * i64(WIDE) + v}
                value = as_float(translate(call.args[0], lambda e: _activation_value(own, e, here)))
                store(lanes, combine(lanes[v], value), v)
                store(nans, choose(is_nan(value), value, nans[v]), v)

            with T.serial(i64(0), whole) as i:
                in_lanes(lambda v: lane(i, v), WIDE)
            first = first + whole * i64(WIDE)
        with T.serial(i64(0), last - first) as i:
            nest(axes[1:], {**at, axis: first + i})

    nest(axes, dict(starts))
    if lanes is not None:
        in_lanes(lambda v: store(nans, choose(is_nan(nans[v]), nans[v], nans[v + i64(VECTOR)]), v))
        in_lanes(lambda v: store(lanes, combine(lanes[v], lanes[v + i64(VECTOR)]), v))
        in_lanes(lambda v: store(lanes, choose(is_nan(nans[v]), nans[v], lanes[v]), v))
        with T.serial(i64(0), i64(VECTOR)) as v:
            store(result, kept(result[0], lanes[v]), 0)
    return result


def _activation_value(own: Parameters, e: Expr, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    if e == Ref("x"):
        return T.cast(own.buffers["x"][at["m"], at["k"]], "float32")
    assert isinstance(e, Ref), f"{e} in an activation equation"
    return own.element(e.name, at)


def _axis(i: Index) -> str:
    assert isinstance(i, Var | Group), f"{i} has no axis of its own"
    return i.axis
