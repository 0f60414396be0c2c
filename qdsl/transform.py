"""A transform of x as tensors over digits: where their extents come from, and one contraction after another.

    transform x[m, (c d)] = sum(left[i, c] * x[m, (i j)] * right[j, d])

    x [m, (i j)] --left [i, c], summed over i--> [m, (j c)] --right [j, d], summed over j--> x [m, (c d)]

All at once, every one of c·d results would be a sum of i·j products; one after another, of i and then of j.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdsl.expr import Binary, Call, Digits, Expr, Item, Ref
from qdsl.scheme import Activation, Free, Scheme, Transform


@dataclass(frozen=True)
class Factor:
    """One tensor of the product, with the digits of each of its indices."""

    name: str
    index: tuple[tuple[str, ...], ...]

    @property
    def digits(self) -> tuple[str, ...]:
        return tuple(d for digits in self.index for d in digits)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(spelled, self.index))}]"


@dataclass(frozen=True)
class Contraction:
    """`result[m, …] = sum over `summed` of source[m, …] * factors`; the digits of source and result lie in one axis."""

    source: tuple[str, ...]
    factors: tuple[Factor, ...]
    result: tuple[str, ...]
    summed: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """A digit's extent: the length of one axis of a tensor (or of x) over the extents of the other digits there."""

    digit: str
    tensor: str
    axis: int
    others: tuple[str, ...]


def spelled(digits: Sequence[str]) -> str:
    return digits[0] if len(digits) == 1 else f"({' '.join(digits)})"


# ---- reading -----------------------------------------------------------------------------------------------------
def factors(transform: Transform) -> tuple[Factor, ...]:
    """The tensors of the product, x among them."""
    return tuple(_factors(transform.value))


def _factors(e: Expr) -> Iterator[Factor]:
    match e:
        case Call("sum", (arg,)):
            yield from _factors(arg)
        case Binary("*", left, right):
            yield from _factors(left)
            yield from _factors(right)
        case Item(name, args) if all(isinstance(a, Ref | Digits) for a in args):
            yield Factor(name, tuple(a.names if isinstance(a, Digits) else (str(a),) for a in args))
        case _:
            raise ValueError(f"`{e}` is not a product of indexed tensors, the only form a transform of x can have")


def loaded(transform: Transform) -> tuple[str, ...]:
    """The names of its tensors but x, each once."""
    return tuple(dict.fromkeys(f.name for f in factors(transform) if f.name != "x"))


def result(transform: Transform) -> tuple[str, ...]:
    """The digits of the new x, in the order they lie in."""
    return tuple(d for place in transform.places[1:] for d in (place if isinstance(place, tuple) else (place,)))


# ---- contractions ------------------------------------------------------------------------------------------------
def contractions(transform: Transform) -> tuple[Contraction, ...]:
    """What to compute one after another: next is always the tensor that brings the fewest digits of its own.

    A tensor whose digits are all there by then is multiplied in the same pass.
    """
    left = [f for f in factors(transform) if f.name != "x"]
    source = _digits_of_x(transform)
    wanted, steps = result(transform), []
    while True:
        taken: list[Factor] = []
        union = source
        if left:
            first = min(left, key=lambda f: len(_with(source, f)))
            union = _with(source, first)
            taken = [f for f in left if f is first or set(f.digits) <= set(union)]
            left = [f for f in left if f not in taken]
        kept = {*wanted, *(d for f in left for d in f.digits)}
        summed = tuple(d for d in union if d not in kept)
        found = tuple(d for d in union if d in kept) if left else wanted
        steps.append(Contraction(source, tuple(taken), found, summed))
        if not left:
            return tuple(steps)
        source = found


def _with(digits: tuple[str, ...], factor: Factor) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*digits, *factor.digits)))


def _digits_of_x(transform: Transform) -> tuple[str, ...]:
    (x,) = (f for f in factors(transform) if f.name == "x")
    return tuple(d for digits in x.index[1:] for d in digits)


@dataclass(frozen=True)
class Pass:
    """One contraction of a block's transforms.

    name, source   of what it makes and reads; both are [m, …] in float32, save for x as the layer is given it
    x              of the transform's own x [m, k]
    """

    name: str
    source: str
    x: str
    transform: Transform
    contraction: Contraction


