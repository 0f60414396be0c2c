"""Expressions: the equations of a scheme, their printed form, their ranges and their float64 values.

The same nodes serve the parsed file and the checked scheme; checking replaces parameters by numbers and calls of type
names by `Cast`.  Equality ignores spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from qdsl.diagnostic import Span
from qdsl.dtype import DType

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}


@dataclass(frozen=True)
class Expr:
    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)

    def children(self) -> tuple[Expr, ...]:
        return ()

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        """The same node over `f` of each child."""
        return self


@dataclass(frozen=True)
class Number(Expr):
    value: float | int
    text: str = field(default="", compare=False)  # as written, so that printing does not reformat constants

    def __str__(self) -> str:
        if self.text:
            return self.text
        return str(int(self.value)) if float(self.value).is_integer() and abs(self.value) < 1e15 else repr(self.value)


@dataclass(frozen=True)
class Ref(Expr):
    """A declared tensor (its current element), an index variable, or a given value."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Digits(Expr):
    """`(c d)`: an index written as the digits it splits into; legal only inside the brackets of a transform."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"({' '.join(self.names)})"


@dataclass(frozen=True)
class Half(Expr):
    """`r = 0`: one value of a digit that the output block splits off."""

    digit: str
    value: int

    def __str__(self) -> str:
        return f"{self.digit} = {self.value}"


@dataclass(frozen=True)
class Item(Expr):
    """`c[q]`: a table entry, or a tensor at explicit indices."""

    name: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.args))}]"

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        return replace(self, args=tuple(map(f, self.args)))


@dataclass(frozen=True)
class Call(Expr):
    name: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        return replace(self, args=tuple(map(f, self.args)))


@dataclass(frozen=True)
class Cast(Expr):
    """Rounding to a number format: the only operation of an equation that is not exact."""

    dtype: DType
    arg: Expr

    def __str__(self) -> str:
        return f"{self.dtype}({self.arg})"

    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        return replace(self, arg=f(self.arg))


@dataclass(frozen=True)
class Binary(Expr):
    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        level = PRECEDENCE[self.op]
        left, right = _wrap(self.left, level), _wrap(self.right, level + 1)
        return f"{left} {self.op} {right}"

    def children(self) -> tuple[Expr, ...]:
        return (self.left, self.right)

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        return replace(self, left=f(self.left), right=f(self.right))


@dataclass(frozen=True)
class Negate(Expr):
    arg: Expr

    def __str__(self) -> str:
        return f"-{_wrap(self.arg, 3)}"

    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)

    def map(self, f: Callable[[Expr], Expr]) -> Expr:
        return replace(self, arg=f(self.arg))


@dataclass(frozen=True)
class Stored(Expr):
    """The stored tensor inside a layout's value convention, as in `"qzeros"[…] + 1`."""

    def __str__(self) -> str:
        return "stored"


def _wrap(e: Expr, level: int) -> str:
    low = (isinstance(e, Binary) and PRECEDENCE[e.op] < level) or (isinstance(e, Negate) and level > 2)
    return f"({e})" if low else str(e)


def walk(e: Expr) -> Iterator[Expr]:
    """`e` and everything below it, parents first."""
    yield e
    for child in e.children():
        yield from walk(child)


def names(e: Expr) -> set[str]:
    """Every tensor, variable or table mentioned."""
    return {node.name for node in walk(e) if isinstance(node, Ref | Item)}


def substitute(e: Expr, value: Mapping[str, Expr]) -> Expr:
    """Replace references by expressions."""
    if isinstance(e, Ref) and e.name in value:
        return value[e.name]
    return e.map(lambda child: substitute(child, value))


def product(factors: list[Expr]) -> Expr | None:
    """The factors multiplied from left to right; None for no factor."""
    result: Expr | None = None
    for factor in factors:
        result = factor if result is None else Binary("*", result, factor)
    return result


# ---- functions ---------------------------------------------------------------------------------------------------
def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


