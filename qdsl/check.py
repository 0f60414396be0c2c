"""Syntax to scheme: binds parameters, resolves every name and type, and collects every mistake before raising.

`check(file, params)` returns a `Scheme` or raises one `SchemeError` with all diagnostics in file order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from qdsl import dtype as dtypes
from qdsl import syntax as ast
from qdsl.check_declaration import Declarations
from qdsl.check_layout import Layouts
from qdsl.diagnostic import Diagnostic, did_you_mean
from qdsl.dtype import DType
from qdsl.expr import Expr, Half, Item, Ref, constant, names, substitute, walk
from qdsl.printer import print_file
from qdsl.reports import Reports, keyword_of
from qdsl.resolve import RESERVED, Names
from qdsl.scheme import (
    AXES,
    Activation,
    Compute,
    Free,
    Gather,
    Group,
    Hints,
    Index,
    Operand,
    Output,
    Requirement,
    Scheme,
    Tensor,
    Transform,
    Var,
)
from qdsl.split import split

HINTS = ("tile", "stages", "warps", "split_k")


def check(file: ast.File, params: Mapping[str, object] | None = None) -> Scheme:
    """The scheme that `file` declares, with `params` (name to number, type name or "k") over the defaults."""
    reports = Reports()
    known = Names(reports)
    of_weight = frozenset(d.name for b in file.items if isinstance(b, ast.Weight) for d in b.decls)
    return _Checker(file, reports, known, Declarations(reports, known, of_weight)).scheme(dict(params or {}))


@dataclass(frozen=True)
class _Parameters:
    """The parameters of one file, bound to given values or their defaults."""

    file: ast.File
    reports: Reports
    names: Names

    def bind(self, given: dict[str, object]) -> None:
        """Enters every parameter that has a legal value into the names."""
        declared = {p.name: p for p in self.file.params}
        for name, count in Counter(p.name for p in self.file.params).items():
            if count > 1 or name in RESERVED:
                what = "declared twice" if count > 1 else "reserved"
                self.reports.report(
                    "duplicate-name", f"parameter `{name}` is {what}", declared[name].span, "choose another name"
                )
        for name in given:
            if name not in declared:
                label = did_you_mean(name, declared) if declared else "the scheme has no parameters"
                self.reports.report(
                    "unknown-parameter", f"`{self.file.name}` has no parameter `{name}`", self.file.name_span, label
                )
        for p in self.file.params:
            value = self.reports.attempt(self._value, p, given.get(p.name))
            if value is not None:
                self.names.params[p.name] = value

    def _value(self, p: ast.Param, given: object) -> int | str | DType:
        """The value of one parameter: a number, a number format, or "k"."""
        if p.kind == "type":
            if given is None:
                return self.names.dtype(p.default)
            if isinstance(given, DType):
                return given
            found = dtypes.find(str(given))
            return found or self._bad(p, given, did_you_mean(str(given), dtypes.NAMES) or dtypes.SPELLINGS)
        if given is None:
            if isinstance(p.default, Ref) and p.default.name == "k" and p.kind == "dim":
                return "k"
            given = constant(self.names.expr(p.default, {}))
        if p.kind == "dim" and given in ("k", "-1", -1, -1.0):
            return "k"
        try:
            value = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not value.is_integer() or (p.kind == "dim" and value < 1):
            legal = "a positive whole number, or k for one group over all of k" if p.kind == "dim" else "a whole number"
            self._bad(p, given, f"`{p.name}` is {legal}")
        if abs(value) >= 10**18:
            self._bad(p, given, "whole numbers have at most 18 digits")
        return int(value)

    def _bad(self, p: ast.Param, given: object, label: str) -> NoReturn:
        self.reports.fail("bad-parameter", f"`{given}` is no value for parameter `{p.name}`", p.span, label)


@dataclass(frozen=True)
class _Checker:
    """One file: each kind of block has a method that turns it into its part of the scheme."""

    file: ast.File
    reports: Reports
    names: Names
    declarations: Declarations

    def scheme(self, given: dict[str, object]) -> Scheme:
        """The whole file, its parameters bound to `given`."""
        _Parameters(self.file, self.reports, self.names).bind(given)
        weight_block = self.block(ast.Weight, "weight")
        compute_block = self.block(ast.Compute, "compute")
        output_block = self.block(ast.Output, "output")
        self.reports.finish()
        assert weight_block and compute_block and output_block, "finish() raises when a block is missing"
        compute = Compute(
            self.reports.attempt(self.names.dtype, compute_block.operand),
            self.reports.attempt(self.names.dtype, compute_block.accumulator),
        )
        weight = self.weight(weight_block)
        activations = tuple(a for b in self.blocks(ast.Activation) if (a := self.activation(b)))
        output = self.output(output_block)
        self.phases()
        quantize = self.quantize()
        requires = tuple(r for b in self.blocks(ast.Require) if (r := self.reports.attempt(self.requirement, b)))
        hints = tuple(h for b in self.blocks(ast.Schedule) if (h := self.reports.attempt(self.hints, b)))
        layouts = Layouts(self.reports, self.names).layouts(self.blocks(ast.Layout))
        self.reports.finish()
        scheme = Scheme(
            self.file.name, self.file.doc, self.names.params, weight, activations, compute, output, quantize, layouts,
            hints, requires, print_file(self.file),
        )  # fmt: skip
        self.compute(scheme, compute_block)
        self.reports.finish()
        return scheme

    def blocks(self, kind: type) -> list:
        """All blocks of one kind, in file order."""
        return [b for b in self.file.items if isinstance(b, kind)]

    def block(self, kind: type, keyword: str):
        """The only block of one kind; None, reported, where there is none."""
        found = self.blocks(kind)
        if not found:
            self.reports.report("missing-block", f"the scheme has no `{keyword}` block", self.file.name_span,
                                "every scheme needs weight, compute and output")  # fmt: skip
            return None
        for extra in found[1:]:
            head = keyword_of(extra.span, keyword)
            self.reports.report("duplicate-block", f"a second `{keyword}` block", head, "only one is allowed")
        return found[0]

    # ---- operands and output ------------------------------------------------------------------------------------
    def weight(self, block: ast.Weight) -> Operand:
        """The operand `w`."""
        tensors = self.declarations.declare(block.decls, "weight")
        if not any(t.role == "code" for t in tensors) and not self.reports.found:
            self.reports.report(
                "missing-code",
                "the weight has no code tensor",
                block.decode.span,
                "declare one, e.g. `code q[n, k] : u4`",
            )
        return Operand(tensors, self.reports.attempt(self.decode, block.decode, "w", tensors) or Ref("w"))

    def decode(self, eq: ast.Equation, left: str, tensors: tuple[Tensor, ...]) -> Expr:
        """The right side of `w ~ …` or `x ~ …`, over the tensors of its block."""
        if eq.name != left:
            self.reports.fail(
                "wrong-left-side",
                f"this block approximates `{left}`, not `{eq.name}`",
                eq.name_span,
                f"write `{left} ~ …`",
            )
        known = {t.name: t for t in tensors} | ({"x": None} if left == "x" else {})
        return self.names.expr(eq.value, known)

    def activation(self, block: ast.Activation) -> Activation | None:
        """The operand `x` in one phase; None when its equation failed."""
        before = dict(self.names.tensors)
        # What another phase computes is its own; what it loads may serve this phase too, declared alike.
        self.names.tensors = {name: t for name, t in before.items() if not isinstance(t.value, Expr)}
        tensors: list[Tensor] = []
        transforms: list[Transform] = []
        for item in block.decls:
            if isinstance(item, ast.Decl):
                if any(t.name == item.name for t in tensors):
                    self.reports.report(
                        "duplicate-name", f"`{item.name}` is declared twice", item.name_span, "in this block"
                    )
                tensors += self.declarations.declare([item], "activation")
            elif (t := self.reports.attempt(self.declarations.transform, item)) is not None:
                transforms.append(t)
        decode = self.reports.attempt(self.decode, block.decode, "x", tuple(tensors))
        used = {n for e in (decode, *(t.value for t in tensors)) if isinstance(e, Expr) for n in names(e)}
        for t in tensors:  # a transform's tensors have digits for indices
            if t.name in used and (free := [i.name for i in t.index if isinstance(i, Free)]):
                label = did_you_mean(free[0], AXES)
                self.reports.report("bad-index", f"`{free[0]}` is not an index", t.span, label)
        if decode is not None and "x" in names(decode) and any(t.role == "code" for t in tensors):
            self.reports.report(
                "wrong-left-side", "x is approximated by its codes, so it can't appear on the right", block.decode.span
            )
        self.names.tensors = {**before, **{t.name: t for t in tensors}}
        return (
            Activation(block.name, Operand(tuple(tensors), decode), tuple(transforms)) if decode is not None else None
        )

    def output(self, block: ast.Output) -> Output:
        """What becomes of the finished sum."""
        dtype = self.reports.attempt(self.names.dtype, block.type) or dtypes.F32
        tensors = self.declarations.declare(block.decls, "output")
        half = None
        if block.half is not None:
            extents = [d.extent for d in block.half.digits]
            if block.half.name != "n" or len(extents) != 2 or not isinstance(extents[0], int) or extents[1] is not None:
                self.reports.report(
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
            if eq.name in self.names.tensors or eq.name in ("acc", "x", "w"):
                self.reports.report(
                    "duplicate-name", f"`{eq.name}` has a value already", eq.name_span, "choose another name"
                )
            place = "n" if block.half is None else block.half.digits[-1].name
            if eq.places is not None and eq.places != (Ref("m"), Ref(place)):
                self.reports.report("bad-index", f"the output block defines elements [m, {place}]", eq.span)
            resolved = self.reports.attempt(self.output_value, eq, known)
            if resolved is None:
                continue
            value = local[eq.name] = substitute(resolved, local)
            known[eq.name] = None
            self.reports.attempt(self.check_halves, value, half)
        if block.equations and block.equations[-1].name != "y":
            last = block.equations[-1]
            self.reports.report(
                "wrong-left-side", "the output block must end by defining `y`", last.name_span, "write `y = …`"
            )
        return Output(dtype, tensors, value, half)

    def outside_the_sum(self) -> dict[str, Tensor]:
        """Scales and zeros of the operands that the output may use: free of k, and there in every phase."""
        phases = [{d.name for d in b.decls if isinstance(d, ast.Decl)} for b in self.blocks(ast.Activation)]
        shared = set.intersection(*phases) if phases else set()
        return {
            name: t
            for name, t in self.names.tensors.items()
            if (name in self.declarations.of_weight or name in shared)
            and t.role in ("scale", "zero", "param")
            and not any(i in (Var("k"), Var("e")) or isinstance(i, Gather | Free) or _grouped(i) for i in t.index)
        }

    def output_value(self, eq: ast.Equation, known: Mapping[str, object]) -> Expr:
        """The right side of one equation of the output block."""
        for node in walk(eq.value):
            if isinstance(node, Ref) and node.name in self.names.tensors and node.name not in known:
                self.reports.fail("inside-the-sum", f"`{node.name}` can't be used on the finished sum", node.span,
                                  "only scales and zeros that do not depend on k, in every phase, can")  # fmt: skip
        return self.names.expr(eq.value, known)

    def check_halves(self, value: Expr, half: tuple[str, int] | None) -> None:
        """`acc` is read by parts where `half` declares them, and only there."""
        for node in walk(value):
            if isinstance(node, Item) and node.name == "acc" and half is None:
                self.reports.fail(
                    "bad-half", "acc has no parts here", node.span, "`half n = (r:2 j)` splits the features"
                )
            if isinstance(node, Half) and half and (node.digit != half[0] or not 0 <= node.value < half[1]):
                self.reports.fail("bad-half", f"`{node}` is no part of `{half[0]}:{half[1]}`", node.span,
                                  f"`{half[0]} = 0` to `{half[0]} = {half[1] - 1}`")  # fmt: skip
            if isinstance(node, Ref) and node.name == "acc" and half:
                self.reports.fail(
                    "bad-half", "with `half`, say which part of acc", node.span, f"e.g. `acc[{half[0]} = 0]`"
                )

    def phases(self) -> None:
        """Several activation blocks need a name each."""
        blocks = self.blocks(ast.Activation)
        for name, count in Counter(b.name for b in blocks).items():
            if count > 1:
                block = [b for b in blocks if b.name == name][1]
                head = keyword_of(block.span, "activation")
                self.reports.report("duplicate-block", f"a second activation block{f' `{name}`' if name else ''}", head,
                                    "give each phase a name of its own")  # fmt: skip
        if len(blocks) > 1 and any(not b.name for b in blocks):
            self.reports.report(
                "duplicate-block", "several activation blocks need names", blocks[0].span, "`activation prefill {…}`"
            )

    # ---- quantize, require, schedule ----------------------------------------------------------------------------
    def quantize(self) -> tuple[tuple[str, Expr], ...]:
        """How each loaded tensor of the weight is made from floats, in the order of the equations."""
        blocks = self.blocks(ast.Quantize)
        if not blocks:
            return ()
        block = self.block(ast.Quantize, "quantize")
        weights = {n: t for n, t in self.names.tensors.items() if t.loaded and n in self.declarations.of_weight}
        known: dict[str, object] = {"w": None}
        local: dict[str, Expr] = {}
        result = []
        for eq in block.equations:
            value = self.reports.attempt(
                lambda eq=eq: self.names.expr(eq.value, {**known, **dict.fromkeys(self.constants())}, reductions=True)
            )
            if value is None:
                continue
            if eq.name in RESERVED:
                self.reports.report("reserved-name", f"`{eq.name}` is reserved", eq.name_span, "choose another name")
            if eq.places is not None:
                self.reports.report(
                    "bad-index", "a quantize equation defines a whole tensor", eq.span, f"`{eq.name} = …`"
                )
            if eq.name in weights:
                result.append((eq.name, substitute(value, local)))
            else:
                local[eq.name] = substitute(value, local)
            known[eq.name] = None
        missing = [n for n in weights if n not in dict(result) and weights[n].role != "index"]
        if missing and not self.reports.found:
            head = keyword_of(block.span, "quantize")
            what = f"`quantize` does not say how to make {', '.join(f'`{n}`' for n in missing)}"
            self.reports.report("quantize-incomplete", what, head, f"add `{missing[0]} = …`")
        return tuple(result)

    def constants(self) -> list[str]:
        """The tables whose entries are written in the file."""
        return [n for n, t in self.names.tensors.items() if isinstance(t.value, tuple)]

    def requirement(self, block: ast.Require) -> Requirement:
        """A condition on n and k."""
        known = {"n": None, "k": None}
        return Requirement(
            self.names.expr(block.left, known), block.op, self.names.expr(block.right, known), block.span
        )

    def hints(self, block: ast.Schedule) -> Hints:
        """One schedule block: the choices that a target should try."""
        condition = None
        if block.condition:
            left, op, right = block.condition
            known = {"m": None, "n": None, "k": None}
            condition = Requirement(self.names.expr(left, known), op, self.names.expr(right, known), block.span)
        choices = {}
        for hint in block.hints:
            if hint.name not in HINTS:
                self.reports.report(
                    "unknown-hint", f"unknown hint `{hint.name}`", hint.span, did_you_mean(hint.name, HINTS)
                )
            choices[hint.name] = tuple(self.choice(c) for c in hint.choices)
        return Hints(block.target, condition, choices, block.span)

    def choice(self, c) -> int | tuple[int, ...]:
        """One value of a hint, or a tuple of them."""
        if isinstance(c, tuple):
            return tuple(self.choice(x) for x in c)
        value = constant(self.names.expr(c, {}))
        if value is None or not value.is_integer() or value < 1:
            self.reports.fail("bad-hint", f"`{c}` is not a positive whole number", c.span, "hints count things")
        return int(value)

    # ---- the multiplier -----------------------------------------------------------------------------------------
    def compute(self, scheme: Scheme, block: ast.Compute) -> None:
        """Every operand's equation can meet the multiplier that the compute block names."""
        sums = scheme.compute.accumulator
        if scheme.compute.operand.kind == "index" or sums.bits < 16 or sums == dtypes.I16:
            self.reports.report(
                "bad-type",
                "compute needs an operand type and a wide accumulator",
                block.span,
                "e.g. `compute f16 -> f32`",
            )
            return
        if scheme.compute.operand.is_float != scheme.compute.accumulator.is_float:
            self.reports.report("bad-type", f"products of {block.operand} can't be summed in {block.accumulator}", block.span,
                                "integers sum in i32, floats in f32")  # fmt: skip
            return
        operands = [(scheme.weight, "w"), *((a.operand, "x") for a in scheme.activations)]
        for operand, given in operands:
            found = split(operand, scheme.compute.operand, given)
            if isinstance(found, Diagnostic):
                self.reports.found.append(found)
        if not scheme.activations and not scheme.compute.operand.is_float:
            self.reports.report("missing-block", f"{scheme.compute.operand} products need quantized activations", block.span,
                                "add an `activation` block, or compute in f16")  # fmt: skip


def _grouped(i: Index) -> bool:
    return isinstance(i, Group) and i.axis == "k" and i.size is not None
