"""How an operand's equation meets the multiplier.

    operand = (core * fold * promote + correction) * epilogue

core        varies with every k and is what the multiplier sees
fold        constant within a group along k, multiplied into the core before the product (float compute)
promote     constant within a group along k, applied to the group's partial sum (integer and 8-bit compute)
epilogue    free of k, applied once to the finished sum
correction  constant within a group: contributes correction * sum of the other operand over the group

The split is algebra on the declared equation; no target takes part in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from qdsl.diagnostic import Diagnostic, error
from qdsl.dtype import DType
from qdsl.expr import Binary, Expr, Negate, Number, Range, interval, names, of_codes, of_dtype, of_values, product
from qdsl.scheme import Gather, Group, Operand, Tensor, Var

WIDENED = "x.widened"  # the codes of x times their scales of groups, as 16-bit floats; no tensor is named so


@dataclass(frozen=True)
class Split:
    core: Expr
    fold: Expr | None
    promote: Expr | None
    epilogue: Expr | None
    correction: Expr | None
    offset: Expr | None  # what the correction is of fold * promote, where it is some of that: added to the core
    groups: tuple[int, ...]  # group sizes along k of fold, promote and correction
    gathered: bool  # some factor is found through an index tensor
    range: Range  # of the core
    exact: bool  # the core is exact in the compute type

    def __str__(self) -> str:
        parts = [f"core {self.core} in {self.range}{'' if self.exact else ' (rounded once)'}"]
        for name in ("fold", "promote", "epilogue", "correction"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name} {value}")
        if self.groups:
            parts.append(f"groups of {', '.join(map(str, self.groups))} along k")
        if self.gathered:
            parts.append("gathered along k")
        return "; ".join(parts)


def ranges(tensors: Mapping[str, Tensor]) -> Callable[[Expr], Range]:
    """The range of every tensor element, from its declared type, its constants or what it is computed by."""

    def of(e: Expr) -> Range:
        tensor = tensors.get(e.name)
        if tensor is None:
            return Range(-math.inf, math.inf, 0.0, math.inf)
        if isinstance(tensor.value, tuple):
            return of_values(tensor.dtype.round(np.array(tensor.value)))
        if isinstance(tensor.value, Expr) and tensor.dtype.is_integer:
            return of_codes(tensor.dtype, interval(tensor.value, of))
        return of_dtype(tensor.dtype)

    return of


def split(operand: Operand, compute: DType, given: str) -> Split | Diagnostic:
    """Split a decode equation; `given` is the operand's own name, "x" or "w".  Returns a diagnostic if it can't be."""
    tensors = {t.name: t for t in operand.tensors}

    def level(e: Expr) -> int:
        """2: varies with k; 1: constant in a group along k; 0: free of k."""
        found = 0
        for name in names(e):
            if name == given:
                return 2
            for index in tensors[name].index if name in tensors else ():
                if index == Var("k"):
                    return 2
                grouped = isinstance(index, Group) and index.axis == "k" and index.size is not None
                if grouped or isinstance(index, Gather):
                    found = 1
        return found

    constant: list[Expr] = []
    body = operand.decode
    while isinstance(body, Binary) and body.op in "+-" and 2 in (level(body.left), level(body.right)):
        # q * s + m: the term without k is a correction; (q - z) alone stays whole while it is exact.
        left, right = level(body.left), level(body.right)
        if left == right or interval(body, ranges(tensors)).fits(compute):
            break
        if right == 2:
            constant.append(body.left)
            body = body.right if body.op == "+" else Negate(body.right)
        else:
            constant.append(body.right if body.op == "+" else Negate(body.right))
            body = body.left

    factors: dict[int, list[Expr]] = {0: [], 1: [], 2: []}
    for factor in _factors(body):
        factors[level(factor)].append(factor)
    core = product(factors[2]) or Number(1)
    of = ranges(tensors)
    offsets: list[Expr] = []
    while not interval(core, of).fits(compute) and isinstance(core, Binary) and core.op in "+-":
        if level(core.right) < 2 == level(core.left):
            offsets.append(core.right if core.op == "+" else Negate(core.right))
            core = core.left
        elif level(core.left) < 2 == level(core.right):
            offsets.append(core.left)
            core = core.right if core.op == "+" else Negate(core.right)
        else:
            break
    inner: list[Expr] = []
    if offsets:  # what an offset hid inside the core: `(q * r + z) * s` multiplies q alone
        parts = _factors(core)
        core = product([f for f in parts if level(f) == 2]) or Number(1)
        inner = [f for f in parts if level(f) < 2]
    found = interval(core, of)
    exact = given in names(core) or found.fits(compute)
    if not exact and not (compute.is_float and compute.bits >= 16):
        return _inexact(core, found, compute, tensors)
    epilogue = factors[0]
    grouping = factors[1]
    if constant:  # these terms stand outside the product, so no factor can wait until after the sum
        grouping, epilogue = [*grouping, *epilogue], []
    offset = None if constant or inner else _sum(offsets)
    constant += [term for offset in offsets if (term := product([offset, *grouping]))]
    group, correction = product([*inner, *grouping]), _sum(constant)
    folds = compute.is_float and compute.bits >= 16
    grouped = [e for e in (group, correction) if e is not None]
    return Split(
        core,
        group if folds else None,
        None if folds else group,
        product(epilogue),
        correction,
        offset,
        _group_sizes(grouped, tensors),
        any(isinstance(i, Gather) for e in grouped for n in names(e) if n in tensors for i in tensors[n].index),
        found,
        exact,
    )


def _sum(terms: list[Expr]) -> Expr | None:
    return reduce(lambda left, right: Binary("+", left, right), terms) if terms else None


def _factors(e: Expr) -> list[Expr]:
    match e:
        case Binary(op="*"):
            return _factors(e.left) + _factors(e.right)
        case Binary(op="/"):
            return _factors(e.left) + [Binary("/", Number(1), factor) for factor in _factors(e.right)]
        case Negate():
            return [Number(-1), *_factors(e.arg)]
        case _:
            return [e]


def _group_sizes(parts: list[Expr], tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    sizes = {
        index.size
        for e in parts
        for name in names(e)
        if name in tensors
        for index in tensors[name].index
        if isinstance(index, Group) and index.axis == "k" and index.size is not None
    }
    return tuple(sorted(sizes))


def _inexact(core: Expr, found: Range, compute: DType, tensors: Mapping[str, Tensor]) -> Diagnostic:
    used = [tensors[n] for n in sorted(names(core)) if n in tensors]
    holds = of_dtype(compute)
    label = f"ranges over {found}, {compute} holds {holds}"
    if found.size <= holds.size and found.quantum >= holds.quantum:
        label = f"needs {found.bits:g} significant bits, {compute} has {compute.precision}"
    note = ", ".join(f"{t.name} is {t.dtype}" for t in used)
    wider = "f16" if found.size <= 65504 else "f32"
    return error(
        "inexact-operand", f"`{core}` does not fit the compute type", core.span, label,
        notes=[note] if note else (), fix=f"compute in {wider}, or cast explicitly: `{compute}({core})`",
    )  # fmt: skip
