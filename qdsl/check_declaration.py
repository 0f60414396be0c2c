"""What the blocks of a scheme declare, item by item: tensors, their indices and values, transforms of x.

`Declarations` turns each item into a `Tensor` or a `Transform`, and enters the tensors into the names in scope.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from qdsl import syntax as ast
from qdsl import transform
from qdsl.diagnostic import did_you_mean
from qdsl.dtype import I16, DType
from qdsl.expr import Binary, Call, Digits, Expr, Item, Number, Ref
from qdsl.reports import Reports
from qdsl.resolve import RESERVED, Names
from qdsl.scheme import AXES, Extent, Free, Gather, Group, Index, Tensor, Transform, Var

LARGEST = 65536  # literal extents and digits; more is a mistake, and would be allocated


@dataclass(frozen=True)
class Declarations:
    """The declarations of one file; `of_weight` are the names that its weight block declares."""

    reports: Reports
    names: Names
    of_weight: frozenset[str]

    def declare(self, decls: Iterable[ast.Decl], where: str) -> tuple[Tensor, ...]:
        """The tensors of one block (`where`: weight, activation or output), without those that failed."""
        tensors = []
        for d in decls:
            if (t := self.reports.attempt(self._tensor, d, where)) is not None:
                tensors.append(t)
            elif d.name not in self.names.tensors:
                self.names.broken.add(d.name)
        return tuple(tensors)

    def _tensor(self, d: ast.Decl, where: str) -> Tensor:
        if d.name in RESERVED:
            self.reports.fail(
                "reserved-name",
                f"`{d.name}` is reserved",
                d.name_span,
                "m, n, k, e are indices; x, w, acc, y are given",
            )
        if d.name in self.names.params:
            self.reports.fail("duplicate-name", f"`{d.name}` is a parameter already", d.name_span)
        dtype = self.names.dtype(d.type)
        extent = self._index(d.type.arg, where) if dtype.kind == "index" and d.type.arg is not None else None
        index = tuple(self._index(i, where) for i in d.index)
        self._check_role(d, dtype, index, where)
        value = self._value(d, dtype, where)
        tensor = Tensor(d.name, d.role, index, dtype, value, d.optional, extent, d.span)
        other = self.names.tensors.get(d.name)
        if other and not (where == "activation" and other == tensor and d.name not in self.of_weight):
            line = other.span.source.position(other.span.start)[0] if other.span else 0
            self.reports.fail(
                "duplicate-name", f"`{d.name}` is declared twice", d.name_span, f"first declared on line {line}"
            )
        self.names.tensors[d.name] = tensor
        return tensor

    def _check_role(self, d: ast.Decl, dtype: DType, index: tuple[Index, ...], where: str) -> None:
        """A tensor's role allows its type, its indices and its block."""
        computed = dtype == I16 and d.value is not None
        if d.role == "code" and (dtype.bits > 8 or dtype.kind == "index") and not computed:
            self.reports.fail(
                "bad-type",
                f"a code has at most 8 bits, `{d.type}` has {dtype.bits}",
                d.type.span,
                "wider values are scales or params; codes that are computed of x may be i16",
            )
        if dtype == I16 and d.role != "code":
            self.reports.fail("bad-type", f"a {d.role} can't be i16", d.type.span,
                              "only codes that are computed of x may; take i32 or a float")  # fmt: skip
        if (
            d.role == "code"
            and where == "weight"
            and index not in ((Var("n"), Var("k")), (Var("e"), Var("n"), Var("k")))
        ):
            self.reports.fail(
                "bad-index",
                "a weight code is indexed [n, k], or [e, n, k] for experts",
                d.span,
                "layouts may store it in any order",
            )
        if d.role == "code" and where == "activation" and index != (Var("m"), Var("k")):
            self.reports.fail("bad-index", "a code of x is indexed [m, k]", d.span, "every x has one")
        if where == "activation" and any(i.axis in ("n", "e") for i in index if isinstance(i, Var | Group)):
            self.reports.fail("bad-index", f"`{d.name}` can't depend on features of the weight", d.span,
                              "x is the same for all of them")  # fmt: skip
        if d.value is not None and (free := [i.name for i in index if isinstance(i, Free)]):
            self.reports.fail("bad-index", f"`{free[0]}` is not an index", d.span, "what is computed of x has m and k")
        if (d.role == "index") != (dtype.kind == "index"):
            self.reports.fail(
                "bad-type", "an index tensor, and only it, has type `idx(…)`", d.type.span, "e.g. `idx(k // 128)`"
            )
        if d.role in ("bias", "residual") and where != "output":
            self.reports.fail(
                "misplaced-declaration",
                f"`{d.role}` belongs to the output block",
                d.span,
                "declare it there, or as `param`",
            )
        if d.optional and where != "output":
            self.reports.fail(
                "misplaced-declaration",
                "only tensors of the output block can be optional",
                d.span,
                "drop the word, or write a second scheme",
            )
        tokens = where == "activation" or (where == "output" and d.role == "residual")
        for i in index:
            if (not tokens and i == Var("m")) or (not tokens and isinstance(i, Group) and i.axis == "m"):
                self.reports.fail("bad-index", f"`{d.name}` can't depend on m, the tokens", d.span,
                                  "weights and biases are the same for every token")  # fmt: skip

    def _value(self, d: ast.Decl, dtype: DType, where: str) -> Expr | tuple[float, ...] | None:
        """The entries of a table, the expression of a computed tensor, or None for a loaded one."""
        if isinstance(d.value, tuple):
            size = self._index(d.index[0], where) if len(d.index) == 1 else None
            if d.role != "table" or not isinstance(size, Extent):
                self.reports.fail(
                    "bad-table",
                    "constants need a table with one literal extent",
                    d.span,
                    "e.g. `table c[16] : f16 = {…}`",
                )
            if size.size != len(d.value):
                self.reports.fail(
                    "table-size",
                    f"`{d.name}` declares {size.size} entries and lists {len(d.value)}",
                    d.span,
                    f"write `{d.name}[{len(d.value)}]`",
                )
            for v in d.value:
                if not math.isfinite(float(dtype.round(np.float64(v.value)))) or abs(v.value) > dtype.max:
                    self.reports.fail("bad-table", f"`{v}` is no {dtype}", v.span, f"{dtype} ends at {dtype.max:g}")
            return tuple(float(v.value) for v in d.value)
        if d.role == "table" and d.value is not None:
            self.reports.fail("bad-table", "a table lists constants in braces or is loaded", d.span)
        if d.value is None:
            return None
        if where != "activation":
            self.reports.fail("computed-weight", f"`{d.name}` can't be computed here", d.span,
                              "weights are loaded; how to make them from floats belongs to `quantize`")  # fmt: skip
        return self.names.expr(d.value, {"x": None, **self.names.tensors}, reductions=True)

    def _index(self, e: Expr, where: str) -> Index:
        """What one place in a tensor's brackets ranges over."""
        match e:
            case Number(value) if isinstance(value, int) and value > 0:
                if value > LARGEST:
                    self.reports.fail(
                        "bad-extent", f"`{value}` is too large for a literal extent", e.span, f"at most {LARGEST}"
                    )
                return Extent(value)
            case Ref(name) if name in AXES:
                return Var(name)
            case Ref(name) if name in self.names.tensors and self.names.tensors[name].dtype.kind == "index":
                return Gather(name)
            case Ref(name) if isinstance(self.names.params.get(name), int):
                return Extent(self.names.params[name])  # type: ignore[arg-type]
            case Ref(name) if where == "activation":
                return Free(name)
            case Binary("//", Ref(axis), right) if axis in AXES:
                size = self.names.expr(right, {"k": None})
                if size == Ref(axis):
                    return Group(axis, None)
                if isinstance(size, Number) and isinstance(size.value, int) and size.value > 0:
                    return Group(axis, size.value)
                self.reports.fail(
                    "bad-index",
                    f"`{right}` is no group size",
                    right.span,
                    "a positive whole number, or the axis itself",
                )
            case Binary("/", left, right):
                self.reports.fail(
                    "wrong-division", "an index uses floor division", e.span, f"write `{left} // {right}`"
                )
            case Ref(name):
                self.names.give_up_on(name)
                label = did_you_mean(name, [*AXES, *self.names.tensors])
                if name in self.of_weight and name not in self.names.tensors:
                    label = f"declare `{name}` above what it is an index of"
                self.reports.fail("bad-index", f"`{name}` is not an index", e.span, label)
        self.reports.fail(
            "bad-index", f"`{e}` is not an index", e.span, "an axis, `axis // size`, a number, or an index tensor"
        )

    def transform(self, eq: ast.Equation) -> Transform:
        """`x[…] = …`: x times loaded tensors, summed over the digits that the left side lacks."""
        if eq.name != "x":
            self.reports.fail("wrong-left-side", "only x can be transformed", eq.name_span, "write `x[m, …]`")
        places = tuple(p.names if isinstance(p, Digits) else p.name for p in eq.places or ())
        if not places or places[0] != "m" or len(places) != 2:
            self.reports.fail(
                "bad-index", "a transform defines x at a token and a feature", eq.span, "`x[m, k]` or `x[m, (c d)]`"
            )
        left = {n for p in places for n in (p if isinstance(p, tuple) else (p,))}
        summed = isinstance(eq.value, Call) and eq.value.name == "sum" and len(eq.value.args) == 1
        right: set[str] = set()
        factors = _product(eq.value.args[0] if summed else eq.value)
        for f in factors:
            right |= self._transform_digits(f)
        if sum(f.name == "x" for f in factors) != 1:
            self.reports.fail("bad-transform", "a transform multiplies x once", eq.value.span)
        if lost := sorted(left - right):
            self.reports.fail("bad-transform", f"no tensor on the right has the digit `{lost[0]}`", eq.value.span)
        if bool(right - left) != summed:
            extra = ", ".join(f"`{n}`" for n in sorted(right - left))
            what = f"{extra} must be summed over" if extra else "there is nothing to sum over"
            self.reports.fail(
                "bad-transform", what, eq.value.span, "`sum(…)` runs over the digits that the left side lacks"
            )
        return self._sized(Transform(places, eq.value), eq)

    def _sized(self, found: Transform, eq: ast.Equation) -> Transform:
        """The transform, if the extents of all its digits follow from its tensors."""
        parts = transform.factors(found)
        (x,) = (f for f in parts if f.name == "x")
        if x.index[0] != ("m",) or any("m" in (f.digits[1:] if f is x else f.digits) for f in parts):
            self.reports.fail("bad-transform", "a transform treats every token alike", eq.value.span,
                              "m is the first index of x, and of nothing else")  # fmt: skip
        for digits in (x.digits, ("m", *transform.result(found))):
            if twice := [d for d in digits if digits.count(d) > 1]:
                self.reports.fail("bad-transform", f"`{twice[0]}` stands for two digits of x", eq.span,
                                  "give each a name of its own")  # fmt: skip
        try:
            transform.solved(found)
        except ValueError as problem:
            self.reports.fail("bad-transform", str(problem), eq.value.span,
                              "a loaded tensor has it as an index, or it is what one index of x leaves")  # fmt: skip
        return found

    def _transform_digits(self, factor: Expr) -> set[str]:
        """The digits of one indexed tensor of a transform."""
        example = "e.g. `sum(left[i, c] * x[m, (i j)] * right[j, d])`"
        if isinstance(factor, Item):
            self.names.give_up_on(factor.name)
        if not isinstance(factor, Item) or not all(isinstance(a, Ref | Digits) for a in factor.args):
            self.reports.fail("bad-transform", "a transform is a product of indexed tensors", factor.span, example)
        tensor = self.names.tensors.get(factor.name)
        if factor.name != "x" and (tensor is None or not tensor.loaded):
            self.reports.fail("bad-transform", f"`{factor.name}` is neither x nor loaded in this block", factor.span,
                              f"declare it first: `param {factor}: f32`".replace("]:", "] :"))  # fmt: skip
        rank = len(tensor.index) if tensor else 2
        if len(factor.args) != rank:
            self.reports.fail("rank", f"`{factor.name}` has {rank} indices, here {len(factor.args)}", factor.span)
        return {n for a in factor.args for n in (a.names if isinstance(a, Digits) else (a.name,))}


def _product(e: Expr) -> list[Expr]:
    """The factors of a product."""
    return _product(e.left) + _product(e.right) if isinstance(e, Binary) and e.op == "*" else [e]
