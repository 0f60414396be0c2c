"""Names to what they stand for: parameters, number formats, declared tensors.

`Names` turns the syntax of a type into a `DType`, and an expression as written into one with constants folded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qdsl import dtype as dtypes
from qdsl import syntax as ast
from qdsl.diagnostic import did_you_mean
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
    Number,
    Ref,
    Stored,
    constant,
    names,
    walk,
)
from qdsl.reports import FailedError, Reports
from qdsl.scheme import AXES, Tensor

GIVEN = ("x", "w", "acc", "y")
RESERVED = (*AXES, *GIVEN)


@dataclass
class Names:
    """The names that are known so far while a file is checked.

    params   each parameter and its value
    tensors  each tensor in scope and its declaration
    broken   tensors whose declaration failed: using them is no second mistake
    """

    reports: Reports
    params: dict[str, int | str | DType] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    # ---- types --------------------------------------------------------------------------------------------------
    def dtype(self, t: ast.TypeRef) -> DType:
        """The number format of declared elements."""
        if isinstance(value := self.params.get(t.name), DType) and t.arg is None:
            return value
        if t.name == "idx":
            if t.arg is None:
                self.reports.fail("bad-type", "`idx` needs the axis it points into", t.span, "e.g. `idx(k // 128)`")
            return dtypes.INDEX
        if t.name in ("u", "i") and t.arg is not None:
            bits = constant(self.expr(t.arg, {}))
            whole = bits is not None and bits.is_integer()
            found = dtypes.find(f"{t.name}{int(bits)}") if whole else None
            return found or self.reports.fail(
                "bad-type", f"`{t.name}({t.arg})` is not a number format", t.span,
                f"{'u1 to u8' if t.name == 'u' else 'i2 to i8'}" + (f"; here {t.arg} = {bits:g}" if names(t.arg) else ""),
            )  # fmt: skip
        if t.arg is not None:
            self.reports.fail(
                "bad-type", f"`{t.name}` takes no argument", t.span, "only u(bits), i(bits) and idx(extent) do"
            )
        if found := dtypes.find(t.name):
            return found
        types = [name for name, v in self.params.items() if isinstance(v, DType)]
        label = did_you_mean(t.name, [*dtypes.NAMES, *types]) or dtypes.SPELLINGS
        return self.reports.fail("unknown-type", f"unknown type `{t.name}`", t.span, label)

    def stored_dtype(self, t: ast.TypeRef) -> DType:
        """The type of a checkpoint's elements, which may also be words such as `i32`."""
        if t.arg is None and (word := dtypes.WORDS.get(t.name)):
            return word
        return self.dtype(t)

    # ---- expressions --------------------------------------------------------------------------------------------
    def expr(self, e: Expr, known: Mapping[str, object], *, reductions: bool = False) -> Expr:
        """Resolve names (parameters become numbers, type names become casts) and fold constants."""
        return self._fold(self._resolve(e, known, reductions))

    def _fold(self, e: Expr) -> Expr:
        e = e.map(self._fold)
        if isinstance(e, Binary) and e.op in ("/", "//", "%") and e.right == Number(0):
            self.reports.fail("bad-number", f"`{e}` divides by zero", e.right.span)
        if isinstance(e, Number) or any(isinstance(x, Ref | Item | Stored) for x in walk(e)):
            return e
        value = constant(e)
        if value is None or isinstance(e, Half):
            return e
        if not math.isfinite(value):
            self.reports.fail("bad-number", f"`{e}` is not a finite number", e.span, f"it is {value:g}")
        return Number(int(value) if value.is_integer() else value, span=e.span)

    def _resolve(self, e: Expr, known: Mapping[str, object], reductions: bool) -> Expr:
        match e:
            case Ref(name):
                if name in known:
                    self._check_value(e)
                    return e
                value = self.params.get(name)
                if isinstance(value, int):
                    return Number(value, span=e.span)
                if value == "k" and "k" in known:
                    return Ref("k", span=e.span)
                self.give_up_on(name)
                legal = [*known, *(n for n, v in self.params.items() if not isinstance(v, DType))]
                self.reports.fail("unknown-name", f"unknown name `{name}`", e.span, did_you_mean(name, legal))
            case ast.Store() | ast.Words():
                self.reports.fail(
                    "misplaced-store", f"`{e}` can't be used here", e.span, "stored names belong to layouts"
                )
            case Digits() | Half():
                what = "digits belong to a transform" if isinstance(e, Digits) else "`half` declares such parts of acc"
                self.reports.fail("bad-index", f"`{e}` can't be used here", e.span, what)
            case Item("acc", (Half(),)) if "acc" in known:
                return e
            case Item(name, args):
                if name not in known:
                    self.give_up_on(name)
                    self.reports.fail("unknown-name", f"unknown name `{name}`", e.span, did_you_mean(name, known))
                tensor = self.tensors.get(name)
                if tensor is None or tensor.role != "table":
                    self.reports.fail(
                        "not-a-table", f"`{name}` is not a table", e.span, "bare names stand for their own element"
                    )
                if len(args) != 1:
                    self.reports.fail("wrong-arguments", f"table `{name}` takes one code", e.span, f"got {len(args)}")
                return replace(e, args=tuple(self._resolve(a, known, reductions) for a in args))
            case Call(name, args):
                return self._call(e, name, args, known, reductions)
            case _:
                return e.map(lambda child: self._resolve(child, known, reductions))

    def give_up_on(self, name: str) -> None:
        """Fails, without a word, on a tensor whose declaration failed."""
        if name in self.broken:
            raise FailedError

    def _check_value(self, e: Ref) -> None:
        """A bare name must have one value: tables need a code, and an index is a position."""
        role = self.tensors[e.name].role if e.name in self.tensors else ""
        if role == "table":
            self.reports.fail("table-without-code", f"table `{e.name}` needs a code", e.span, f"e.g. `{e.name}[q]`")
        if role == "index":
            self.reports.fail(
                "not-a-value", f"`{e.name}` is an index, not a value", e.span, "it can stand in brackets: `s[n, g]`"
            )

    def _call(self, e: Call, name: str, args: tuple[Expr, ...], known: Mapping[str, object], reductions: bool) -> Expr:
        """A cast, a limit of a type (`max(f16)`), `ones(b)`, a reduction or a function."""
        param = self.params.get(name)
        cast = param if isinstance(param, DType) else dtypes.find(name)
        if cast is not None:
            if len(args) != 1:
                self.reports.fail("wrong-arguments", f"a cast to `{name}` takes one value", e.span, f"got {len(args)}")
            return Cast(cast, self._resolve(args[0], known, reductions), span=e.span)
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
            self.reports.fail(
                "wrong-arguments", "`ones(b)` sets every b-th bit of a 32-bit word", e.span, "b is 2, 4 or 8"
            )
        if name in REDUCTIONS:
            if not reductions:
                self.reports.fail("misplaced-reduction", f"`{name}` can't be used here", e.span,
                                  "reductions belong to `quantize` and to computed activation tensors")  # fmt: skip
            count = 1
        elif name in FUNCTIONS:
            count = FUNCTIONS[name][1]
        else:
            self.reports.fail(
                "unknown-function", f"unknown function `{name}`", e.span, did_you_mean(name, [*FUNCTIONS, *REDUCTIONS])
            )
        if len(args) != count:
            self.reports.fail(
                "wrong-arguments", f"`{name}` takes {count} value{'s' * (count > 1)}", e.span, f"got {len(args)}"
            )
        return replace(e, args=tuple(self._resolve(a, known, reductions) for a in args))
