"""The float64 reference: what a scheme means, evaluated directly from its equations.

Tensors are given as unsigned bit patterns of their logical shape (what `Layout.unpack` returns), keyed by declared
name.  `linear` also returns an error bound derived from the declared types, so that no test needs a tolerance.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qdsl import transform
from qdsl.dtype import F32, DType
from qdsl.expr import REDUCTIONS, Binary, Call, Expr, Item, Negate, Ref, evaluate, names, substitute, walk
from qdsl.precision import DECLARED, Precision
from qdsl.scheme import AXES, Activation, Extent, Free, Gather, Group, Index, Operand, Scheme, Tensor, Transform, Var
from qdsl.split import Split, split

Patterns = Mapping[str, np.ndarray]


# ---- tensors over the four axes ----------------------------------------------------------------------------------
class _Axes:
    """Expands tensors to arrays over (e, m, n, k), size 1 where they don't vary, and reduces them back."""

    def __init__(self, scheme: Scheme, sizes: Mapping[str, int], patterns: Patterns):
        self.scheme, self.sizes = scheme, sizes
        self.values: dict[str, np.ndarray] = {}
        self.groups: dict[str, np.ndarray] = {}  # index tensor -> the position each k names
        for tensor in scheme.tensors:
            if tensor.dtype.kind == "index" and tensor.name in patterns:
                self.groups[tensor.name] = patterns[tensor.name].astype(np.int64)
        for tensor in scheme.tensors:
            if isinstance(tensor.value, tuple):
                self.values[tensor.name] = tensor.dtype.round(np.array(tensor.value))
            elif tensor.name in patterns and tensor.dtype.kind != "index":
                decoded = tensor.dtype.decode(patterns[tensor.name])
                free = tensor.role == "table" or any(isinstance(i, Free | Extent) for i in tensor.index)
                self.values[tensor.name] = decoded if free else self.expand(tensor.index, decoded)

    def expand(self, index: tuple[Index, ...], array: np.ndarray) -> np.ndarray:
        shape = [1] * len(AXES)
        order = []
        for at, i in enumerate(index):
            axis = "k" if isinstance(i, Gather) else i.axis
            if isinstance(i, Group) and i.size is not None:
                array = _first(np.repeat(array, i.size, at), self.sizes[axis], at)
            elif isinstance(i, Gather):
                array = array.take(self.groups[i.tensor], at)
            shape[AXES.index(axis)] = array.shape[at]
            order.append(AXES.index(axis))
        return array.transpose(np.argsort(order)).reshape(shape)

    def reduce(self, call: Call, value: np.ndarray, index: tuple[Index, ...]) -> np.ndarray:
        """Reduce `value` over everything `index` lacks, inside its groups; the result is expanded again."""
        operation = REDUCTIONS[call.name]
        ufunc = _UFUNC[call.name]
        by_axis = {"k" if isinstance(i, Gather) else i.axis: i for i in index}
        for at, axis in enumerate(AXES):
            i, size = by_axis.get(axis), value.shape[at]
            if size == 1 or isinstance(i, Var):
                continue
            if isinstance(i, Gather):
                ids = self.groups[i.tensor]
                out = np.empty_like(value)
                for group in np.unique(ids):
                    members = np.flatnonzero(ids == group)
                    part = operation(value.take(members, at), axis=at, keepdims=True)
                    out[(slice(None),) * at + (members,)] = part
                value = out
            elif isinstance(i, Group) and i.size is not None:
                part = ufunc.reduceat(value, range(0, size, i.size), axis=at)
                value = _first(np.repeat(part, i.size, at), size, at)
            else:
                value = operation(value, axis=at, keepdims=True)
        return value

    def collapse(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        """The logical tensor out of an expanded array."""
        full = [self.sizes.get(axis, 1) if any(_axis(i) == axis for i in tensor.index) else 1 for axis in AXES]
        value = np.broadcast_to(value, [max(f, 1) for f in full])
        for i in tensor.index:
            at = AXES.index(_axis(i))
            if isinstance(i, Group):
                value = value.take(range(0, value.shape[at], i.size or value.shape[at]), at)
            elif isinstance(i, Gather):
                ids = self.groups[i.tensor]
                count = tensor.shape(self.sizes, self.scheme)[tensor.index.index(i)]
                first = [int(np.argmax(ids == g)) for g in range(count)]
                value = value.take(first, at) * np.isin(range(count), ids).reshape(
                    [-1 if a == at else 1 for a in range(4)]
                )
        order = [AXES.index(_axis(i)) for i in tensor.index]
        rest = [a for a in range(4) if a not in order]
        return value.transpose([*order, *rest]).reshape(tensor.shape(self.sizes, self.scheme))

    def look_up(self, node: Expr) -> np.ndarray:
        return self.values[node.name]

    def evaluate(self, e: Expr, index: tuple[Index, ...] = ()) -> np.ndarray:
        return evaluate(e, self.look_up, lambda call, value: self.reduce(call, value, index))


_UFUNC = {"amax": np.maximum, "amin": np.minimum, "sum": np.add}  # what puts the reductions of two parts together


def _axis(i: Index) -> str:
    return "k" if isinstance(i, Gather) else i.axis


def _first(array: np.ndarray, size: int, at: int) -> np.ndarray:
    """The first elements along an axis."""
    return array[(slice(None),) * at + (slice(size),)]


# ---- bands of rows -----------------------------------------------------------------------------------------------
def bands(scheme: Scheme, n: int, k: int, elements: int) -> list[slice]:
    """Runs of a weight's rows that no group of rows crosses, of so many elements each where groups allow it."""
    groups = [
        i.size for t in scheme.weight.loaded for i in t.index if isinstance(i, Group) and i.axis == "n" and i.size
    ]
    unit = math.lcm(*groups)
    step = max(unit, elements // max(k, 1) // unit * unit)
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]


def in_band(tensor: Tensor, rows: slice, columns: slice | None = None) -> tuple[slice, ...]:
    """Where the elements of a tensor lie that belong to a band of rows, or to some columns of it: an index for all of it."""

    def cut(i: Index) -> slice:
        own = {"n": rows, "k": columns}.get(_axis(i))
        if own is None or isinstance(i, Gather):
            return slice(None)
        if isinstance(i, Var):
            return own
        return slice(None) if i.size is None else slice(own.start // i.size, -(-own.stop // i.size))

    return tuple(map(cut, tensor.index))


# ---- weights -----------------------------------------------------------------------------------------------------
def decode_weight(scheme: Scheme, patterns: Patterns, n: int, k: int) -> np.ndarray:
    """The exact float64 weight, [n, k] (or [e, n, k] for experts), from its tensors' bit patterns."""
    experts = next((patterns[t.name].shape[0] for t in scheme.weight.loaded if t.index[:1] == (Var("e"),)), 1)
    sizes = {"e": experts, "m": 1, "n": n, "k": k}
    value = _Axes(scheme, sizes, patterns).evaluate(scheme.weight.decode)
    value = np.broadcast_to(value, (experts, 1, n, k))
    return value[:, 0] if scheme.experts else value[0, 0]


def quantize(
    scheme: Scheme, weight: np.ndarray, index: Patterns | None = None, stored: DType | None = None
) -> dict[str, np.ndarray]:
    """Bit patterns of every weight tensor, made from a float weight [n, k] by the scheme's `quantize` block.

    index    the index tensors of act-order schemes; the default is k // group
    stored   of what format `weight` holds bit patterns; by default it holds numbers
    """
    if not scheme.quantize:
        raise ValueError(f"{scheme.name} has no quantize block")
    w = np.asarray(weight)
    w = w if w.ndim == 3 else w[None]
    sizes = {"e": w.shape[0], "m": 1, "n": w.shape[1], "k": w.shape[2]}
    result: dict[str, np.ndarray] = dict(index or {})
    for tensor in scheme.weight.loaded:
        if tensor.dtype.kind == "index" and tensor.name not in result:
            size = tensor.extent.size if isinstance(tensor.extent, Group) else None
            result[tensor.name] = (np.arange(sizes["k"]) // (size or sizes["k"])).astype(np.uint32)
    for name, value in scheme.quantize:
        result[name] = _Quantizer(scheme, w, stored, sizes, dict(result)).tensor(scheme.tensor(name), value)
    return result


_BAND = 1 << 16  # elements quantized at a time: the float64 temporaries of a band stay in a core's cache
_AT_ONCE = 1 << 18  # elements of all bands that are worked on, or 1/64 of the weight: beside it, temporaries are small


@dataclass
class _Quantizer:
    """One equation of a `quantize` block: w [e, n, k], and the tensors that the equations before it have made.

    stored   the format of w's bit patterns, if it holds these
    values   of reductions over all rows, as they stand in the equation
    """

    scheme: Scheme
    w: np.ndarray
    stored: DType | None
    sizes: Mapping[str, int]
    made: Patterns
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def tensor(self, tensor: Tensor, value: Expr) -> np.ndarray:
        """The tensor's bit patterns."""
        result = np.empty(tensor.shape(self.sizes, self.scheme), tensor.dtype.storage)
        by_rows = any(_axis(i) == "n" and (isinstance(i, Var) or i.size) for i in tensor.index)
        value = value if by_rows else self._reduced(value, tensor.index)

        def fill(rows: slice, columns: slice | None = None) -> None:
            axes = self._axes(value, rows, columns)
            part = axes.collapse(tensor, axes.evaluate(value, tensor.index))
            result[in_band(tensor, rows, columns)] = tensor.dtype.encode(part)

        self._each_band(fill, self._width(tensor, value)) if by_rows else fill(slice(0, min(1, self.sizes["n"])))
        return result

    def _width(self, tensor: Tensor, value: Expr) -> int | None:
        """Columns of which each can be computed by itself, or so many side by side; None: all are needed at once."""
        indices = [i for t in self.scheme.weight.tensors for i in t.index]
        own = next((i for i in tensor.index if _axis(i) == "k"), None)
        reduced = any(isinstance(e, Call) and e.name in REDUCTIONS for e in walk(value))
        if any(isinstance(i, Gather) for i in indices) or own is None:
            return None
        if reduced and isinstance(own, Group) and own.size is None:
            return None
        return math.lcm(*(i.size for i in indices if isinstance(i, Group) and i.axis == "k" and i.size))

    def _reduced(self, e: Expr, index: tuple[Index, ...]) -> Expr:
        """The expression with names for its reductions, which run over all rows."""
        e = e.map(lambda child: self._reduced(child, index))
        if not (isinstance(e, Call) and e.name in REDUCTIONS):
            return e

        def reduce(rows: slice) -> np.ndarray:
            axes = self._axes(e, rows)
            return _first(axes.reduce(e, axes.evaluate(e.args[0]), index), 1, AXES.index("n"))

        self.values[str(e)] = functools.reduce(_UFUNC[e.name], self._each_band(reduce))
        return Ref(str(e))

    def _each_band(self, compute: Callable[..., Any], width: int | None = None) -> list[Any]:
        """Of rows, and of columns where bands of rows are too large and `width` columns at a time will do."""
        n, k = self.sizes["n"], self.sizes["k"]
        parts: list[tuple[slice, ...]] = [(rows,) for rows in bands(self.scheme, n, self.sizes["e"] * k, _BAND)]
        height = self.sizes["e"] * max((rows.stop - rows.start for (rows,) in parts), default=0)
        if width is not None and height * k > _BAND:
            step = max(width, _BAND // height // width * width)
            parts = [(rows, slice(at, min(k, at + step))) for (rows,) in parts for at in range(0, k, step)]
        threads = max(_AT_ONCE, self.w.size // 64) * len(parts) // max(1, self.w.size)
        if min(threads, len(parts)) <= 1:
            return [compute(*part) for part in parts]
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:  # numpy holds no lock while it computes
            return list(pool.map(lambda part: compute(*part), parts))

    def _axes(self, e: Expr, rows: slice, columns: slice | None = None) -> _Axes:
        """What the expression may mention, of some rows, or some columns of them."""
        mentioned = names(e) | {t.name for t in self.scheme.weight.tensors if t.dtype.kind == "index"}
        cut = {n: p[in_band(self.scheme.tensor(n), rows, columns)] for n, p in self.made.items() if n in mentioned}
        columns = columns or slice(0, self.sizes["k"])
        sizes = {"n": rows.stop - rows.start, "k": columns.stop - columns.start}
        axes = _Axes(self.scheme, {**self.sizes, **sizes}, cut)
        w = self.w[:, None, rows, columns]
        axes.values["w"] = w.astype(np.float64) if self.stored is None else self.stored.decode(w)
        axes.values |= self.values
        return axes


# ---- activations -------------------------------------------------------------------------------------------------
REDUCED = "x.reduced"  # x as reductions see it: apart from x where its error moves the two on their own


@dataclass(frozen=True)
class _Inputs:
    """x [m, k] after the transforms, and how far the x of a kernel, which computes them in float32, may be from it."""

    x: np.ndarray
    error: np.ndarray

    def moved(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(x, x as reductions see it) at the ends of what a kernel may have: every element up or down; what is reduced
        up, down, away from zero or towards it."""
        if not self.error.any():
            yield self.x, self.x
            return
        size, sign = np.abs(self.x), np.sign(self.x)
        ends = (self.x + self.error, self.x - self.error)
        outward, inward = sign * (size + self.error), sign * np.maximum(size - self.error, 0)
        yield from itertools.product(ends, (*ends, outward, inward))


def activate(
    scheme: Scheme, x: np.ndarray, patterns: Patterns, phase: str = "", nudges: Sequence[float] = ()
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the float64 activation after quantization [m, k], patterns of every computed tensor).

    `nudges` multiply the computed tensors, in order, by 1 + nudge before they round: how far a result can move when a
    kernel's arithmetic is off by that much, which matters next to ties.
    """
    scheme = scheme.in_phase(phase)
    block, patterns = scheme.activation(), _loaded(scheme, patterns)
    if block is None:
        return np.asarray(x, np.float64), {}
    found = _transformed(block, x, patterns).x
    return _quantized(scheme, block, found, found, patterns, nudges)


def _loaded(scheme: Scheme, patterns: Patterns) -> Patterns:
    """Without those of other phases, which may compute what this one loads."""
    return {t.name: patterns[t.name] for t in scheme.tensors if t.loaded and t.name in patterns}


def _quantized(
    scheme: Scheme, block: Activation, x: np.ndarray, reduced: np.ndarray, patterns: Patterns,
    nudges: Sequence[float] = (),
) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
    """The same for an x that is transformed already; `reduced` is x as reductions see it."""
    sizes = {"e": 1, "m": x.shape[0], "n": 1, "k": x.shape[1]}
    axes = _Axes(scheme, sizes, {t.name: patterns[t.name] for t in block.operand.loaded})
    axes.values["x"], axes.values[REDUCED] = x[None, :, None, :], reduced[None, :, None, :]
    computed: dict[str, np.ndarray] = {}
    for tensor in block.operand.tensors:
        if isinstance(tensor.value, Expr):
            nudge = nudges[len(computed)] if nudges else 0.0
            value = axes.collapse(tensor, axes.evaluate(_apart(tensor.value), tensor.index)) * (1 + nudge)
            computed[tensor.name] = tensor.dtype.encode(value)
            axes.values[tensor.name] = axes.expand(tensor.index, tensor.dtype.decode(computed[tensor.name]))
    value = axes.evaluate(block.operand.decode)
    return np.broadcast_to(value, (1, x.shape[0], 1, x.shape[1]))[0, :, 0, :], computed


def _apart(e: Expr) -> Expr:
    """The expression with a name of its own for the x that is reduced."""
    if isinstance(e, Call) and e.name in REDUCTIONS:
        return substitute(e, {"x": Ref(REDUCED)})
    return e.map(_apart)


def _slack(
    scheme: Scheme, block: Activation, inputs: _Inputs, patterns: Patterns, a: np.ndarray, computed: int
) -> np.ndarray:
    """How far a kernel's quantized activation may be from `a`, element by element.

    Its scales and codes are computed in float32, from an x whose transforms are sums in float32: next to a tie a code is
    the neighbour, and next to a power of two so is a scale that is one.
    """
    slack = np.zeros_like(a)
    for x, reduced in inputs.moved():
        for nudges in itertools.product((-4 * F32.unit, 4 * F32.unit), repeat=computed):
            moved, _ = _quantized(scheme, block, x, reduced, patterns, nudges)
            slack = np.maximum(slack, np.abs(moved - a))
    # Between two ends a code may keep its value while the scale has moved, by no more than the largest error of a row.
    return slack + inputs.error.max(axis=1, initial=0.0, keepdims=True)


# ---- transforms --------------------------------------------------------------------------------------------------
def _transformed(block: Activation, x: np.ndarray, patterns: Patterns) -> _Inputs:
    x = np.asarray(x, np.float64)
    error = np.zeros_like(x)
    values = {t.name: t.dtype.decode(patterns[t.name]) for t in block.operand.loaded}
    for t in block.transforms:
        sizes = {name: np.abs(value) for name, value in values.items()}
        with np.errstate(invalid="ignore", over="ignore"):
            terms = apply_transform(t, np.abs(x), sizes)
            error = apply_transform(t, error, sizes) + _transform_roundings(t, x, values) * F32.unit * terms
            x = apply_transform(t, x, values)
    return _Inputs(x, error)


def _transform_roundings(t: Transform, x: np.ndarray, values: Mapping[str, np.ndarray]) -> float:
    """How often a term rounds on its way through the contractions: in every product, and in sums as a random walk at
    twice its standard deviation, or where they are short, in every addition."""
    size = transform.extents(t, {"x": x.shape, **{name: v.shape for name, v in values.items()}})
    count = 0.0
    for c in transform.contractions(t):
        terms = math.prod(size[d] for d in c.summed)
        count += len(c.factors) + (min(terms, 8 + 2 * math.sqrt(terms)) if terms > 1 else 0)
    return count


def apply_transform(t: Transform, x: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """x [m, k] after one transform: a product of tensors over named digits, summed over those the left side lacks.

    values   the loaded tensors, in their logical shapes; raises ValueError where these disagree
    """
    arrays = {"x": x, **values}
    extent = {"m": x.shape[0], **transform.extents(t, {name: a.shape for name, a in arrays.items()})}
    letter = {d: chr(97 + at) for at, d in enumerate(extent)}
    found = transform.factors(t)
    spec = ",".join("".join(letter[d] for d in f.digits) for f in found)
    spec += "->" + "".join(letter[d] for d in ("m", *transform.result(t)))
    split = [arrays[f.name].reshape([extent[d] for d in f.digits]) for f in found]
    return np.einsum(spec, *split, optimize=True).reshape(x.shape)


# ---- the layer ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """y in float64 before its last rounding, and how far a right kernel's rounded result may be from it."""

    y: np.ndarray
    bound: np.ndarray


def linear(
    scheme: Scheme,
    x: np.ndarray,
    patterns: Patterns,
    n: int,
    *,
    phase: str = "",
    precision: Precision = DECLARED,
    expert: int = 0,
) -> Result:
    """The layer's output for x [m, k], with a bound derived from the declared types.

    |y - kernel| <= (roundings of the operands) + (roundings of the sum) + (rounding of the output)

    What is computed of x on its way, by transforms or as scales and codes, is in float32 and off as `_slack` says.

    The operands round once to the compute type unless their core and factors are exact in it; the sum is a random walk
    of k roundings of the accumulator, taken at twice its standard deviation; integer sums are exact.  What kernels keep less
    exactly than that is added (`precision`): an offset enlarges the sum's terms, for sums that are cut see `_short_sums`, for x
    `cut`.  `expert` chooses one of a stack.
    """
    scheme, k = scheme.in_phase(phase), x.shape[1]
    patterns = _loaded(scheme, patterns)
    w = decode_weight(scheme, patterns, n, k)
    w = w[expert] if scheme.experts else w
    block = scheme.activation()
    if block is None:
        a, computed, slack = np.asarray(x, np.float64), {}, np.zeros(x.shape)
    else:
        inputs = _transformed(block, x, patterns)
        a, computed = _quantized(scheme, block, inputs.x, inputs.x, patterns)
        slack = _slack(scheme, block, inputs, patterns, a, len(computed))
    with np.errstate(invalid="ignore", over="ignore"):
        acc = a @ w.T
        terms = np.abs(a) @ np.abs(w).T
        error = slack @ np.abs(w).T
        compute, total = scheme.compute.operand, scheme.compute.accumulator
        roundings = _roundings(scheme.weight, compute, "w") + (
            _roundings(block.operand, compute, "x") if block else _loses(scheme.output.dtype, compute)
        )
        if block and block.transforms and "x" in names(block.operand.decode):  # what was exact in its type is no more
            roundings += _loses(F32, compute)
        error = error + roundings * compute.unit * terms
        unit = total.unit if total.is_float else 0.0
        steps = (8 + 2 * np.sqrt(k)) * unit + 8 * F32.unit
        added = _correction(
            scheme, patterns, n, k, expert
        )  # to sums on its own, so that what cancels in w does not there
        error = error + steps * (terms if added is None else np.abs(a) @ (np.abs(w - added) + np.abs(added)).T)
        if precision.offset:
            error = error + steps * precision.offset * (np.abs(a) @ np.abs(_factor(scheme, patterns, n, k)).T)
        if precision.kept is not None:
            error = error + _short_sums(a, w, precision.kept)
        if precision.x_bits is not None:
            error = error + cut(a, precision.x_bits) @ np.abs(w).T
    return epilogue(scheme, acc, error, {**patterns, **computed})


def cut(a: np.ndarray, x_bits: int) -> np.ndarray:
    """How far numbers of x may be off that are rounded to multiples of a power of two, for all that lie near each other, of which
    the largest has so many bits: one that is 255/256 of the next power of two or more, one more. Numbers that are multiples are
    not off."""
    largest = np.abs(a).max(1, keepdims=True)
    unit = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest * (1 + 2.0**-7), 1.0))) - x_bits)
    return np.where(np.isfinite(largest) & (a % unit != 0), unit, 0.0)


RUN = 128  # inputs whose products a multiplier of fp8 sums before they are added to a float32
PRODUCTS = 32  # of an instruction


def _short_sums(a: np.ndarray, w: np.ndarray, kept: int) -> np.ndarray:
    """How far sums of fp8 products on tensor cores may be off.

    An instruction adds 32 products to what it has: all of them cut off `kept` bits below the leading bit of the largest
    (DeepSeek-V3 Technical Report, section 3.3, and measured). A cut is off by up to a unit, evenly; so the 132 of 128 inputs are
    off by a random walk, taken at twice its standard deviation.
    """
    error = np.zeros((len(a), len(w)))
    walk = 2 * np.sqrt(RUN // PRODUCTS * (PRODUCTS + 1) / 12) * 2.0**-kept
    for start in range(0, a.shape[1], RUN):
        end = min(start + RUN, a.shape[1])
        largest = np.outer(np.abs(a[:, start:end]).max(1), np.abs(w[:, start:end]).max(1))
        total = np.zeros_like(error)
        for first in range(start, end, PRODUCTS):
            part = slice(first, min(first + PRODUCTS, end))
            total = total + a[:, part] @ w[:, part].T
            largest = np.maximum(largest, np.abs(total))
        error = error + walk * largest
    return error


def epilogue(scheme: Scheme, acc: np.ndarray, error: np.ndarray, patterns: Patterns) -> Result:
    """Apply the output block to a sum known to within `error`."""
    m, n = acc.shape

    def output(sum_: np.ndarray, value: Expr = scheme.output.value, of=lambda held: held) -> np.ndarray:
        sizes = {"e": 1, "m": m, "n": n, "k": 1}
        absent = {t.name: np.zeros(t.shape({**sizes, "k": 1}), t.dtype.storage) for t in scheme.output.tensors}
        used = names(value)
        given = {t.name: patterns[t.name] for t in scheme.tensors if t.name in patterns and t.name in used}
        axes = _Axes(scheme, sizes, absent | given)
        halves = scheme.output.half[1] if scheme.output.half else 1
        parts = sum_.reshape(m, halves, -1)

        def look_up(node: Expr) -> np.ndarray:
            if isinstance(node, Item):  # acc[r = 0]
                return parts[:, node.args[0].value]
            if node == Ref("acc"):
                return sum_
            held = axes.values[node.name]
            return of(held.reshape(held.shape[1:3]))

        return evaluate(value, look_up, lambda *_: None)

    with np.errstate(invalid="ignore", over="ignore"):
        y = output(acc)
        spread, parts = np.zeros_like(y), scheme.output.half[1] if scheme.output.half else 1
        for signs in itertools.product((-1, 1), repeat=parts):  # the sums of gate and up are off on their own
            moved = acc + (error.reshape(m, parts, -1) * np.array(signs)[:, None]).reshape(m, n)
            spread = np.maximum(spread, np.abs(output(moved) - y))
        terms = output(np.abs(acc), _added(scheme.output.value), np.abs)  # what may have been cancelled on the way
        operations = 16 * F32.unit * (np.abs(y) + np.abs(terms))
        out = scheme.output.dtype
        bound = 1.1 * spread + operations + 1.01 * out.unit * np.abs(y) + out.quantum
    return Result(y, bound)


def _added(e: Expr) -> Expr:
    """The expression without its minus signs."""
    match e:
        case Binary(op="-"):
            return replace(e, op="+", left=_added(e.left), right=_added(e.right))
        case Binary():
            return replace(e, left=_added(e.left), right=_added(e.right))
        case Negate():
            return _added(e.arg)
        case Call():
            return replace(e, args=tuple(map(_added, e.args)))
        case _:
            return e


def _roundings(operand: Operand, compute: DType, given: str) -> float:
    """How often a weight, or a number of x, rounds on its way to the multiplier."""
    found = split(operand, compute, given)
    assert isinstance(found, Split), "checked schemes split"
    if not compute.is_float or compute.bits < 16:
        return 0
    if found.exact and found.fold is None and found.epilogue is None:
        return 0
    # A float zero point is taken off first. A scale of many bits may be the sum of two numbers that lack a few of them.
    return 1.01 + (found.correction is not None)


def _loses(given: DType, compute: DType) -> int:
    """Whether x rounds on its way to the multiplier."""
    return int(not (given.precision <= compute.precision and given.max <= compute.max))


def _correction(scheme: Scheme, patterns: Patterns, n: int, k: int, expert: int) -> np.ndarray | None:
    """The part of the weight that does not vary within a group, [n, k]; None where all of it meets the multiplier."""
    found = split(scheme.weight, scheme.compute.operand, "w")
    assert isinstance(found, Split)
    if found.correction is None:
        return None
    experts = next((patterns[t.name].shape[0] for t in scheme.weight.loaded if t.index[:1] == (Var("e"),)), 1)
    axes = _Axes(scheme, {"e": experts, "m": 1, "n": n, "k": k}, patterns)
    value = axes.evaluate(found.correction)
    if found.epilogue is not None:
        value = value * axes.evaluate(found.epilogue)
    return np.broadcast_to(value, (experts, 1, n, k))[expert, 0]


def _factor(scheme: Scheme, patterns: Patterns, n: int, k: int) -> np.ndarray:
    """|fold * epilogue| of the weight, spread over [n, k]."""
    found = split(scheme.weight, scheme.compute.operand, "w")
    assert isinstance(found, Split)
    axes = _Axes(scheme, {"e": 1, "m": 1, "n": n, "k": k}, patterns)
    value: np.ndarray = np.ones((1, 1, 1, 1))
    for factor in (found.fold, found.promote, found.epilogue):
        if factor is not None:
            value = value * axes.evaluate(factor)
    return np.broadcast_to(np.abs(value), (1, 1, n, k))[0, 0]


# ---- data for tests ----------------------------------------------------------------------------------------------
def random_patterns(
    scheme: Scheme, rng: np.random.Generator, n: int, k: int, *, experts: int = 1, free: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Random bit patterns of every stored tensor: all codes occur, neighbouring groups' scales differ by up to 16.

    A residual is not stored: it comes with each call.  `free` gives the extents that a checkpoint decides, by default
    some that k allows; raises ValueError where it allows none.
    """
    free = transform.free_sizes(scheme, k) if free is None else free
    if free is None:
        raise ValueError(f"no x of {k} features can be transformed as {scheme.bound} says")
    sizes = {"e": experts, "m": 1, "n": n, "k": k, **free}
    result = {}
    for t in (t for t in scheme.tensors if t.loaded and Var("m") not in t.index):
        shape = t.shape(sizes, scheme)
        if t.dtype.kind == "index":
            size = t.extent.size if isinstance(t.extent, Group) else None
            result[t.name] = rng.permutation(np.arange(k) // (size or k)).astype(np.uint32)
        elif t.role == "code" or (t.role == "zero" and t.dtype.bits <= 8 and t.dtype.is_integer):
            result[t.name] = _finite_patterns(t.dtype, rng, shape)
        elif t.role == "scale":
            exponent = rng.integers(-2, 3, shape).astype(float)
            base = 3.0 if t.dtype.is_integer else 2.0**-7
            result[t.name] = t.dtype.encode(rng.uniform(0.5, 1, shape) * base * 2**exponent)
        else:
            scale = 64.0 if t.dtype.is_integer else 1.0
            result[t.name] = t.dtype.encode(rng.standard_normal(shape) * scale)
    return result


def _finite_patterns(dtype: DType, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    pattern = rng.integers(0, 1 << dtype.bits, shape).astype(dtype.storage)
    return np.where(np.isfinite(dtype.decode(pattern)), pattern, 0).astype(dtype.storage)
