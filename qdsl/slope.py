"""The weight that a model has where a scheme counts in units of its own.

With `x ~ a`, where the code a is x / c + o, and `y = (acc + b) * d`, sums are of codes: w is no weight of the model, but
w * d / c is, by which y grows with x.  Tools multiplied float32 numbers to have d, of which one was the weight's own scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from qdsl.diagnostic import Error
from qdsl.dtype import F32
from qdsl.expr import Binary, Call, Cast, Expr, Item, Negate, Number, Ref, names
from qdsl.scheme import Operand, Scheme

Factors = Counter[Expr]  # and their powers


def in_units_of_the_model(scheme: Scheme, phase: str = "") -> Scheme:
    """The scheme with the slope of y in x as its `w`, of tensors that layers hold; itself where w is that already.

    Rounding is no slope, nor are functions of the epilogue: the weight is what they are given.  Raises Error where an
    output has several weights, or one that depends on x.
    """
    own = scheme.in_phase(phase)
    try:
        factors = _factors(own.output.value, "acc")
        for activation in own.activations:
            code = next(t for t in activation.operand.tensors if t.role == "code")
            assert isinstance(code.value, Expr), "codes of x are computed"
            factors.update(_factors(activation.operand.decode, code.name))
            factors.update(_factors(code.value, "x"))
    except _ManyError as e:
        raise Error(f"{scheme.bound} has no weight to give: {e}") from None
    weight = scheme.weight
    for factor, power in sorted(factors.items(), key=lambda f: (f[1] < 0, str(f[0]))):  # products first, then quotients
        needed = [scheme.tensor(name) for name in sorted(names(factor))]
        if power and (computed := next((t for t in needed if not t.loaded), None)):
            raise Error(
                f"{scheme.bound} has no weight to give: y grows with x by `{computed.name}`, which is made of x"
            )
        for _ in range(abs(power)):
            decode = Binary("*" if power > 0 else "/", weight.decode, factor)
            weight = Operand(tuple(dict.fromkeys((*weight.tensors, *needed))), decode)
    return scheme if weight is scheme.weight else replace(scheme, weight=weight)


def with_own_scales(scheme: Scheme, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Bit patterns of a weight `q * d / c` of float32 scales, with the weight's own scale s in d, and 1 in c; others as they
    are.

    d was s * c, rounded to float32, which a float32 s other than d / c may give, and where products pass a power of two
    there may be two.  Of them it is the one whose product with the largest code is nearer to a number of 11 bits: such a
    scale is the largest weight of a row by the largest code, and models have weights of 16 bits.
    """
    match scheme.weight.decode:
        case Binary("/", Binary("*", Ref(code), Ref(product)), Ref(factor)):
            q, d, c = (scheme.tensor(name) for name in (code, product, factor))
        case _:
            return dict(given)
    if not (d.role == c.role == "scale" and d.dtype == c.dtype == F32 and c.index == () and q.dtype.kind == "int"):
        return dict(given)
    products, of_x = (F32.decode(given[t.name]).astype(np.float32) for t in (d, c))
    with np.errstate(all="ignore"):  # a file may hold what is no scale
        quotient = products / of_x
        near = np.stack([quotient, np.nextafter(quotient, np.float32(0)), np.nextafter(quotient, np.float32(np.inf))])
        mantissa, _ = np.frexp(near.astype(float) * q.dtype.max)
        odd = np.abs(mantissa * 2**11 - np.round(mantissa * 2**11))
        odd[near * of_x != products] = np.inf
    own = np.take_along_axis(near, odd.argmin(axis=0)[None], axis=0)[0]  # d / c itself where no product is d
    return {**given, d.name: F32.encode(own), c.name: F32.encode(np.ones_like(of_x))}


def is_affine(e: Expr, name: str) -> bool:
    """Whether an expression is `name` times something plus something."""
    if e == Ref(name):
        return True
    inside = [child for child in e.children() if name in names(child)]
    scaled = isinstance(e, Negate) or (
        isinstance(e, Binary) and (e.op in "+-*" or (e.op == "/" and inside == [e.left]))
    )
    return scaled and len(inside) == 1 and is_affine(inside[0], name)


class _ManyError(Exception):
    pass


def _factors(e: Expr, name: str) -> Factors:
    """What multiplies `name` in an expression that has it."""
    if isinstance(e, Ref) or (isinstance(e, Item) and e.name == name):
        return Factors()
    inside = [child for child in e.children() if name in names(child)]
    ways = {frozenset(found.items()): found for found in (_factors(child, name) for child in inside)}
    if len(ways) != 1:
        raise _ManyError(f"`{e}` has `{name}` in several ways")
    (found,) = ways.values()
    match e:
        case Negate() | Binary("-", _, _) if inside[-1] is e.children()[-1]:
            found[Number(-1)] += 1
        case Binary("*", left, right) if len(inside) == 1:
            found.update(_product(right if inside[0] is left else left))
        case Binary("/", left, right) if inside == [left]:
            found.subtract(_product(right))
        case Binary("/" | "//" | "%", _, _):
            raise _ManyError(f"`{e}` divides by `{name}`")
        case Binary() | Call() | Cast():
            pass
    return found


def _product(e: Expr) -> Factors:
    """An expression as its factors."""
    match e:
        case Binary("*" | "/", left, right):
            found = _product(left)
            (found.update if e.op == "*" else found.subtract)(_product(right))
            return found
    return Factors([e])
