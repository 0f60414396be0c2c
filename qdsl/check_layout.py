"""Layout blocks to storage: where each tensor lies in a checkpoint, and in what order of digits.

`Layouts` checks blocks, bindings and value conventions; `_Digits` the digits, words and bits of one binding.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qdsl import syntax as ast
from qdsl.check_declaration import LARGEST
from qdsl.diagnostic import Span, did_you_mean
from qdsl.dtype import DType
from qdsl.expr import Binary, Expr, Negate, Number, Stored, constant, walk
from qdsl.layout import Axis, Digit, Lane, Layout, Run
from qdsl.reports import Reports, keyword_of
from qdsl.resolve import Names
from qdsl.scheme import COMPARE, Binding, Index, Storage, Tensor, Var

_LONGEST = 4096  # elements of one run of words


@dataclass(frozen=True)
class Layouts:
    """The layout blocks of one file, once its parameters and tensors are known."""

    reports: Reports
    names: Names

    def layouts(self, blocks: Iterable[ast.Layout]) -> dict[str, Storage]:
        """The layouts that exist for these parameters, by name."""
        found: dict[str, Storage] = {}
        for block in blocks:
            if block.condition and not self.reports.attempt(self._applies, block.condition):
                continue
            if block.name in found:
                head = keyword_of(block.span, "layout")
                self.reports.report(
                    "duplicate-block",
                    f"a second layout `{block.name}`",
                    head,
                    "one name, one layout for given parameters",
                )
            found[block.name] = self._layout(block)
        return found

    def _layout(self, block: ast.Layout) -> Storage:
        """One block: each loaded tensor is bound once."""
        bindings = [b for x in block.bindings if (b := self.reports.attempt(self._binding, x, block))]
        for name, count in Counter(x.tensor for x in block.bindings).items():
            if count > 1:
                again = [x for x in block.bindings if x.tensor == name][1]
                self.reports.report(
                    "duplicate-binding",
                    f"`{name}` is bound twice in layout `{block.name}`",
                    again.tensor_span,
                    "remove one",
                )
        bound = {x.tensor for x in block.bindings}
        wanted = [
            t for t in self.names.tensors.values() if t.loaded and not t.optional and t.role not in ("bias", "residual")
        ]
        missing = [t.name for t in wanted if t.name not in bound]
        if missing:
            head = keyword_of(block.span, "layout")
            self.reports.report(
                "missing-binding",
                f"layout `{block.name}` does not say where {', '.join(f'`{n}`' for n in missing)} lies",
                head,
                f'e.g. `{missing[0]} = "name" : {self.names.tensors[missing[0]].dtype}`',
            )
        return Storage(block.name, tuple(bindings), block.record)

    def _applies(self, condition: tuple[Expr, str, Expr]) -> bool:
        """Whether a layout exists for these parameters."""
        left, right = (constant(self.names.expr(side, {})) for side in (condition[0], condition[2]))
        assert left is not None and right is not None, "without known names every expression is a constant"
        return COMPARE[condition[1]](left, right)

    def _binding(self, x: ast.Binding, block: ast.Layout) -> Binding:
        """One line: a declared tensor, and the stored one that holds it."""
        tensor = self.names.tensors.get(x.tensor)
        if tensor is None or not tensor.loaded:
            self.names.give_up_on(x.tensor)
            loaded = [t.name for t in self.names.tensors.values() if t.loaded]
            what = "is not loaded" if tensor else "is not declared"
            self.reports.fail("unknown-tensor", f"`{x.tensor}` {what}", x.tensor_span, did_you_mean(x.tensor, loaded))
        if (x.offset is None) != (block.record is None):
            self.reports.fail(
                "bad-record",
                "bindings of a record, and only they, have an offset",
                x.span,
                "`layout name record 18 { … @ 0 : f16 }`",
            )
        stored = self.names.stored_dtype(x.type)
        if block.record is not None and x.offset is not None and x.offset * 8 + stored.bits > block.record * 8:
            self.reports.fail("bad-record", f"offset {x.offset} is beyond the record of {block.record} bytes", x.span)
        value, words, store = self._convention(x, tensor)
        per_expert = "{e}" in store.name
        index = tensor.index[1:] if per_expert and tensor.index[:1] == (Var("e"),) else tensor.index
        if per_expert and tensor.index[:1] != (Var("e"),):
            self.reports.fail(
                "bad-template",
                f"`{x.tensor}` has no expert index",
                x.span,
                "only tensors indexed [e, …] lie once per expert",
            )
        layout = _Digits(self.reports, self.names).layout(x, store, tensor, index, stored)
        self._check_types(x, tensor, stored, value, layout)
        return Binding(x.tensor, store.name, stored, layout, value, words, x.offset, x.span)

    def _convention(self, x: ast.Binding, tensor: Tensor) -> tuple[Expr, int, ast.Store]:
        """(declared element in terms of Stored(), amount added to whole words, the stored tensor)."""
        stores = [n for n in walk(x.value) if isinstance(n, ast.Store)]
        if len(stores) != 1:
            span = stores[1].span if len(stores) > 1 else x.value.span
            self.reports.fail(
                "bad-convention", "a binding names exactly one stored tensor", span, 'e.g. `"qweight"[k, c {l}]`'
            )
        store, words = stores[0], 0
        wrapped = [n for n in walk(x.value) if isinstance(n, ast.Words)]
        value = x.value
        if wrapped:
            if store.axes is not None:
                self.reports.fail(
                    "bad-convention",
                    "inside `words(…)` the name stands alone",
                    store.span,
                    "put the axes after the parenthesis",
                )
            inner = self.names.expr(_replace(wrapped[0].arg, store, Stored()), {})
            amount = _added(inner)
            if amount is None:
                self.reports.fail(
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
        value = self.names.expr(value, {})
        if not _invertible(value):
            self.reports.fail("bad-convention", "this convention can't be undone when weights are written", x.value.span,
                              "use + - * / with constants around the stored name")  # fmt: skip
        if tensor.dtype.is_integer and any(isinstance(n, Binary) and n.op not in "+-" for n in walk(value)):
            self.reports.fail(
                "bad-convention",
                "integers are shifted by + or -, modulo their range",
                x.value.span,
                f"`{tensor.name}` is {tensor.dtype}",
            )
        return value, words, store

    def _check_types(self, x: ast.Binding, tensor: Tensor, stored: DType, value: Expr, layout: Layout) -> None:
        """Stored elements that are not packed fit the declared type."""
        if any(a.runs for a in layout.axes):
            return
        declared = tensor.dtype
        if declared.is_float and not stored.is_float and stored.bits != declared.bits:
            self.reports.fail(
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
                self.reports.fail(
                    "type-mismatch",
                    f"{declared} can't hold every {stored}",
                    x.type.span,
                    f"declare `{tensor.name}` as {stored}",
                )
        if not declared.is_float and (stored.is_float or stored.bits < declared.bits):
            needed = f"an integer type of at least {declared.bits} bits"
            self.reports.fail(
                "type-mismatch", f"`{tensor.name}` is {declared}, stored as {stored}", x.type.span, needed
            )


# ---- value conventions -------------------------------------------------------------------------------------------
def _replace(e: Expr, old: Expr, new: Expr) -> Expr:
    """An expression with one node, found by identity, replaced."""
    return new if e is old else e.map(lambda child: _replace(child, old, new))


def _invertible(e: Expr) -> bool:
    """Whether the stored value follows from the declared one: Stored() once, under + - * / with constants."""
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
    """The whole number that is added to Stored(); None for any other expression."""
    match e:
        case Binary("+" | "-" as op, Stored(), Number(value)) if isinstance(value, int):
            return int(value) if op == "+" else -int(value)
        case _:
            return None


# ---- digits ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Digits:
    """The two sides of one binding: the digits that an index splits into, and the axes that store them."""

    reports: Reports
    names: Names

    def layout(
        self, x: ast.Binding, store: ast.Store, tensor: Tensor, index: tuple[Index, ...], stored: DType
    ) -> Layout:
        """The permutation of digits from a tensor's bit patterns to its stored words."""
        if (x.logical is None) != (store.axes is None):
            self.reports.fail("rank", "digits are named on both sides or on neither", x.span)
        if x.logical is None:
            letters = "abcdefgh"[: len(index)]
            return Layout(
                tuple((Digit(n),) for n in letters), tuple(Axis((n,)) for n in letters), tensor.dtype.bits, stored.bits
            )
        if len(x.logical) != len(index):
            self.reports.fail("rank", f"`{tensor.name}` has {len(index)} indices, the layout splits {len(x.logical)}", x.tensor_span,
                              f"declared `{tensor.name}[{', '.join(map(str, tensor.index))}]`")  # fmt: skip
        seen: dict[str, ast.DigitRef] = {}
        for d in (d for dim in x.logical for d in dim):
            if d.name in seen:
                self.reports.fail("digit-twice", f"digit `{d.name}` is split off twice", d.span, "choose another name")
            seen[d.name] = d
        axes = tuple(self._axis(a, seen) for a in store.axes or ())
        self._check_use(x, store, seen, axes)
        orders = {lane.name: len(lane.order) for a in axes for r in a.runs for lane in r.lanes if lane.order}
        dims = tuple(self._dim(dim, i, orders) for dim, i in zip(x.logical, index, strict=True))
        extents = {d.name: d.extent or orders.get(d.name) for dim in dims for d in dim}
        for dim, refs in zip(dims, x.logical, strict=True):
            unknown = [r for d, r in zip(dim, refs, strict=True) if extents[d.name] is None]
            if len(unknown) > 1:
                self.reports.fail("open-extent", f"the extents of `{unknown[0].name}` and `{unknown[1].name}` are both open", unknown[1].span,
                                  f"give one, e.g. `{unknown[1].name}:32`")  # fmt: skip
        for lane, ref in _lanes(axes, store):
            if lane.order and len(lane.order) != extents[lane.name]:
                self.reports.fail(
                    "bad-order",
                    f"`{lane.name}` has {extents[lane.name]} values, this order {len(lane.order)}",
                    ref.span,
                )
        layout = Layout(dims, axes, tensor.dtype.bits, stored.bits)
        self._check_runs(store, layout, extents, stored)
        return layout

    def _dim(self, refs: Sequence[ast.DigitRef], index: Index, orders: Mapping[str, int]) -> tuple[Digit, ...]:
        """The digits of one index. With groups of all of k, `(g j:group)` has one g, and j is all of it."""
        all_of_k = {d.name for d in refs if index == Var("k") and self._is_all_of_k(d)}
        found = []
        for d in refs:
            extent = None if d.name in all_of_k else self._digit_extent(d)
            one = all_of_k and d.name not in all_of_k and d.name not in orders and extent is None
            found.append(Digit(d.name, 1 if one else extent))
        return tuple(found)

    def _is_all_of_k(self, d: ast.DigitRef) -> bool:
        return isinstance(d.extent, str) and self.names.params.get(d.extent) == "k"

    def _digit_extent(self, d: ast.DigitRef) -> int | None:
        """A digit's extent as written, a size parameter bound; None where it is left open."""
        extent: object = d.extent
        if isinstance(d.extent, str):
            extent = self.names.params.get(d.extent)
            if not isinstance(extent, int):
                sizes = [n for n, v in self.names.params.items() if isinstance(v, int)]
                self.reports.fail("unknown-name", f"`{d.extent}` is no size parameter", d.span,
                                  did_you_mean(d.extent, sizes) or "declare it: `scheme name(size: int = 8)`")  # fmt: skip
        if isinstance(extent, int) and not 1 <= extent <= LARGEST:
            self.reports.fail("bad-extent", f"digit `{d.name}` can't have extent {extent}", d.span, f"1 to {LARGEST}")
        return extent  # type: ignore[return-value]

    def _axis(self, a: ast.AxisRef, seen: Mapping[str, ast.DigitRef]) -> Axis:
        """One axis of the stored tensor: digits, then runs of packed words."""
        digits: list[str] = []
        runs: list[Run] = []
        for item in a.items:
            match item:
                case str():
                    if runs:
                        self.reports.fail(
                            "bad-axis",
                            "digits come before the braces",
                            a.span,
                            "a run of words is the fastest part of its axis",
                        )
                    if item not in seen:
                        word = re.search(rf"\b{item}\b", a.span.text)
                        assert word, "the digit was read from this text"
                        at = Span(a.span.source, a.span.start + word.start(), a.span.start + word.end())
                        self.reports.fail(
                            "digit-unknown", f"`{item}` is not a digit of the left side", at, did_you_mean(item, seen)
                        )
                    digits.append(item)
                case int():
                    if item != 1 or len(a.items) > 1:
                        self.reports.fail(
                            "bad-axis", "only a lone 1 (a unit axis) can stand here", a.span, "name a digit, or write 1"
                        )
                case ast.RunRef():
                    for lane in item.lanes:
                        if lane.name not in seen:
                            self.reports.fail(
                                "digit-unknown",
                                f"`{lane.name}` is not a digit of the left side",
                                lane.span,
                                did_you_mean(lane.name, seen),
                            )
                    runs.append(Run(tuple(self._lane(lane, seen) for lane in item.lanes), item.bits, item.pad))
        return Axis(tuple(digits), tuple(runs))

    def _lane(self, lane: ast.LaneRef, seen: Mapping[str, ast.DigitRef]) -> Lane:
        """One digit of a run, its order a permutation."""
        if lane.order is not None:
            extent = self._digit_extent(seen[lane.name]) or len(lane.order)
            if sorted(lane.order) != list(range(extent)):
                self.reports.fail(
                    "bad-order", f"the order of `{lane.name}` is not a permutation of 0 to {extent - 1}", lane.span
                )
        return Lane(lane.name, lane.order)

    def _check_use(
        self, x: ast.Binding, store: ast.Store, seen: Mapping[str, ast.DigitRef], axes: tuple[Axis, ...]
    ) -> None:
        """Each digit of the left side stands once in the axes."""
        used = Counter(n for a in axes for n in a.digits)
        packed = [a for a in axes if a.runs]
        if len(packed) > 1:
            self.reports.fail(
                "bad-axis", "only one axis can hold packed words", store.span, "put these digits in one pair of braces"
            )
        for a in packed:
            sets = {frozenset(lane.name for lane in r.lanes) for r in a.runs}
            if len(sets) > 1:
                self.reports.fail(
                    "bad-axis",
                    "the runs of one axis hold the same digits",
                    store.span,
                    "they are bit ranges of the same elements",
                )
            used.update(lane.name for lane in a.runs[0].lanes)
        for name, ref in seen.items():
            if not used[name]:
                fix = f"it needs `{name}` or `{{{name}}}` in one of the axes"
                self.reports.fail("digit-lost", f"`{name}` is split off but never stored", ref.span, fix)
        for name, count in used.items():
            if count > 1:
                self.reports.fail(
                    "digit-twice", f"digit `{name}` is stored twice", store.span, "each digit stands once in the axes"
                )

    def _check_runs(self, store: ast.Store, layout: Layout, extents: Mapping[str, int | None], stored: DType) -> None:
        """Runs fill whole words, and together hold each bit of an element once."""
        runs = [(r, ref) for a, aref in zip(layout.axes, store.axes or (), strict=True) if a.runs
                for r, ref in zip(a.runs, [i for i in aref.items if isinstance(i, ast.RunRef)], strict=True)]  # fmt: skip
        if not runs:
            return
        if stored.is_float:
            self.reports.fail("word-size", f"packed words are integers, `{stored}` is not", store.span)
        covered: Counter = Counter()
        for run, ref in runs:
            sizes = [extents[lane.name] for lane in run.lanes]
            if None in sizes:
                open_ = next(lane.name for lane in run.lanes if extents[lane.name] is None)
                self.reports.fail(
                    "open-extent",
                    f"the extent of `{open_}` is open, but a word must be full",
                    ref.span,
                    f"give it, e.g. `{open_}:8`",
                )
            low, width = run.bits or (0, layout.bits)
            if width == 0:
                self.reports.fail("bit-range", "a bit range holds at least one bit", ref.span, "`.first:count`")
            if width > layout.word:
                self.reports.fail("word-size", f"{width}-bit elements do not fit {layout.word}-bit words", ref.span)
            if math.prod(s for s in sizes if s) > _LONGEST:
                self.reports.fail(
                    "bad-extent", "this run of words is too long", ref.span, f"at most {_LONGEST} elements"
                )
            covered.update(range(low, low + width))
            total = math.prod(s for s in sizes if s) * width + run.pad
            if total % layout.word:
                self.reports.fail("word-size", f"{total} bits are not whole {layout.word}-bit words", ref.span,
                                  f"{math.prod(s for s in sizes if s)} elements of {width} bits"
                                  + (f" and {run.pad} unused" if run.pad else ""))  # fmt: skip
        if covered != Counter(range(layout.bits)):
            self.reports.fail("bit-range", f"the runs do not hold each of the {layout.bits} bits exactly once", runs[0][1].span,
                              "; ".join(f"bit {b} {'twice' if covered[b] else 'never'}" for b in sorted({*covered, *range(layout.bits)})
                                        if covered[b] != 1 or b >= layout.bits))  # fmt: skip


def _lanes(axes: tuple[Axis, ...], store: ast.Store) -> list[tuple[Lane, ast.LaneRef]]:
    """Each lane of the stored tensor beside the syntax it was read from."""
    lanes = [lane for a in axes for r in a.runs for lane in r.lanes]
    refs = [x for a in store.axes or () for r in a.items if isinstance(r, ast.RunRef) for x in r.lanes]
    return list(zip(lanes, refs, strict=True))
