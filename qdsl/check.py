"""Syntax to scheme: binds parameters, resolves every name and type, and collects every mistake before raising.

`check(file, params)` returns a `Scheme` or raises one `SchemeError` with all diagnostics in file order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from qdsl import dtype as dtypes
from qdsl import syntax as ast
from qdsl.diagnostic import Diagnostic, SchemeError, Span, did_you_mean, error
from qdsl.dtype import DType
from qdsl.expr import (
    FUNCTIONS,
    REDUCTIONS,
    Binary,
    Call,
    Cast,
    Digits,
    Expr,
    Half,
    Item,
    Negate,
    Number,
    Ref,
    Stored,
    constant,
    names,
    substitute,
    walk,
)
from qdsl.layout import Axis, Digit, Lane, Layout, Run
from qdsl.printer import print_file
from qdsl.scheme import (
    AXES,
    COMPARE,
    Activation,
    Binding,
    Compute,
    Extent,
    Free,
    Gather,
    Group,
    Hints,
    Index,
    Operand,
    Output,
    Requirement,
    Scheme,
    Storage,
    Tensor,
    Transform,
    Var,
)
from qdsl.split import split

GIVEN = ("x", "w", "acc", "y")
RESERVED = (*AXES, *GIVEN)
_LARGEST = 65536  # literal extents and digits; more is a mistake, and would be allocated
_LONGEST = 4096  # elements of one run of words
HINTS = ("tile", "stages", "warps", "split_k")


def check(file: ast.File, params: Mapping[str, object] | None = None) -> Scheme:
    """The scheme that `file` declares, with `params` (name to number, type name or "k") over the defaults."""
    return _Checker(file).scheme(dict(params or {}))


class _FailedError(Exception):
    """This construct is already reported; give up on it and go on with the next."""


class _Checker:
    def __init__(self, file: ast.File):
        self.file = file
        self.errors: list[Diagnostic] = []
        self.params: dict[str, int | str | DType] = {}
        self.tensors: dict[str, Tensor] = {}
        self.free: set[str] = set()
        self.broken: set[str] = set()  # tensors whose declaration failed: using them is no second mistake

    # ---- reporting ----------------------------------------------------------------------------------------------
    def report(self, *args, **kwargs) -> None:
        self.errors.append(error(*args, **kwargs))

    def fail(self, *args, **kwargs):
        self.report(*args, **kwargs)
        raise _FailedError

    def attempt(self, f, *args, default=None):
        try:
            return f(*args)
        except _FailedError:
            return default

    def finish(self) -> None:
        if self.errors:
            ordered = sorted(dict.fromkeys(self.errors), key=lambda d: d.span.start if d.span else -1)
            raise SchemeError(ordered)

    # ---- the whole file -----------------------------------------------------------------------------------------
    def scheme(self, given: dict[str, object]) -> Scheme:
        self.bind(given)
        weight_block = self.block(ast.Weight, "weight")
        compute_block = self.block(ast.Compute, "compute")
        output_block = self.block(ast.Output, "output")
        self.finish()
        assert weight_block and compute_block and output_block, "finish() raises when a block is missing"
        compute = Compute(
            self.attempt(self.dtype, compute_block.operand), self.attempt(self.dtype, compute_block.accumulator)
        )
        weight = self.weight(weight_block)
        activations = tuple(a for b in self.blocks(ast.Activation) if (a := self.activation(b)))
        output = self.output(output_block)
        self.phases()
        quantize = self.quantize()
        requires = tuple(r for b in self.blocks(ast.Require) if (r := self.attempt(self.requirement, b)))
        hints = tuple(h for b in self.blocks(ast.Schedule) if (h := self.attempt(self.hints, b)))
        layouts = self.layouts()
        self.finish()
        scheme = Scheme(
            self.file.name, self.file.doc, self.params, weight, activations, compute, output, quantize, layouts,
            hints, requires, print_file(self.file),
        )  # fmt: skip
        self.compute(scheme, compute_block)
        self.finish()
        return scheme

    def blocks(self, kind: type) -> list:
        return [b for b in self.file.items if isinstance(b, kind)]

    def block(self, kind: type, keyword: str):
        found = self.blocks(kind)
        if not found:
            self.report("missing-block", f"the scheme has no `{keyword}` block", self.file.name_span,
                        "every scheme needs weight, compute and output")  # fmt: skip
            return None
        for extra in found[1:]:
            head = Span(extra.span.source, extra.span.start, extra.span.start + len(keyword))
            self.report("duplicate-block", f"a second `{keyword}` block", head, "only one is allowed")
        return found[0]

    # ---- parameters ---------------------------------------------------------------------------------------------
    def bind(self, given: dict[str, object]) -> None:
        declared = {p.name: p for p in self.file.params}
        for name, count in Counter(p.name for p in self.file.params).items():
            if count > 1 or name in RESERVED:
                what = "declared twice" if count > 1 else "reserved"
                self.report(
                    "duplicate-name", f"parameter `{name}` is {what}", declared[name].span, "choose another name"
                )
        for name in given:
            if name not in declared:
                label = did_you_mean(name, declared) if declared else "the scheme has no parameters"
                self.report(
                    "unknown-parameter", f"`{self.file.name}` has no parameter `{name}`", self.file.name_span, label
                )
        for p in self.file.params:
            value = self.attempt(self.parameter, p, given.get(p.name))
            if value is not None:
                self.params[p.name] = value

    def parameter(self, p: ast.Param, given: object) -> int | str | DType:
        if p.kind == "type":
            if given is None:
                return self.dtype(p.default)
            if isinstance(given, DType):
                return given
            found = dtypes.find(str(given))
            return found or self.bad_parameter(p, given, f"`{given}` is not a number format")
        if given is None:
            if isinstance(p.default, Ref) and p.default.name == "k" and p.kind == "dim":
                return "k"
            given = constant(self.expr(p.default, {}))
        if p.kind == "dim" and given in ("k", "-1", -1, -1.0):
            return "k"
        try:
            value = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not value.is_integer() or (p.kind == "dim" and value < 1):
            legal = "a positive whole number, or k for one group over all of k" if p.kind == "dim" else "a whole number"
            self.bad_parameter(p, given, f"`{p.name}` is {legal}")
        return int(value)

    def bad_parameter(self, p: ast.Param, given: object, label: str):
        self.fail("bad-parameter", f"`{given}` is no value for parameter `{p.name}`", p.span, label)

    # ---- types --------------------------------------------------------------------------------------------------
    def dtype(self, t: ast.TypeRef) -> DType:
        if isinstance(value := self.params.get(t.name), DType) and t.arg is None:
            return value
        if t.name == "idx":
            if t.arg is None:
                self.fail("bad-type", "`idx` needs the axis it points into", t.span, "e.g. `idx(k // 128)`")
            return dtypes.INDEX
        if t.name in ("u", "i") and t.arg is not None:
            bits = constant(self.expr(t.arg, {}))
            whole = bits is not None and bits.is_integer()
            found = dtypes.find(f"{t.name}{int(bits)}") if whole else None
            return found or self.fail(
                "bad-type", f"`{t.name}({t.arg})` is not a number format", t.span,
                f"{'u1 to u8' if t.name == 'u' else 'i2 to i8'}" + (f"; here {t.arg} = {bits:g}" if names(t.arg) else ""),
            )  # fmt: skip
        if t.arg is not None:
            self.fail("bad-type", f"`{t.name}` takes no argument", t.span, "only u(bits), i(bits) and idx(extent) do")
        if found := dtypes.find(t.name):
            return found
        types = [name for name, v in self.params.items() if isinstance(v, DType)]
        return self.fail(
            "unknown-type", f"unknown type `{t.name}`", t.span, did_you_mean(t.name, [*dtypes.NAMES, *types])
        )

    def stored_dtype(self, t: ast.TypeRef) -> DType:
        if t.arg is None and (word := dtypes.WORDS.get(t.name)):
            return word
        return self.dtype(t)

    # ---- expressions --------------------------------------------------------------------------------------------
    def expr(self, e: Expr, known: Mapping[str, object], *, reductions: bool = False) -> Expr:
        """Resolve names (parameters become numbers, type names become casts) and fold constants."""
        resolved = self.resolve(e, known, reductions)
        return self.fold(resolved)

    def fold(self, e: Expr) -> Expr:
        e = e.map(self.fold)
        if isinstance(e, Binary) and e.op in ("/", "//", "%") and e.right == Number(0):
            self.fail("bad-number", f"`{e}` divides by zero", e.right.span)
        if isinstance(e, Number) or any(isinstance(x, Ref | Item | Stored) for x in walk(e)):
            return e
        value = constant(e)
        if value is None or isinstance(e, Half):
            return e
        if not math.isfinite(value):
            self.fail("bad-number", f"`{e}` is not a finite number", e.span, f"it is {value:g}")
        return Number(int(value) if value.is_integer() else value, span=e.span)

    def resolve(self, e: Expr, known: Mapping[str, object], reductions: bool) -> Expr:
        match e:
            case Ref(name):
                if name in known:
                    self.check_value(e)
                    return e
                value = self.params.get(name)
                if isinstance(value, int):
                    return Number(value, span=e.span)
                if value == "k" and "k" in known:
                    return Ref("k", span=e.span)
                self.give_up_on(name)
                legal = [*known, *(n for n, v in self.params.items() if not isinstance(v, DType))]
                self.fail("unknown-name", f"unknown name `{name}`", e.span, did_you_mean(name, legal))
            case ast.Store() | ast.Words():
                self.fail("misplaced-store", f"`{e}` can't be used here", e.span, "stored names belong to layouts")
            case Digits() | Half():
                what = "digits belong to a transform" if isinstance(e, Digits) else "`half` declares such parts of acc"
                self.fail("bad-index", f"`{e}` can't be used here", e.span, what)
            case Item("acc", (Half(),)) if "acc" in known:
                return e
            case Item(name, args):
                if name not in known:
                    self.give_up_on(name)
                    self.fail("unknown-name", f"unknown name `{name}`", e.span, did_you_mean(name, known))
                tensor = self.tensors.get(name)
                if tensor is None or tensor.role != "table":
                    self.fail(
                        "not-a-table", f"`{name}` is not a table", e.span, "bare names stand for their own element"
                    )
                if len(args) != 1:
                    self.fail("wrong-arguments", f"table `{name}` takes one code", e.span, f"got {len(args)}")
                return replace(e, args=tuple(self.resolve(a, known, reductions) for a in args))
            case Call(name, args):
                return self.call(e, name, args, known, reductions)
            case _:
                return e.map(lambda child: self.resolve(child, known, reductions))

    def give_up_on(self, name: str) -> None:
        if name in self.broken:
            raise _FailedError

    def check_value(self, e: Ref) -> None:
        """A bare name must have one value: tables need a code, and an index is a position."""
        role = self.tensors[e.name].role if e.name in self.tensors else ""
        if role == "table":
            self.fail("table-without-code", f"table `{e.name}` needs a code", e.span, f"e.g. `{e.name}[q]`")
        if role == "index":
            self.fail(
                "not-a-value", f"`{e.name}` is an index, not a value", e.span, "it can stand in brackets: `s[n, g]`"
            )

    def call(self, e: Call, name: str, args: tuple[Expr, ...], known: Mapping[str, object], reductions: bool) -> Expr:
        param = self.params.get(name)
        cast = param if isinstance(param, DType) else dtypes.find(name)
        if cast is not None:
            if len(args) != 1:
                self.fail("wrong-arguments", f"a cast to `{name}` takes one value", e.span, f"got {len(args)}")
            return Cast(cast, self.resolve(args[0], known, reductions), span=e.span)
        if name in ("max", "min") and len(args) == 1 and isinstance(args[0], Ref):
            type_name = args[0].name
            value = self.params.get(type_name)
            limit = value if isinstance(value, DType) else dtypes.find(type_name)
            if limit is not None:
                return Number(getattr(limit, name), span=e.span)
        if name == "ones" and len(args) == 1:
            bits = constant(self.expr(args[0], known))
            if bits in (2, 4, 8):
                return Number(sum(1 << at for at in range(0, 32, int(bits))), span=e.span)
            self.fail("wrong-arguments", "`ones(b)` sets every b-th bit of a 32-bit word", e.span, "b is 2, 4 or 8")
        if name in REDUCTIONS:
            if not reductions:
                self.fail("misplaced-reduction", f"`{name}` can't be used here", e.span,
                          "reductions belong to `quantize` and to computed activation tensors")  # fmt: skip
            count = 1
        elif name in FUNCTIONS:
            count = FUNCTIONS[name][1]
        else:
            self.fail(
                "unknown-function", f"unknown function `{name}`", e.span, did_you_mean(name, [*FUNCTIONS, *REDUCTIONS])
            )
        if len(args) != count:
            self.fail("wrong-arguments", f"`{name}` takes {count} value{'s' * (count > 1)}", e.span, f"got {len(args)}")
        return replace(e, args=tuple(self.resolve(a, known, reductions) for a in args))

    # ---- declarations -------------------------------------------------------------------------------------------
    def declare(self, decls: Iterable[ast.Decl], where: str) -> tuple[Tensor, ...]:
        tensors = []
        for d in decls:
            if (t := self.attempt(self.tensor, d, where)) is not None:
                tensors.append(t)
            elif d.name not in self.tensors:
                self.broken.add(d.name)
        return tuple(tensors)

    def tensor(self, d: ast.Decl, where: str) -> Tensor:
        if d.name in RESERVED:
            self.fail(
                "reserved-name",
                f"`{d.name}` is reserved",
                d.name_span,
                "m, n, k, e are indices; x, w, acc, y are given",
            )
        if d.name in self.params:
            self.fail("duplicate-name", f"`{d.name}` is a parameter already", d.name_span)
        dtype = self.dtype(d.type)
        extent = self.index(d.type.arg, where) if dtype.kind == "index" and d.type.arg is not None else None
        index = tuple(self.index(i, where) for i in d.index)
        self.check_role(d, dtype, index, where)
        value = self.value(d, dtype, where)
        tensor = Tensor(d.name, d.role, index, dtype, value, d.optional, extent, d.span)
        other = self.tensors.get(d.name)
        if other and not (where == "activation" and other == tensor and not self.in_weight(d.name)):
            line = other.span.source.position(other.span.start)[0] if other.span else 0
            self.fail("duplicate-name", f"`{d.name}` is declared twice", d.name_span, f"first declared on line {line}")
        self.tensors[d.name] = tensor
        return tensor

    def check_role(self, d: ast.Decl, dtype: DType, index: tuple[Index, ...], where: str) -> None:
        if d.role == "code" and (dtype.bits > 8 or dtype.kind == "index"):
            self.fail(
                "bad-type",
                f"a code has at most 8 bits, `{d.type}` has {dtype.bits}",
                d.type.span,
                "wider values are scales or params",
            )
        if (
            d.role == "code"
            and where == "weight"
            and index not in ((Var("n"), Var("k")), (Var("e"), Var("n"), Var("k")))
        ):
            self.fail(
                "bad-index",
                "a weight code is indexed [n, k], or [e, n, k] for experts",
                d.span,
                "layouts may store it in any order",
            )
        if (d.role == "index") != (dtype.kind == "index"):
            self.fail(
                "bad-type", "an index tensor, and only it, has type `idx(…)`", d.type.span, "e.g. `idx(k // 128)`"
            )
        if d.role in ("bias", "residual") and where != "output":
            self.fail(
                "misplaced-declaration",
                f"`{d.role}` belongs to the output block",
                d.span,
                "declare it there, or as `param`",
            )
        if d.optional and where != "output":
            self.fail(
                "misplaced-declaration",
                "only tensors of the output block can be optional",
                d.span,
                "drop the word, or write a second scheme",
            )
        tokens = where == "activation" or (where == "output" and d.role == "residual")
        for i in index:
            if (not tokens and i == Var("m")) or (not tokens and isinstance(i, Group) and i.axis == "m"):
                self.fail("bad-index", f"`{d.name}` can't depend on m, the tokens", d.span,
                          "weights and biases are the same for every token")  # fmt: skip

    def value(self, d: ast.Decl, dtype: DType, where: str) -> Expr | tuple[float, ...] | None:
        if isinstance(d.value, tuple):
            size = self.index(d.index[0], where) if len(d.index) == 1 else None
            if d.role != "table" or not isinstance(size, Extent):
                self.fail(
                    "bad-table",
                    "constants need a table with one literal extent",
                    d.span,
                    "e.g. `table c[16] : f16 = {…}`",
                )
            if size.size != len(d.value):
                self.fail(
                    "table-size",
                    f"`{d.name}` declares {size.size} entries and lists {len(d.value)}",
                    d.span,
                    f"write `{d.name}[{len(d.value)}]`",
                )
            for v in d.value:
                if not math.isfinite(float(dtype.round(np.float64(v.value)))) or abs(v.value) > dtype.max:
                    self.fail("bad-table", f"`{v}` is no {dtype}", v.span, f"{dtype} ends at {dtype.max:g}")
            return tuple(float(v.value) for v in d.value)
        if d.role == "table" and d.value is not None:
            self.fail("bad-table", "a table lists constants in braces or is loaded", d.span)
        if d.value is None:
            return None
        if where != "activation":
            self.fail("computed-weight", f"`{d.name}` can't be computed here", d.span,
                      "weights are loaded; how to make them from floats belongs to `quantize`")  # fmt: skip
        return self.expr(d.value, {"x": None, **self.tensors}, reductions=True)

    def index(self, e: Expr, where: str) -> Index:
        match e:
            case Number(value) if isinstance(value, int) and value > 0:
                if value > _LARGEST:
                    self.fail(
                        "bad-extent", f"`{value}` is too large for a literal extent", e.span, f"at most {_LARGEST}"
                    )
                return Extent(value)
            case Ref(name) if name in AXES:
                return Var(name)
            case Ref(name) if name in self.tensors and self.tensors[name].dtype.kind == "index":
                return Gather(name)
            case Ref(name) if isinstance(self.params.get(name), int):
                return Extent(self.params[name])  # type: ignore[arg-type]
            case Ref(name) if where == "activation":
                self.free.add(name)
                return Free(name)
            case Binary("//", Ref(axis), right) if axis in AXES:
                size = self.expr(right, {"k": None})
                if size == Ref(axis):
                    return Group(axis, None)
                if isinstance(size, Number) and isinstance(size.value, int) and size.value > 0:
                    return Group(axis, size.value)
                self.fail(
                    "bad-index",
                    f"`{right}` is no group size",
                    right.span,
                    "a positive whole number, or the axis itself",
                )
            case Binary("/", left, right):
                self.fail("wrong-division", "an index uses floor division", e.span, f"write `{left} // {right}`")
            case Ref(name):
                self.give_up_on(name)
                self.fail("bad-index", f"`{name}` is not an index", e.span, did_you_mean(name, [*AXES, *self.tensors]))
        self.fail(
            "bad-index", f"`{e}` is not an index", e.span, "an axis, `axis // size`, a number, or an index tensor"
        )
        raise AssertionError("unreachable")

    # ---- operands and output ------------------------------------------------------------------------------------
    def weight(self, block: ast.Weight) -> Operand:
        tensors = self.declare(block.decls, "weight")
        if not any(t.role == "code" for t in tensors) and not self.errors:
            self.report(
                "missing-code",
                "the weight has no code tensor",
                block.decode.span,
                "declare one, e.g. `code q[n, k] : u4`",
            )
        return Operand(tensors, self.attempt(self.decode, block.decode, "w", tensors) or Ref("w"))

    def decode(self, eq: ast.Equation, left: str, tensors: tuple[Tensor, ...]) -> Expr:
        if eq.name != left:
            self.fail(
                "wrong-left-side",
                f"this block approximates `{left}`, not `{eq.name}`",
                eq.name_span,
                f"write `{left} ~ …`",
            )
        known = {t.name: t for t in tensors} | ({"x": None} if left == "x" else {})
        return self.expr(eq.value, known)

    def activation(self, block: ast.Activation) -> Activation | None:
        before = dict(self.tensors)
        # What another phase computes is its own; what it loads may serve this phase too, declared alike.
        self.tensors = {name: t for name, t in before.items() if not isinstance(t.value, Expr)}
        tensors: list[Tensor] = []
        transforms: list[Transform] = []
        for item in block.decls:
            if isinstance(item, ast.Decl):
                if any(t.name == item.name for t in tensors):
                    self.report("duplicate-name", f"`{item.name}` is declared twice", item.name_span, "in this block")
                tensors += self.declare([item], "activation")
            elif (t := self.attempt(self.transform, item)) is not None:
                transforms.append(t)
        decode = self.attempt(self.decode, block.decode, "x", tuple(tensors))
        if decode is not None and "x" in names(decode) and any(t.role == "code" for t in tensors):
            self.report(
                "wrong-left-side", "x is approximated by its codes, so it can't appear on the right", block.decode.span
            )
        self.tensors = {**before, **{t.name: t for t in tensors}}
        return (
            Activation(block.name, Operand(tuple(tensors), decode), tuple(transforms)) if decode is not None else None
        )

    def transform(self, eq: ast.Equation) -> Transform:
        if eq.name != "x":
            self.fail("wrong-left-side", "only x can be transformed", eq.name_span, "write `x[m, …]`")
        places = tuple(p.names if isinstance(p, Digits) else p.name for p in eq.places or ())
        if not places or places[0] != "m" or len(places) != 2:
            self.fail(
                "bad-index", "a transform defines x at a token and a feature", eq.span, "`x[m, k]` or `x[m, (c d)]`"
            )
        left = {n for p in places for n in (p if isinstance(p, tuple) else (p,))}
        summed = isinstance(eq.value, Call) and eq.value.name == "sum" and len(eq.value.args) == 1
        right: set[str] = set()
        factors = _product(eq.value.args[0] if summed else eq.value)
        for f in factors:
            right |= self.transform_digits(f)
        if sum(f.name == "x" for f in factors) != 1:
            self.fail("bad-transform", "a transform multiplies x once", eq.value.span)
        if lost := sorted(left - right):
            self.fail("bad-transform", f"no tensor on the right has the digit `{lost[0]}`", eq.value.span)
        if bool(right - left) != summed:
            extra = ", ".join(f"`{n}`" for n in sorted(right - left))
            what = f"{extra} must be summed over" if extra else "there is nothing to sum over"
            self.fail("bad-transform", what, eq.value.span, "`sum(…)` runs over the digits that the left side lacks")
        return Transform(places, eq.value)

    def transform_digits(self, factor: Expr) -> set[str]:
        """The digits of one indexed tensor of a transform."""
        example = "e.g. `sum(left[i, c] * x[m, (i j)] * right[j, d])`"
        if isinstance(factor, Item):
            self.give_up_on(factor.name)
        if not isinstance(factor, Item) or not all(isinstance(a, Ref | Digits) for a in factor.args):
            self.fail("bad-transform", "a transform is a product of indexed tensors", factor.span, example)
        tensor = self.tensors.get(factor.name)
        if factor.name != "x" and (tensor is None or not tensor.loaded):
            self.fail("bad-transform", f"`{factor.name}` is neither x nor loaded in this block", factor.span,
                      f"declare it first: `param {factor}: f32`".replace("]:", "] :"))  # fmt: skip
        rank = len(tensor.index) if tensor else 2
        if len(factor.args) != rank:
            self.fail("rank", f"`{factor.name}` has {rank} indices, here {len(factor.args)}", factor.span)
        return {n for a in factor.args for n in (a.names if isinstance(a, Digits) else (a.name,))}

    def output(self, block: ast.Output) -> Output:
        dtype = self.attempt(self.dtype, block.type) or dtypes.F32
        tensors = self.declare(block.decls, "output")
        half = None
        if block.half is not None:
            extents = [d.extent for d in block.half.digits]
            if block.half.name != "n" or len(extents) != 2 or not isinstance(extents[0], int) or extents[1] is not None:
                self.report(
                    "bad-half",
                    "`half` splits n into a counted digit and the rest",
                    block.half.span,
                    "`half n = (r:2 j)`",
                )
            else:
                half = (block.half.digits[0].name, extents[0])
        known: dict[str, object] = {"acc": None, **{t.name: t for t in tensors}, **self.outside_the_sum()}
        value: Expr = Ref("acc")
        local: dict[str, Expr] = {}
        for eq in block.equations:
            if eq.name in self.tensors or eq.name in ("acc", "x", "w"):
                self.report("duplicate-name", f"`{eq.name}` has a value already", eq.name_span, "choose another name")
            place = "n" if block.half is None else block.half.digits[-1].name
            if eq.places is not None and eq.places != (Ref("m"), Ref(place)):
                self.report("bad-index", f"the output block defines elements [m, {place}]", eq.span)
            resolved = self.attempt(self.output_value, eq, known)
            if resolved is None:
                continue
            value = local[eq.name] = substitute(resolved, local)
            known[eq.name] = None
            self.attempt(self.check_halves, value, half)
        if block.equations and block.equations[-1].name != "y":
            last = block.equations[-1]
            self.report("wrong-left-side", "the output block must end by defining `y`", last.name_span, "write `y = …`")
        return Output(dtype, tensors, value, half)

    def outside_the_sum(self) -> dict[str, Tensor]:
        """Scales and zeros of the operands that the output may use: free of k, and there in every phase."""
        phases = [{d.name for d in b.decls if isinstance(d, ast.Decl)} for b in self.blocks(ast.Activation)]
        shared = set.intersection(*phases) if phases else set()
        return {
            name: t
            for name, t in self.tensors.items()
            if (self.in_weight(name) or name in shared)
            and t.role in ("scale", "zero", "param")
            and not any(i in (Var("k"), Var("e")) or isinstance(i, Gather | Free) or _grouped(i) for i in t.index)
        }

    def output_value(self, eq: ast.Equation, known: Mapping[str, object]) -> Expr:
        for node in walk(eq.value):
            if isinstance(node, Ref) and node.name in self.tensors and node.name not in known:
                self.fail("inside-the-sum", f"`{node.name}` can't be used on the finished sum", node.span,
                          "only scales and zeros that do not depend on k, in every phase, can")  # fmt: skip
        return self.expr(eq.value, known)

    def check_halves(self, value: Expr, half: tuple[str, int] | None) -> None:
        for node in walk(value):
            if isinstance(node, Item) and node.name == "acc" and half is None:
                self.fail("bad-half", "acc has no parts here", node.span, "`half n = (r:2 j)` splits the features")
            if isinstance(node, Half) and half and (node.digit != half[0] or not 0 <= node.value < half[1]):
                self.fail("bad-half", f"`{node}` is no part of `{half[0]}:{half[1]}`", node.span,
                          f"`{half[0]} = 0` to `{half[0]} = {half[1] - 1}`")  # fmt: skip
            if isinstance(node, Ref) and node.name == "acc" and half:
                self.fail("bad-half", "with `half`, say which part of acc", node.span, f"e.g. `acc[{half[0]} = 0]`")

    def phases(self) -> None:
        blocks = self.blocks(ast.Activation)
        for name, count in Counter(b.name for b in blocks).items():
            if count > 1:
                block = [b for b in blocks if b.name == name][1]
                head = Span(block.span.source, block.span.start, block.span.start + len("activation"))
                self.report("duplicate-block", f"a second activation block{f' `{name}`' if name else ''}", head,
                            "give each phase a name of its own")  # fmt: skip
        if len(blocks) > 1 and any(not b.name for b in blocks):
            self.report(
                "duplicate-block", "several activation blocks need names", blocks[0].span, "`activation prefill {…}`"
            )

    # ---- quantize, require, schedule ----------------------------------------------------------------------------
    def quantize(self) -> tuple[tuple[str, Expr], ...]:
        blocks = self.blocks(ast.Quantize)
        if not blocks:
            return ()
        block = self.block(ast.Quantize, "quantize")
        weights = {n: t for n, t in self.tensors.items() if t.loaded and self.in_weight(n)}
        known: dict[str, object] = {"w": None}
        local: dict[str, Expr] = {}
        result = []
        for eq in block.equations:
            value = self.attempt(
                lambda eq=eq: self.expr(eq.value, {**known, **dict.fromkeys(self.constants())}, reductions=True)
            )
            if value is None:
                continue
            if eq.name in RESERVED:
                self.report("reserved-name", f"`{eq.name}` is reserved", eq.name_span, "choose another name")
            if eq.places is not None:
                self.report("bad-index", "a quantize equation defines a whole tensor", eq.span, f"`{eq.name} = …`")
            if eq.name in weights:
                result.append((eq.name, substitute(value, local)))
            else:
                local[eq.name] = substitute(value, local)
            known[eq.name] = None
        missing = [n for n in weights if n not in dict(result) and weights[n].role != "index"]
        if missing and not self.errors:
            head = Span(block.span.source, block.span.start, block.span.start + len("quantize"))
            what = f"`quantize` does not say how to make {', '.join(f'`{n}`' for n in missing)}"
            self.report("quantize-incomplete", what, head, f"add `{missing[0]} = …`")
        return tuple(result)

    def in_weight(self, name: str) -> bool:
        return any(d.name == name for b in self.blocks(ast.Weight) for d in b.decls)

    def constants(self) -> list[str]:
        return [n for n, t in self.tensors.items() if isinstance(t.value, tuple)]

    def requirement(self, block: ast.Require) -> Requirement:
        known = {"n": None, "k": None}
        return Requirement(self.expr(block.left, known), block.op, self.expr(block.right, known), block.span)

    def hints(self, block: ast.Schedule) -> Hints:
        condition = None
        if block.condition:
            left, op, right = block.condition
            known = {"m": None, "n": None, "k": None}
            condition = Requirement(self.expr(left, known), op, self.expr(right, known), block.span)
        choices = {}
        for hint in block.hints:
            if hint.name not in HINTS:
                self.report("unknown-hint", f"unknown hint `{hint.name}`", hint.span, did_you_mean(hint.name, HINTS))
            choices[hint.name] = tuple(self.choice(c) for c in hint.choices)
        return Hints(block.target, condition, choices, block.span)

    def choice(self, c) -> int | tuple[int, ...]:
        if isinstance(c, tuple):
            return tuple(self.choice(x) for x in c)
        value = constant(self.expr(c, {}))
        if value is None or not value.is_integer() or value < 1:
            self.fail("bad-hint", f"`{c}` is not a positive whole number", c.span, "hints count things")
        return int(value)

    # ---- layouts ------------------------------------------------------------------------------------------------
    def layouts(self) -> dict[str, Storage]:
        found: dict[str, Storage] = {}
        for block in self.blocks(ast.Layout):
            if block.condition and not self.attempt(self.applies, block.condition):
                continue
            if block.name in found:
                head = Span(block.span.source, block.span.start, block.span.start + len("layout"))
                self.report(
                    "duplicate-block",
                    f"a second layout `{block.name}`",
                    head,
                    "one name, one layout for given parameters",
                )
            found[block.name] = self.layout(block)
        return found

    def layout(self, block: ast.Layout) -> Storage:
        bindings = [b for x in block.bindings if (b := self.attempt(self.binding, x, block))]
        for name, count in Counter(x.tensor for x in block.bindings).items():
            if count > 1:
                again = [x for x in block.bindings if x.tensor == name][1]
                self.report(
                    "duplicate-binding",
                    f"`{name}` is bound twice in layout `{block.name}`",
                    again.tensor_span,
                    "remove one",
                )
        bound = {x.tensor for x in block.bindings}
        wanted = [
            t for t in self.tensors.values() if t.loaded and not t.optional and t.role not in ("bias", "residual")
        ]
        missing = [t.name for t in wanted if t.name not in bound]
        if missing:
            head = Span(block.span.source, block.span.start, block.span.start + len("layout"))
            self.report(
                "missing-binding",
                f"layout `{block.name}` does not say where {', '.join(f'`{n}`' for n in missing)} lies",
                head,
                f'e.g. `{missing[0]} = "name" : {self.tensors[missing[0]].dtype}`',
            )
        return Storage(block.name, tuple(bindings), block.record)

    def applies(self, condition: tuple[Expr, str, Expr]) -> bool:
        """Whether a layout exists for these parameters."""
        left, right = (constant(self.expr(side, {})) for side in (condition[0], condition[2]))
        assert left is not None and right is not None, "without known names every expression is a constant"
        return COMPARE[condition[1]](left, right)

    def binding(self, x: ast.Binding, block: ast.Layout) -> Binding:
        tensor = self.tensors.get(x.tensor)
        if tensor is None or not tensor.loaded:
            self.give_up_on(x.tensor)
            loaded = [t.name for t in self.tensors.values() if t.loaded]
            what = "is not loaded" if tensor else "is not declared"
            self.fail("unknown-tensor", f"`{x.tensor}` {what}", x.tensor_span, did_you_mean(x.tensor, loaded))
        if (x.offset is None) != (block.record is None):
            self.fail(
                "bad-record",
                "bindings of a record, and only they, have an offset",
                x.span,
                "`layout name record 18 { … @ 0 : f16 }`",
            )
        stored = self.stored_dtype(x.type)
        if block.record is not None and x.offset is not None and x.offset * 8 + stored.bits > block.record * 8:
            self.fail("bad-record", f"offset {x.offset} is beyond the record of {block.record} bytes", x.span)
        value, words, store = self.convention(x, tensor)
        per_expert = "{e}" in store.name
        index = tensor.index[1:] if per_expert and tensor.index[:1] == (Var("e"),) else tensor.index
        if per_expert and tensor.index[:1] != (Var("e"),):
            self.fail(
                "bad-template",
                f"`{x.tensor}` has no expert index",
                x.span,
                "only tensors indexed [e, …] lie once per expert",
            )
        layout = self.digits(x, store, tensor, index, stored)
        self.check_types(x, tensor, stored, value, layout)
        return Binding(x.tensor, store.name, stored, layout, value, words, x.offset, x.span)

    def convention(self, x: ast.Binding, tensor: Tensor) -> tuple[Expr, int, ast.Store]:
        """(declared element in terms of Stored(), amount added to whole words, the stored tensor)."""
        stores = [n for n in walk(x.value) if isinstance(n, ast.Store)]
        if len(stores) != 1:
            span = stores[1].span if len(stores) > 1 else x.value.span
            self.fail("bad-convention", "a binding names exactly one stored tensor", span, 'e.g. `"qweight"[k, c {l}]`')
        store, words = stores[0], 0
        wrapped = [n for n in walk(x.value) if isinstance(n, ast.Words)]
        value = x.value
        if wrapped:
            if store.axes is not None:
                self.fail(
                    "bad-convention",
                    "inside `words(…)` the name stands alone",
                    store.span,
                    "put the axes after the parenthesis",
                )
            inner = self.fold(self.resolve(_replace(wrapped[0].arg, store, Stored()), {}, False))
            amount = _added(inner)
            if amount is None:
                self.fail(
                    "bad-convention",
                    "`words(…)` adds a constant to each word",
                    wrapped[0].span,
                    'e.g. `words("qzeros" + ones(4))`',
                )
            words = amount
            value = _replace(value, wrapped[0], Stored())
            store = replace(store, axes=wrapped[0].axes)
        else:
            value = _replace(value, store, Stored())
        value = self.fold(self.resolve(value, {}, False))
        if not _invertible(value):
            self.fail("bad-convention", "this convention can't be undone when weights are written", x.value.span,
                      "use + - * / with constants around the stored name")  # fmt: skip
        if tensor.dtype.is_integer and any(isinstance(n, Binary) and n.op not in "+-" for n in walk(value)):
            self.fail(
                "bad-convention",
                "integers are shifted by + or -, modulo their range",
                x.value.span,
                f"`{tensor.name}` is {tensor.dtype}",
            )
        return value, words, store

    def digits(
        self, x: ast.Binding, store: ast.Store, tensor: Tensor, index: tuple[Index, ...], stored: DType
    ) -> Layout:
        if (x.logical is None) != (store.axes is None):
            self.fail("rank", "digits are named on both sides or on neither", x.span)
        if x.logical is None:
            names_ = "abcdefgh"[: len(index)]
            return Layout(
                tuple((Digit(n),) for n in names_), tuple(Axis((n,)) for n in names_), tensor.dtype.bits, stored.bits
            )
        if len(x.logical) != len(index):
            self.fail("rank", f"`{tensor.name}` has {len(index)} indices, the layout splits {len(x.logical)}", x.tensor_span,
                      f"declared `{tensor.name}[{', '.join(map(str, tensor.index))}]`")  # fmt: skip
        seen: dict[str, ast.DigitRef] = {}
        for d in (d for dim in x.logical for d in dim):
            if d.name in seen:
                self.fail("digit-twice", f"digit `{d.name}` is split off twice", d.span, "choose another name")
            seen[d.name] = d
        dims = tuple(tuple(Digit(d.name, self.digit_extent(d)) for d in dim) for dim in x.logical)
        axes = tuple(self.axis(a, seen) for a in store.axes or ())
        self.check_use(x, store, seen, axes)
        orders = {lane.name: len(lane.order) for a in axes for r in a.runs for lane in r.lanes if lane.order}
        extents = {d.name: d.extent or orders.get(d.name) for dim in dims for d in dim}
        for dim, refs in zip(dims, x.logical, strict=True):
            unknown = [r for d, r in zip(dim, refs, strict=True) if extents[d.name] is None]
            if len(unknown) > 1:
                self.fail("open-extent", f"the extents of `{unknown[0].name}` and `{unknown[1].name}` are both open", unknown[1].span,
                          f"give one, e.g. `{unknown[1].name}:32`")  # fmt: skip
        for lane, ref in _lanes(axes, store):
            if lane.order and len(lane.order) != extents[lane.name]:
                self.fail(
                    "bad-order",
                    f"`{lane.name}` has {extents[lane.name]} values, this order {len(lane.order)}",
                    ref.span,
                )
        layout = Layout(dims, axes, tensor.dtype.bits, stored.bits)
        self.check_runs(store, layout, extents, stored)
        return layout

    def digit_extent(self, d: ast.DigitRef) -> int | None:
        extent: object = d.extent
        if isinstance(d.extent, str):
            extent = self.params.get(d.extent)
            if not isinstance(extent, int):
                sizes = [n for n, v in self.params.items() if isinstance(v, int)]
                self.fail("unknown-name", f"`{d.extent}` is no size parameter", d.span,
                          did_you_mean(d.extent, sizes) or "declare it: `scheme name(size: int = 8)`")  # fmt: skip
        if isinstance(extent, int) and not 1 <= extent <= _LARGEST:
            self.fail("bad-extent", f"digit `{d.name}` can't have extent {extent}", d.span, f"1 to {_LARGEST}")
        return extent  # type: ignore[return-value]

    def axis(self, a: ast.AxisRef, seen: Mapping[str, ast.DigitRef]) -> Axis:
        digits: list[str] = []
        runs: list[Run] = []
        for item in a.items:
            match item:
                case str():
                    if runs:
                        self.fail(
                            "bad-axis",
                            "digits come before the braces",
                            a.span,
                            "a run of words is the fastest part of its axis",
                        )
                    if item not in seen:
                        word = re.search(rf"\b{item}\b", a.span.text)
                        assert word, "the digit was read from this text"
                        at = Span(a.span.source, a.span.start + word.start(), a.span.start + word.end())
                        self.fail(
                            "digit-unknown", f"`{item}` is not a digit of the left side", at, did_you_mean(item, seen)
                        )
                    digits.append(item)
                case int():
                    if item != 1 or len(a.items) > 1:
                        self.fail(
                            "bad-axis", "only a lone 1 (a unit axis) can stand here", a.span, "name a digit, or write 1"
                        )
                case ast.RunRef():
                    for lane in item.lanes:
                        if lane.name not in seen:
                            self.fail(
                                "digit-unknown",
                                f"`{lane.name}` is not a digit of the left side",
                                lane.span,
                                did_you_mean(lane.name, seen),
                            )
                    runs.append(Run(tuple(self.lane(lane, seen) for lane in item.lanes), item.bits, item.pad))
        return Axis(tuple(digits), tuple(runs))

    def lane(self, lane: ast.LaneRef, seen: Mapping[str, ast.DigitRef]) -> Lane:
        if lane.order is not None:
            extent = self.digit_extent(seen[lane.name]) or len(lane.order)
            if sorted(lane.order) != list(range(extent)):
                self.fail(
                    "bad-order", f"the order of `{lane.name}` is not a permutation of 0 to {extent - 1}", lane.span
                )
        return Lane(lane.name, lane.order)

    def check_use(
        self, x: ast.Binding, store: ast.Store, seen: Mapping[str, ast.DigitRef], axes: tuple[Axis, ...]
    ) -> None:
        used = Counter(n for a in axes for n in a.digits)
        packed = [a for a in axes if a.runs]
        if len(packed) > 1:
            self.fail(
                "bad-axis", "only one axis can hold packed words", store.span, "put these digits in one pair of braces"
            )
        for a in packed:
            sets = {frozenset(lane.name for lane in r.lanes) for r in a.runs}
            if len(sets) > 1:
                self.fail(
                    "bad-axis",
                    "the runs of one axis hold the same digits",
                    store.span,
                    "they are bit ranges of the same elements",
                )
            used.update(lane.name for lane in a.runs[0].lanes)
        for name, ref in seen.items():
            if not used[name]:
                fix = f"it needs `{name}` or `{{{name}}}` in one of the axes"
                self.fail("digit-lost", f"`{name}` is split off but never stored", ref.span, fix)
        for name, count in used.items():
            if count > 1:
                self.fail(
                    "digit-twice", f"digit `{name}` is stored twice", store.span, "each digit stands once in the axes"
                )

    def check_runs(self, store: ast.Store, layout: Layout, extents: Mapping[str, int | None], stored: DType) -> None:
        runs = [(r, ref) for a, aref in zip(layout.axes, store.axes or (), strict=True) if a.runs
                for r, ref in zip(a.runs, [i for i in aref.items if isinstance(i, ast.RunRef)], strict=True)]  # fmt: skip
        if not runs:
            return
        if stored.is_float:
            self.fail("word-size", f"packed words are integers, `{stored}` is not", store.span)
        covered: Counter = Counter()
        for run, ref in runs:
            sizes = [extents[lane.name] for lane in run.lanes]
            if None in sizes:
                open_ = next(lane.name for lane in run.lanes if extents[lane.name] is None)
                self.fail(
                    "open-extent",
                    f"the extent of `{open_}` is open, but a word must be full",
                    ref.span,
                    f"give it, e.g. `{open_}:8`",
                )
            low, width = run.bits or (0, layout.bits)
            if width == 0:
                self.fail("bit-range", "a bit range holds at least one bit", ref.span, "`.first:count`")
            if width > layout.word:
                self.fail("word-size", f"{width}-bit elements do not fit {layout.word}-bit words", ref.span)
            if math.prod(s for s in sizes if s) > _LONGEST:
                self.fail("bad-extent", "this run of words is too long", ref.span, f"at most {_LONGEST} elements")
            covered.update(range(low, low + width))
            total = math.prod(s for s in sizes if s) * width + run.pad
            if total % layout.word:
                self.fail("word-size", f"{total} bits are not whole {layout.word}-bit words", ref.span,
                          f"{math.prod(s for s in sizes if s)} elements of {width} bits"
                          + (f" and {run.pad} unused" if run.pad else ""))  # fmt: skip
        if covered != Counter(range(layout.bits)):
            self.fail("bit-range", f"the runs do not hold each of the {layout.bits} bits exactly once", runs[0][1].span,
                      "; ".join(f"bit {b} {'twice' if covered[b] else 'never'}" for b in sorted({*covered, *range(layout.bits)})
                                if covered[b] != 1 or b >= layout.bits))  # fmt: skip

    def check_types(self, x: ast.Binding, tensor: Tensor, stored: DType, value: Expr, layout: Layout) -> None:
        packed = any(a.runs for a in layout.axes)
        declared = tensor.dtype
        if packed:
            return
        if declared.is_float and not stored.is_float and stored.bits != declared.bits:
            self.fail(
                "type-mismatch",
                f"`{tensor.name}` is {declared}, stored as {stored}",
                x.type.span,
                f"a float, or u{declared.bits} for its bits" if declared.bits in (8, 16) else "a float",
            )
        if declared.is_float and stored.is_float:
            exact = (
                stored.precision <= declared.precision
                and stored.max <= declared.max
                and stored.quantum >= declared.quantum
            )
            if not exact and value == Stored():
                self.fail(
                    "type-mismatch",
                    f"{declared} can't hold every {stored}",
                    x.type.span,
                    f"declare `{tensor.name}` as {stored}",
                )
        if not declared.is_float and (stored.is_float or stored.bits < declared.bits):
            needed = f"an integer type of at least {declared.bits} bits"
            self.fail("type-mismatch", f"`{tensor.name}` is {declared}, stored as {stored}", x.type.span, needed)

    # ---- the multiplier -----------------------------------------------------------------------------------------
    def compute(self, scheme: Scheme, block: ast.Compute) -> None:
        if scheme.compute.operand.kind == "index" or scheme.compute.accumulator.bits < 16:
            self.report(
                "bad-type",
                "compute needs an operand type and a wide accumulator",
                block.span,
                "e.g. `compute f16 -> f32`",
            )
            return
        if scheme.compute.operand.is_float != scheme.compute.accumulator.is_float:
            self.report("bad-type", f"products of {block.operand} can't be summed in {block.accumulator}", block.span,
                        "integers sum in i32, floats in f32")  # fmt: skip
            return
        operands = [(scheme.weight, "w"), *((a.operand, "x") for a in scheme.activations)]
        for operand, given in operands:
            found = split(operand, scheme.compute.operand, given)
            if isinstance(found, Diagnostic):
                self.errors.append(found)
        if not scheme.activations and not scheme.compute.operand.is_float:
            self.report("missing-block", f"{scheme.compute.operand} products need quantized activations", block.span,
                        "add an `activation` block, or compute in f16")  # fmt: skip


def _grouped(i: Index) -> bool:
    return isinstance(i, Group) and i.axis == "k" and i.size is not None


def _lanes(axes: tuple[Axis, ...], store: ast.Store) -> list[tuple[Lane, ast.LaneRef]]:
    lanes = [lane for a in axes for r in a.runs for lane in r.lanes]
    refs = [x for a in store.axes or () for r in a.items if isinstance(r, ast.RunRef) for x in r.lanes]
    return list(zip(lanes, refs, strict=True))


def _product(e: Expr) -> list[Expr]:
    return _product(e.left) + _product(e.right) if isinstance(e, Binary) and e.op == "*" else [e]


# ---- value conventions -------------------------------------------------------------------------------------------
def _replace(e: Expr, old: Expr, new: Expr) -> Expr:
    return new if e is old else e.map(lambda child: _replace(child, old, new))


def _invertible(e: Expr) -> bool:
    match e:
        case Stored():
            return True
        case Negate(arg):
            return _invertible(arg)
        case Binary("*" | "/", left, right) if 0 in (constant(left), constant(right)):
            return False
        case Binary("+" | "-" | "*" | "/", left, right):
            return (_invertible(left) and constant(right) is not None) or (
                _invertible(right) and constant(left) is not None
            )
        case _:
            return False


def _added(e: Expr) -> int | None:
    match e:
        case Binary("+" | "-" as op, Stored(), Number(value)) if isinstance(value, int):
            return int(value) if op == "+" else -int(value)
        case _:
            return None