# Elementwise functions: float64 meaning, number of arguments.  gelu is the exact one, x·Φ(x) (Hendrycks and Gimpel).
FUNCTIONS: dict[str, tuple[Callable[..., np.ndarray], int]] = {
    "abs": (np.abs, 1),
    "round": (np.rint, 1),
    "floor": (np.floor, 1),
    "ceil": (np.ceil, 1),
    "exp2": (np.exp2, 1),
    "log2": (np.log2, 1),
    "min": (np.minimum, 2),
    "max": (np.maximum, 2),
    "relu": (lambda x: np.maximum(x, 0), 1),
    "sigmoid": (_sigmoid, 1),
    "silu": (lambda x: x * _sigmoid(x), 1),
    "gelu": (_gelu, 1),
    "tanh": (np.tanh, 1),
}
# Reductions run over every index that the left side of the equation lacks, inside its group.
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {"amax": np.max, "amin": np.min, "sum": np.sum}


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Real division with 0/0 = 0, so that a group of zeros quantizes to zeros."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = b == 0
        return np.where(zero & (a == 0), 0.0, a / b) if zero.any() else a / b


_BINARY: dict[str, Callable] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divide,
    "//": lambda a, b: np.floor(divide(a, b)),
    "%": lambda a, b: a - np.floor(divide(a, b)) * b,
}


def evaluate(e: Expr, look_up: Callable[[Expr], np.ndarray], reduce: Callable[[Call, np.ndarray], np.ndarray]):
    """The float64 value of `e`.

    `look_up` gives the value of a Ref, Item or Stored; `reduce` applies a reduction to the value of its argument.
    """

    def value(child: Expr):
        return evaluate(child, look_up, reduce)

    match e:
        case Number():
            return np.float64(e.value)
        case Binary():
            with np.errstate(invalid="ignore", over="ignore"):
                return _BINARY[e.op](value(e.left), value(e.right))
        case Negate():
            return -value(e.arg)
        case Cast():
            return e.dtype.round(value(e.arg))
        case Call() if e.name in REDUCTIONS:
            return reduce(e, value(e.args[0]))
        case Call():
            with np.errstate(all="ignore"):
                return FUNCTIONS[e.name][0](*map(value, e.args))
        case Item() if e.args and not isinstance(e.args[0], Half | Digits):
            table, position = look_up(Ref(e.name)), value(e.args[0]).astype(np.intp)
            inside = (position >= 0) & (position < len(table))  # a code beyond the table means 0
            return np.where(inside, table[np.where(inside, position, 0)], 0.0)
        case _:
            return look_up(e)


def constant(e: Expr) -> float | None:
    """The value of an expression without tensors, or None."""

    class NotConstantError(Exception):
        pass

    def refuse(*_):
        raise NotConstantError

    try:
        return float(evaluate(e, refuse, refuse))
    except NotConstantError:
        return None


# ---- ranges ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Range:
    """What is known of a set of values: bounds, a power of two that divides all of them, and their significand bits.

    This decides exactness: a range fits a format if its bounds do, its quantum is no finer, and no value needs more
    significand bits than the format has.  An infinite `bits` means "any real number".
    """

    low: float
    high: float
    quantum: float
    bits: float

    @property
    def size(self) -> float:
        return max(abs(self.low), abs(self.high))

    def fits(self, dtype: DType) -> bool:
        if dtype.is_float:
            return self.size <= dtype.max and self.quantum >= dtype.quantum and self.bits <= dtype.precision
        return self.low >= dtype.min and self.high <= dtype.max and self.quantum >= 1

    def __str__(self) -> str:
        if self.quantum < 1 or self.bits == math.inf:
            return f"{self.low:g} .. {self.high:g}"
        return f"{int(self.low)} .. {int(self.high)}"


REAL = Range(-math.inf, math.inf, 0.0, math.inf)


def of_dtype(dtype: DType) -> Range:
    """The range of all finite values of a format."""
    precision = dtype.precision if dtype.kind != "int" else max(1, dtype.bits - 1)
    return Range(dtype.min, dtype.max, dtype.quantum, precision)


