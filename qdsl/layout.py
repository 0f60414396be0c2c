"""A storage layout is a permutation of index digits.

    q[(c l), k] = "qweight"[k, c {l: 0 2 4 6 1 3 5 7}]

Left: each logical index, split into mixed-radix digits.  Right: the same digits regrouped into the stored tensor's
axes.  Digits in braces share one run of words, the last one written in the lowest bits; an order list names the digit
values from the lowest lane up.  Packing, unpacking, the address of one element and the printed line all follow from
this one value, and repacking is `target.pack(source.unpack(words, shape))`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_BAND = 1 << 20  # elements that are packed at a time: what is made on the way is small, and stays in the cache


@dataclass(frozen=True)
class Digit:
    name: str
    extent: int | None = None  # None: whatever the index leaves over, rounded up

    def __str__(self) -> str:
        return self.name if self.extent is None else f"{self.name}:{self.extent}"


@dataclass(frozen=True)
class Lane:
    name: str
    order: tuple[int, ...] | None = None  # lane i holds digit value order[i]

    def __str__(self) -> str:
        return self.name if self.order is None else f"{self.name}: {' '.join(map(str, self.order))}"


@dataclass(frozen=True)
class Run:
    """Lanes packed densely into words.  `bits` = (first, count) takes a part of each element; `pad` bits stay unused."""

    lanes: tuple[Lane, ...]
    bits: tuple[int, int] | None = None
    pad: int = 0

    def __str__(self) -> str:
        pad = f" pad {self.pad}" if self.pad else ""
        part = f".{self.bits[0]}:{self.bits[1]}" if self.bits else ""
        return f"{{{' '.join(map(str, self.lanes))}{pad}}}{part}"


@dataclass(frozen=True)
class Axis:
    digits: tuple[str, ...]
    runs: tuple[Run, ...] = ()

    def __str__(self) -> str:
        return " ".join([*self.digits, *map(str, self.runs)]) or "1"


@dataclass(frozen=True)
class Field:
    """Where `width` bits of an element lie: from bit `shift` of the word at `index` into bit `low` of the element.

    When a field may run over the end of its word, `following` is the index of the word that holds the rest; it must be
    read only if `shift + width` exceeds the word (the last word of a tensor has no successor).
    """

    index: tuple[Any, ...]
    shift: Any
    low: int
    width: int
    following: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Layout:
    dims: tuple[tuple[Digit, ...], ...]
    axes: tuple[Axis, ...]
    bits: int  # of one element
    word: int  # of one stored word
    places: tuple[int, ...] = ()  # where the bits of a word lie, from the lowest up; empty: where the runs put them

    def __str__(self) -> str:
        left = ", ".join(str(d[0]) if len(d) == 1 else f"({' '.join(map(str, d))})" for d in self.dims)
        line = f"[{left}] = [{', '.join(map(str, self.axes))}] : {self.bits}-bit elements in {self.word}-bit words"
        return f"{line}, bits at {' '.join(map(str, self.places))}" if self.places else line

    # ---- extents ------------------------------------------------------------------------------------------------
    def extents(self, shape: Sequence[Any]) -> dict[str, Any]:
        """The extent of every digit for a logical shape (of ints, or of symbolic sizes)."""
        orders = {
            lane.name: len(lane.order) for axis in self.axes for run in axis.runs for lane in run.lanes if lane.order
        }
        extent: dict[str, Any] = {}
        for size, dim in zip(shape, self.dims, strict=True):
            known = {d.name: d.extent or orders.get(d.name) for d in dim}
            rest = math.prod(n for n in known.values() if n)
            extent |= {name: n or -(-size // rest) for name, n in known.items()}
            if isinstance(size, int) and math.prod(extent[d.name] for d in dim) < size:
                raise ValueError(f"{size} elements do not fit ({' '.join(map(str, dim))})")
        return extent

    def stored_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The stored tensor's shape, in words, for a logical shape."""
        extent = self.extents(shape)
        return tuple(self._axis_size(axis, extent) for axis in self.axes)

    def least_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape without the last words of an axis where all their elements lie beyond the size: tools that fill
        words one after another store no more."""
        least = list(self.stored_shape(shape))
        for at, axis in enumerate(self.axes):
            for size, dim in zip(shape, self.dims, strict=True):
                names = [d.name for d in dim]
                plain = Run(tuple(Lane(name) for name in names[1:]))  # a dense stream, in order
                if (axis.digits, axis.runs) == (tuple(names[:1]), (plain,)) and dim[0].extent is None:
                    least[at] = -(-size * self.bits // self.word)
        return tuple(least)

    def cover(self, shape: Sequence[int], window: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The smallest part of the stored tensor that is a stored tensor of this layout and holds a window of elements.

        Returns where it lies along the axes, and which elements it holds: those of the window, and what shares words or
        digits with them. Both slices have bounds. An index is cut where its open digit is the slowest of an axis.
        """
        extent = self.extents(shape)
        axes = [slice(0, size) for size in self.stored_shape(shape)]
        held = [slice(0, size) for size in shape]
        for at, (dim, size, part) in enumerate(zip(self.dims, shape, window, strict=True)):
            place = next((i for i, axis in enumerate(self.axes) if axis.digits[:1] == (dim[0].name,)), None)
            if place is None or dim[0].extent is not None or (part.start, part.stop) == (0, size):
                continue
            stride = math.prod(extent[d.name] for d in dim[1:])
            first, last = part.start // stride, -(-part.stop // stride)
            step = axes[place].stop // extent[dim[0].name]
            axes[place], held[at] = slice(first * step, last * step), slice(first * stride, min(last * stride, size))
        return tuple(axes), tuple(held)

    def _axis_size(self, axis: Axis, extent: dict[str, Any]) -> Any:
        size: Any = math.prod(extent[name] for name in axis.digits)
        return size * sum(self._run_words(run, extent) for run in axis.runs) if axis.runs else size

    def _run_words(self, run: Run, extent: dict[str, Any]) -> int:
        count = math.prod(extent[lane.name] for lane in run.lanes)
        return (count * self._width(run) + run.pad) // self.word

    def _width(self, run: Run) -> int:
        return run.bits[1] if run.bits else self.bits

    @property
    def _order(self) -> list[str]:
        """Digit names in stored order."""
        return [n for a in self.axes for n in (*a.digits, *(lane.name for lane in (a.runs[0].lanes if a.runs else ())))]

    # ---- whole tensors ------------------------------------------------------------------------------------------
    def pack(self, elements: np.ndarray) -> np.ndarray:
        """Logical elements (unsigned bit patterns) to stored words.  Elements beyond the size are written as zero."""
        extent = self.extents(elements.shape)
        names = [d.name for dim in self.dims for d in dim]
        full = [math.prod(extent[d.name] for d in dim) for dim in self.dims]
        if list(elements.shape) != full:
            elements = np.pad(elements, [(0, f - s) for f, s in zip(full, elements.shape, strict=True)])
        x = elements.reshape([extent[name] for name in names]).transpose([names.index(name) for name in self._order])
        if not (packed := self._packed):
            return (
                np.ascontiguousarray(x).reshape(self.stored_shape(elements.shape)).astype(self._word_type, copy=False)
            )
        at, lanes = packed
        words = np.zeros(self.stored_shape(elements.shape), self._word_type)
        x = np.moveaxis(x, range(at, at + len(lanes)), range(-len(lanes), 0))
        out, start = np.moveaxis(words.reshape(self._split(extent)), at, -1), 0
        for run in self._runs:
            count = self._run_words(run, extent)
            for band in _bands(x.shape, len(lanes)):
                self._pack_run(np.ascontiguousarray(x[band]), out[band][..., start : start + count], run, lanes, extent)
            start += count
        return _moved(words, enumerate(self.places)) if self.places else words

    def unpack(self, words: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Stored words (unsigned) to logical elements of the given shape; padding is dropped unread, and may be missing."""
        extent = self.extents(shape)
        expected = self.stored_shape(shape)
        if tuple(words.shape) != expected and tuple(words.shape) == self.least_shape(shape):
            words = np.pad(words, [(0, whole - least) for whole, least in zip(expected, words.shape, strict=True)])
        if tuple(words.shape) != expected:
            raise ValueError(f"stored shape is {list(words.shape)}, the layout needs {list(expected)}")
        names, order = [d.name for dim in self.dims for d in dim], self._order
        full = [math.prod(extent[d.name] for d in dim) for dim in self.dims]
        x = self.restored(words).reshape(self._split(extent))
        if not (packed := self._packed):
            x = x.transpose([order.index(name) for name in names]).reshape(full)
        else:
            at, lanes = packed
            whole = np.empty([extent[name] for name in names], f"uint{max(8, 1 << (self.bits - 1).bit_length())}")
            out = whole.transpose([names.index(name) for name in order])
            out = np.moveaxis(out, range(at, at + len(lanes)), range(-len(lanes), 0))
            x = np.moveaxis(x, at, -1)
            for band in _bands(out.shape, len(lanes)):
                elements = np.zeros(out[band].shape, out.dtype)
                self._unpack_runs(x[band], elements, lanes, extent)
                out[band] = elements
            x = whole.reshape(full)
        return np.asarray(x[tuple(slice(size) for size in shape)], order="C")  # a scalar stays a scalar

    def restored(self, words: Any, number: Callable[[int], Any] = int) -> Any:
        """Words with their bits where the runs put them: an array of stored words, or an expression for one, whose constants
        `number` makes."""
        return _moved(words, ((place, i) for i, place in enumerate(self.places)), number) if self.places else words

    @property
    def _packed(self) -> tuple[int, tuple[Lane, ...]] | None:
        """(where among the digits in stored order, the digits) of the axis whose words hold several elements."""
        at = 0
        for axis in self.axes:
            at += len(axis.digits)
            if axis.runs:
                return at, axis.runs[0].lanes
        return None

    @property
    def _runs(self) -> tuple[Run, ...]:
        return next((axis.runs for axis in self.axes if axis.runs), ())

    def _split(self, extent: dict[str, int]) -> list[int]:
        """The stored shape with every digit that counts words apart, and the words of runs together."""
        shape = []
        for axis in self.axes:
            shape += [extent[name] for name in axis.digits]
            if axis.runs:
                shape.append(sum(self._run_words(run, extent) for run in axis.runs))
        return shape

    @property
    def _word_type(self) -> np.dtype:
        return np.dtype(f"uint{self.word}")

    def _fields(self, run: Run, extent: dict[str, int]):
        """(position in the run, bit offset, width, first element bit) of every lane."""
        low, width = run.bits or (0, self.bits)
        count = math.prod(extent[lane.name] for lane in run.lanes)
        return [(i, i * width, width, low) for i in range(count)]

    def _lane_values(self, run: Run, lanes: tuple[Lane, ...], extent: dict[str, int]) -> list[tuple[int, ...]]:
        """For each position of the run, the digit values in the order of `lanes`."""
        values = []
        for position in range(math.prod(extent[lane.name] for lane in run.lanes)):
            digit: dict[str, int] = {}
            for lane in reversed(run.lanes):
                position, value = divmod(position, extent[lane.name])
                digit[lane.name] = lane.order[value] if lane.order else value
            values.append(tuple(digit[lane.name] for lane in lanes))
        return values

    def _pack_run(
        self, x: np.ndarray, out: np.ndarray, run: Run, lanes: tuple[Lane, ...], extent: dict[str, int]
    ) -> None:
        """Write the words of a run, from the elements with their lanes as last axes."""
        values = self._lane_values(run, lanes, extent)
        kind = np.result_type(x.dtype, self._word_type).type  # wide enough for both, and no wider
        for position, offset, width, low in self._fields(run, extent):
            element = (x[(..., *values[position])] >> x.dtype.type(low)).astype(kind, copy=False)
            element &= kind((1 << width) - 1)
            word, shift = divmod(offset, self.word)
            if shift + width > self.word:
                out[..., word + 1] |= (element >> kind(self.word - shift)).astype(self._word_type, copy=False)
            element <<= kind(shift)  # what leaves the word is in the next
            out[..., word] |= element.astype(self._word_type, copy=False)

    def _unpack_runs(self, x: np.ndarray, out: np.ndarray, lanes: tuple[Lane, ...], extent: dict[str, int]) -> None:
        """The inverse of all runs, into zeros."""
        start = 0
        for run in self._runs:
            values = self._lane_values(run, lanes, extent)
            for position, offset, width, low in self._fields(run, extent):
                word, shift = divmod(offset, self.word)
                field = x[..., start + word] >> self._word_type.type(shift)
                if shift + width > self.word:
                    field |= x[..., start + word + 1] << self._word_type.type(self.word - shift)
                field = field.astype(out.dtype, copy=False) & out.dtype.type((1 << width) - 1)
                out[(..., *values[position])] |= field << out.dtype.type(low)
            start += self._run_words(run, extent)

    # ---- one element --------------------------------------------------------------------------------------------
    def address(
        self, index: Sequence[Any], shape: Sequence[Any], look_up: Callable[[Any, tuple[int, ...]], Any] | None = None
    ) -> tuple[Field, ...]:
        """Where one logical element lies.  Indices and sizes may be ints or symbolic expressions.

        `look_up(value, table)` reads a constant table at a symbolic value (only order lists need it).
        """
        extent, value = self.extents(shape), {}
        for i, dim in zip(index, self.dims, strict=True):
            stride: Any = math.prod(extent[d.name] for d in dim[1:])
            for at, d in enumerate(dim):
                rest = i // stride if not _is_one(stride) else i
                value[d.name] = rest if at == 0 else rest % extent[d.name]
                if at + 1 < len(dim):
                    stride = math.prod(extent[e.name] for e in dim[at + 2 :])
        rows = [_horner((value[n], extent[n]) for n in axis.digits) for axis in self.axes]
        packed = next((i for i, axis in enumerate(self.axes) if axis.runs), None)
        if packed is None:
            return (Field(tuple(rows), 0, 0, self.bits),)
        runs, fields, start = self.axes[packed].runs, [], 0
        words = sum(self._run_words(run, extent) for run in runs)
        for run in runs:
            low, width = run.bits or (0, self.bits)
            position = _horner((self._position(lane, value, look_up), extent[lane.name]) for lane in run.lanes)
            bit = position * width
            at, shift = rows[packed] * words + start + bit // self.word, bit % self.word

            def place(word, rows=rows):
                return (*rows[:packed], word, *rows[packed + 1 :])

            following = place(at + 1) if self.word % width else None
            fields.append(Field(place(at), shift, low, width, following))
            start += self._run_words(run, extent)
        return tuple(fields)

    def _position(self, lane: Lane, value: dict[str, Any], look_up) -> Any:
        if lane.order is None:
            return value[lane.name]
        inverse = tuple(lane.order.index(i) for i in range(len(lane.order)))
        digit = value[lane.name]
        return inverse[digit] if isinstance(digit, int | np.integer) else look_up(digit, inverse)


def _moved(words: Any, bits: Iterable[tuple[int, int]], number: Callable[[int], Any] = int) -> Any:
    """Words with bit a of each at b, for all (a, b); those that go equally far go together."""
    masks: dict[int, int] = {}
    for a, b in bits:
        masks[b - a] = masks.get(b - a, 0) | 1 << b
    kind = words.dtype.type if isinstance(words, np.ndarray) else number
    parts = [
        (words << kind(by) if by > 0 else words >> kind(-by) if by else words) & kind(mask)
        for by, mask in masks.items()
    ]
    return functools.reduce(operator.or_, parts)


def _bands(shape: Sequence[int], lanes: int) -> Iterator[Any]:
    """Slices of the first axis, so that what is made of one is a few megabytes; the last `lanes` axes stay whole."""
    if len(shape) == lanes:
        yield ...
        return
    rows = max(1, _BAND // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield slice(start, start + rows)


def _is_one(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 1


def _horner(digits) -> Any:
    row: Any = 0
    for value, extent in digits:
        row = value if isinstance(row, int) and row == 0 else row * extent + value
    return row


@dataclass(frozen=True)
class Repack:
    """The composition of unpacking by one layout and packing by another: how a checkpoint becomes kernel input."""

    source: Layout
    target: Layout

    def __call__(self, words: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return self.target.pack(self.source.unpack(words, shape))

    @property
    def inverse(self) -> Repack:
        return Repack(self.target, self.source)

    def __str__(self) -> str:
        return f"{self.source}  ->  {self.target}"


def plain(rank: int, bits: int, word: int | None = None) -> Layout:
    """Elements in declared order, one word each."""
    names = "abcdefgh"[:rank]
    return Layout(tuple((Digit(n),) for n in names), tuple(Axis((n,)) for n in names), bits, word or bits)