def passes(transforms: Sequence[Transform]) -> tuple[Pass, ...]:
    """Everything that happens to x before a block computes anything of it, in order."""
    found: list[Pass] = []
    for t in transforms:
        x = source = found[-1].name if found else "x"
        for c in contractions(t):
            name = f"x.{len(found) + 1}"  # no tensor is named so
            found.append(Pass(name, source, x, t, c))
            source = name
    return tuple(found)


def transformed(block: Activation | None) -> str:
    """The name of the x that a block's equations are about."""
    done = passes(block.transforms) if block else ()
    return done[-1].name if done else "x"


# ---- extents -----------------------------------------------------------------------------------------------------
def solved(transform: Transform) -> tuple[Found, ...]:
    """How each digit's extent follows from the shapes of tensors; raises ValueError for one that nothing tells.

    An index that is a single digit is its extent; one of several tells the last that is unknown.  Loaded tensors come
    before x.
    """
    places = [
        (f.name, axis, digits)
        for f in sorted(factors(transform), key=lambda f: f.name == "x")
        for axis, digits in enumerate(f.index)
        if (f.name, axis) != ("x", 0)
    ]
    found: dict[str, Found] = {}
    while open_ := [p for p in places if any(d not in found for d in p[2])]:
        step = next((p for p in open_ if sum(d not in found for d in p[2]) == 1), None)
        if step is None:
            digit = next(d for d in open_[0][2] if d not in found)
            raise ValueError(f"nothing tells how many positions `{digit}` has")
        name, axis, digits = step
        (digit,) = (d for d in digits if d not in found)
        found[digit] = Found(digit, name, axis, tuple(d for d in digits if d != digit))
    return tuple(found.values())


def extents(transform: Transform, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The extent of every digit, from the shapes of the loaded tensors and of x [m, k].

    Raises ValueError where they disagree, or the new x would have another width.
    """
    size: dict[str, int] = {}
    for found in solved(transform):
        others = math.prod(size[d] for d in found.others)
        size[found.digit] = shapes[found.tensor][found.axis] // max(1, others)
    width = shapes["x"][1]
    for f in factors(transform):
        for axis, digits in enumerate(f.index):
            have, need = shapes[f.name][axis], math.prod(size.get(d, 0) for d in digits)
            if (f.name, axis) != ("x", 0) and have != need:
                what = f"`{spelled(digits)}` has {need} position{'s' * (need != 1)}"
                if f.name == "x":
                    raise ValueError(f"{what} in `{f}`, and x has {have} features")
                raise ValueError(f"{what}, and `{f.name}` is {list(shapes[f.name])} in `{f}`")
    if (made := math.prod(size[d] for d in result(transform))) != width:
        raise ValueError(f"`{transform}` makes {made} features of the {width} of x, and the weight takes {width}")
    return size


def widths(transforms: Sequence[Transform], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """The features of what each pass makes, from the shapes of the loaded tensors and of x [m, k]."""
    size = {t: extents(t, shapes) for t in transforms}
    return [math.prod(size[p.transform][d] for d in p.contraction.result) for p in passes(transforms)]


# ---- sizes for tests ---------------------------------------------------------------------------------------------
def free_sizes(scheme: Scheme, k: int) -> dict[str, int] | None:
    """An extent for every free index, so that x of k features can be transformed: products as balanced as k allows.
    None where no extents fit."""
    tensors = {t.name: t for a in scheme.activations for t in a.operand.loaded}
    transforms = [t for a in scheme.activations for t in a.transforms]
    names = list(dict.fromkeys(i.name for t in tensors.values() for i in t.index if isinstance(i, Free)))
    small = [d for d in range(1, math.isqrt(k) + 1) if k % d == 0]
    candidates = sorted({*small, *(k // d for d in small)}, key=lambda d: (abs(math.log(d * d / k)), d))

    def fits(size: dict[str, int]) -> bool:
        shapes = {n: t.shape({"e": 1, "m": 1, "n": 1, "k": k, **size}, scheme) for n, t in tensors.items()}
        try:
            return all(extents(t, {"x": (1, k), **shapes}) for t in transforms)
        except ValueError:
            return False

    def search(size: dict[str, int]) -> dict[str, int] | None:
        if len(size) == len(names):
            return size if fits(size) else None
        found = (search({**size, names[len(size)]: d}) for d in candidates)
        return next((size for size in found if size is not None), None)

    return search({})
