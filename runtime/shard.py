"""The part of a linear layer that one rank of several holds, cut out of what a checkpoint stores.

    stored words of the layer --layout--> elements --window--> elements --layout--> stored words of the part

A window is a range of rows (column parallel: the rank makes some of the features) or of columns (row parallel: it
multiplies some of the inputs, and the ranks' results are summed), and every tensor is cut where its declared index says.
The layout decides how much of a tensor is read; where words hold nothing of another rank's, they are the part as they are.

A part begins where its first group or block begins: another rank may hold what lies before the part's own inputs and
features, and a layer of whole groups needs no new scheme. x is 0 there, and so many features of y are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from qdsl.diagnostic import Error, SchemeError
from qdsl.expr import Binary, Expr, Negate, Ref, names
from qdsl.runtime import repack
from qdsl.runtime.checkpoints import Choice
from qdsl.runtime.resolve import check_layer, kept_tensors, resolved
from qdsl.scheme import Binding, Gather, Group, Index, Scheme, Storage, Tensor, Var, extent_of

COLUMNS, ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")  # as transformers calls them
Read = Callable[[str, tuple[slice, ...]], torch.Tensor]  # a part of a stored tensor, by its full name


@dataclass(frozen=True)
class Part:
    """What rank `rank` of `world` has of a layer of n features and k inputs.

    style   one of COLUMNS or ROWS
    rows    of the weight, from the beginning of the block in which the rank's first feature lies
    columns of it, from the beginning of the group in which its first input lies
    before  features that are not the rank's own (column parallel), or inputs (row parallel)
    of      [n, k] of the whole layer
    """

    style: str
    rank: int
    world: int
    rows: slice
    columns: slice
    before: int
    of: tuple[int, int]

    @property
    def n(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def k(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def has_bias(self) -> bool:
        """Sums of all ranks need it once."""
        return self.style in COLUMNS or self.rank == 0


def part_of(style: str, rank: int, world: int, n: int, k: int, unit_n: int = 1, unit_k: int = 1) -> Part:
    """A rank's part, in whole blocks of so many rows or columns; raises Error where there are no equal parts."""
    along, size, unit = ("out_features", n, unit_n) if style in COLUMNS else ("in_features", k, unit_k)
    if size % world:
        raise Error(f"{along} = {size} can't be split over {world} ranks ({style})")
    first, last = rank * (size // world), (rank + 1) * (size // world)
    start = first // unit * unit
    window, before = slice(start, last), first - start
    rows, columns = (window, slice(0, k)) if style in COLUMNS else (slice(0, n), window)
    return Part(style, rank, world, rows, columns, before, (n, k))


# ---- the scheme of a part ----------------------------------------------------------------------------------------
def quantized_part(
    choice: Choice, phase: str, style: str, rank: int, world: int, n: int, k: int
) -> tuple[Part, dict[str, Any]]:
    """A rank's part of a quantized layer, and the parameters of its scheme; raises Error where it can't be split."""
    if choice.tag is not None:
        raise Error("it is saved for kernels as a whole; load a part of the checkpoint that it was converted from")
    whole, params = resolved(choice.scheme, choice.params, None), choice.params
    active = whole.activation(phase if whole.phases else "")
    tensors = (*whole.weight.tensors, *(active.operand.tensors if active else ()))
    units = {axis: _unit(tensors, axis) for axis in "nk"}
    part = part_of(style, rank, world, n, k, units["n"], units["k"])
    if style in COLUMNS:
        _check_rows(whole, part, choice.bias)
        return part, dict(params)
    if active and active.transforms:
        raise Error(f"{whole.bound} transforms x before it is quantized, so its inputs can't be split ({style})")
    if not _sums(whole):
        raise Error(
            f"{whole.bound}: y = {whole.output.value} of parts is no sum, so its inputs can't be split ({style})"
        )
    if part.before and active and any(t.role == "zero" for t in active.operand.tensors):
        raise Error(
            f"{whole.bound}: a group of {units['k']} inputs lies on two of {world} ranks, and x has a zero point ({style})"
        )
    params = _with_groups(choice.scheme, whole, params, k, part.k)
    check_layer(resolved(choice.scheme, params, None), part.k, part.n, choice.bias and part.has_bias, "")
    return part, params


def rows_of(choice: Choice, rows: slice, n: int, k: int) -> tuple[Part, dict[str, Any]]:
    """Some rows of a quantized layer, as a part of it, and the parameters of its scheme; raises Error where there is no
    layer of these rows."""
    if choice.tag is not None:
        raise Error("it is saved for kernels as a whole")
    whole = resolved(choice.scheme, choice.params, None)
    part, unit = Part("colwise", 0, 1, rows, slice(0, k), 0, (n, k)), _unit(whole.weight.tensors, "n")
    if rows.start % unit:
        raise Error(f"its rows begin at {rows.start}, inside of a block of {unit}")
    _check_rows(whole, part, choice.bias)
    return part, dict(choice.params)


def _unit(tensors: Iterable[Tensor], axis: str) -> int:
    """Of how many rows or columns a part begins at a multiple, so that its first group or block is whole."""
    return math.lcm(*(i.size for t in tensors for i in t.index if isinstance(i, Group) and i.axis == axis and i.size))


def _check_rows(whole: Scheme, part: Part, bias: bool) -> None:
    if whole.output.half:
        raise Error(f"{whole.bound} folds {whole.output.half[1]} features into one, so its rows can't be split")
    check_layer(whole, part.k, part.n, bias, "")


def _sums(scheme: Scheme) -> bool:
    """Whether y of a sum of products is the sum of their y, but for a bias that is added once."""
    biases = {t.name for t in scheme.output.tensors if t.role == "bias"}

    def sums(e: Expr) -> bool:
        match e:
            case Ref(name):
                return name == "acc" or name in biases
            case Negate(inner):
                return sums(inner)
            case Binary("+" | "-", left, right):
                return sums(left) and sums(right)
            case Binary("*", left, right):
                return (sums(left) and fixed(right)) or (fixed(left) and sums(right))
            case Binary("/", left, right):
                return sums(left) and fixed(right)
        return False

    def fixed(e: Expr) -> bool:
        return not names(e) & {"acc", *(t.name for t in scheme.output.tensors if t.role in ("bias", "residual"))}

    return scheme.output.half is None and sums(scheme.output.value)


def _with_groups(name: str, whole: Scheme, params: Mapping[str, Any], k: int, part: int) -> dict[str, Any]:
    """Parameters with which a layer of `part` inputs has as many groups as the whole one, of which any may be named."""
    for t in whole.weight.tensors:
        if t.role != "index" or not isinstance(t.extent, Group) or t.extent.size is None:
            continue
        size = t.extent.size
        count = -(-k // size)
        smaller = min(size, (part - 1) // (count - 1)) if count > 1 else size
        if smaller == size:
            continue
        if smaller < 1:
            raise Error(f"{whole.bound}: {part} inputs may not name all of the {count} groups of {k} inputs")
        for parameter, value in whole.params.items():
            changed = {**params, parameter: smaller}
            if value == size and _has_groups(name, changed, t.name, smaller):
                return changed
        raise Error(f"{whole.bound}: no parameter is the size of a group of `{t}`, of which a part needs as many")
    return dict(params)


def _has_groups(scheme: str, params: Mapping[str, Any], index: str, size: int) -> bool:
    try:
        return resolved(scheme, params, None).tensor(index).extent == Group("k", size)
    except SchemeError:
        return False


# ---- the tensors of a part ---------------------------------------------------------------------------------------
def cut(
    whole: Scheme, own: Scheme, layout: str, part: Part, phase: str, bias: bool,
    headers: Mapping[str, torch.Tensor], prefix: str, read: Read,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The stored tensors of a part, in the layout of those of the whole layer, which fit it; by full name.

    own      the part's scheme; `whole` but for the sizes of groups
    bias     whether the layer has its optional bias
    headers  of the whole layer's tensors; `read` gives their numbers
    """
    storage, kept = whole.layouts[layout], kept_tensors(whole, bias, phase)
    sizes = {"e": 1, "m": 1, "n": part.of[0], "k": part.of[1]}
    result: dict[str, torch.Tensor] = {}
    records: dict[str, list[Binding]] = {}
    for binding in storage.bindings:
        name, declared = prefix + binding.source, kept.get(binding.tensor)
        if declared is None or (declared.role == "bias" and declared.optional and not part.has_bias):
            continue
        if storage.record is not None:
            records.setdefault(name, []).append(binding)
            continue
        header = headers[name]
        shape = repack.logical_shape(whole, binding, sizes, header)
        window = _window(declared, own, part, shape)
        result[name] = _cut(binding, declared, shape, window, header, lambda at, name=name: read(name, at))
        if declared.role == "bias" and not part.has_bias:
            result[name] = torch.zeros_like(result[name])  # every layer of the scheme has one; the first rank's counts
    for name, bindings in records.items():
        raw = read(name, tuple(slice(0, size) for size in headers[name].shape))
        result[name] = _cut_records(whole, own, storage, bindings, part, sizes, raw)
    return result


def cut_patterns(
    whole: Scheme, own: Scheme, part: Part, patterns: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:  # fmt: skip
    """What a part has of the logical bit patterns of the weight's tensors, by declared name."""
    result = {}
    for name, elements in patterns.items():
        everything = tuple(slice(0, size) for size in elements.shape)
        result[name] = _elements(elements, everything, _window(whole.tensor(name), own, part, elements.shape))
    return result


@dataclass(frozen=True)
class Window:
    """Of the elements of one index: those from `start` to `stop`, of `size` that the part has; others of it are 0."""

    start: int
    stop: int
    size: int


def _window(declared: Tensor, own: Scheme, part: Part, shape: tuple[int, ...]) -> tuple[Window, ...]:
    return tuple(_along(i, own, part, size) for i, size in zip(declared.index, shape, strict=True))


def _along(index: Index, own: Scheme, part: Part, size: int) -> Window:
    match index:
        case Var("n") | Var("k"):
            span, unit = part.rows if index.axis == "n" else part.columns, 1
        case Group("n" | "k", int(unit)):
            span = part.rows if index.axis == "n" else part.columns
        case Gather():  # any input may name any group
            return Window(0, size, extent_of(index, {"k": part.k, "n": part.n}, own))
        case _:
            return Window(0, size, size)
    start, stop = span.start // unit, -(-span.stop // unit)
    return Window(start, stop, stop - start)


def _cut(
    binding: Binding, declared: Tensor, shape: tuple[int, ...], window: tuple[Window, ...], header: torch.Tensor,
    read: Callable[[tuple[slice, ...]], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """One stored tensor of a part."""
    layout, wanted = binding.layout, tuple(slice(w.start, w.stop) for w in window)
    if not shape:  # a scalar, maybe as [1]
        return read(tuple(slice(0, size) for size in header.shape))
    at, held = layout.cover(shape, wanted)
    stored = read(tuple(slice(a.start, min(a.stop, size)) for a, size in zip(at, header.shape, strict=True)))
    if held == wanted and all(w.size == w.stop - w.start for w in window):
        return stored.contiguous()
    word = stored.element_size() * 8
    layout = replace(layout, word=word) if repack.is_packed(binding) else replace(layout, word=word, bits=word)
    words = repack.bits_of(stored)
    added = words.dtype.type(binding.words % (1 << word))  # to whole words, so that fields are read without it
    elements = layout.unpack(words + added, tuple(h.stop - h.start for h in held))
    return repack.tensor_of(layout.pack(_elements(elements, held, window)) - added, stored.dtype)


def _elements(elements: np.ndarray, held: tuple[slice, ...], window: tuple[Window, ...]) -> np.ndarray:
    """Those of a window, of those that are held."""
    own = elements[tuple(slice(w.start - h.start, w.stop - h.start) for w, h in zip(window, held, strict=True))]
    return np.pad(own, [(0, w.size - own.shape[i]) for i, w in enumerate(window)])


def _cut_records(
    whole: Scheme, own: Scheme, storage: Storage, bindings: list[Binding], part: Part, sizes: Mapping[str, int],
    raw: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The records of a part: the fields of each binding, cut and put together again."""
    parts = []
    for binding in bindings:
        declared, shape = whole.tensor(binding.tensor), repack.logical_shape(whole, binding, sizes)
        everything = tuple(slice(0, size) for size in shape)
        elements = binding.layout.unpack(repack.from_records(whole, storage, binding, sizes, raw), shape)
        parts.append(
            (binding, binding.layout.pack(_elements(elements, everything, _window(declared, own, part, shape))))
        )
    return repack.tensor_of(repack.to_records(parts, storage.record), raw.dtype)