def of_codes(dtype: DType, value: Range) -> Range:
    """The range of integers that numbers of a range round to; NaN becomes 0."""
    low, high = (min(max(end, dtype.min), dtype.max) for end in (value.low, value.high))
    return _fixed(min(0.0, math.floor(low)), max(0.0, math.ceil(high)), 1.0)


def of_values(values: np.ndarray) -> Range:
    """The range of a list of constants."""
    if not np.all(np.isfinite(values)):
        return REAL
    quanta, bits = [], [1]
    for value in values[values != 0].tolist():
        numerator, denominator = abs(value).as_integer_ratio()
        odd = numerator // (numerator & -numerator)
        quanta.append(numerator / odd / denominator)
        bits.append(odd.bit_length())
    return Range(float(values.min()), float(values.max()), min(quanta, default=1.0), max(bits))


def _fixed(low: float, high: float, quantum: float) -> Range:
    size = max(abs(low), abs(high))
    exact = quantum > 0 and math.isfinite(size) and math.isfinite(size / quantum)
    return Range(low, high, quantum, max(1, int(size / quantum).bit_length()) if exact else math.inf)


def _corners(op: Callable[[float, float], float], a: Range, b: Range) -> tuple[float, float]:
    values = [op(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    values = [0.0 if math.isnan(v) else v for v in values]
    return min(values), max(values)


def interval(e: Expr, of: Callable[[Expr], Range]) -> Range:
    """The range of `e`, given the range of every Ref and Item in it."""
    match e:
        case Number():
            return of_values(np.array([float(e.value)]))
        case Negate():
            inner = interval(e.arg, of)
            return replace(inner, low=-inner.high, high=-inner.low)
        case Cast():
            inner, target = interval(e.arg, of), of_dtype(e.dtype)
            if inner.fits(e.dtype):
                return inner
            low, high = e.dtype.round(np.clip([inner.low, inner.high], target.low, target.high)).tolist()
            return replace(target, low=low, high=high)
        case Binary(op="+" | "-"):
            a, b = interval(e.left, of), interval(e.right, of)
            low, high = (a.low + b.low, a.high + b.high) if e.op == "+" else (a.low - b.high, a.high - b.low)
            return _fixed(low, high, min(a.quantum, b.quantum))
        case Binary(op="*"):
            a, b = interval(e.left, of), interval(e.right, of)
            return Range(
                *_corners(lambda x, y: x * y, a, b), a.quantum * b.quantum, a.bits + b.bits - (1 in (a.bits, b.bits))
            )
        case Binary(op="//") if (divisor := constant(e.right)) and divisor > 0:
            a = interval(e.left, of)
            return (
                _fixed(math.floor(a.low / divisor), math.floor(a.high / divisor), 1.0)
                if math.isfinite(a.size)
                else REAL
            )
        case Binary(op="%") if (divisor := constant(e.right)) and divisor > 0:
            a = interval(e.left, of)
            if a.quantum >= 1 and float(divisor).is_integer():
                high = divisor - 1 if a.low < 0 else min(a.high, divisor - 1)
                return _fixed(0.0, high, 1.0)
            return REAL
        case Call(name="abs"):
            a = interval(e.args[0], of)
            return replace(a, low=0.0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high)), high=a.size)
        case Call(name="min" | "max"):
            a, b = (interval(arg, of) for arg in e.args)
            pick = min if e.name == "min" else max
            return _fixed(pick(a.low, b.low), pick(a.high, b.high), min(a.quantum, b.quantum))
        case Call(name="relu"):
            a = interval(e.args[0], of)
            return replace(a, low=max(0.0, a.low), high=max(0.0, a.high))
        case Call(name="exp2"):
            a = interval(e.args[0], of)
            if a.quantum >= 1 and a.low >= -1000 and a.high <= 1000:
                return Range(2.0**a.low, 2.0**a.high, 2.0**a.low, 1)
            return REAL
        case Call(name="round" | "floor" | "ceil"):
            a = interval(e.args[0], of)
            return _fixed(math.floor(a.low), math.ceil(a.high), 1.0) if math.isfinite(a.size) else REAL
        case Ref() | Item():
            return of(e)
        case _:
            return REAL
