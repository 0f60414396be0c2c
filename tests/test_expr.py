"""Expressions: what is printed parses back, and ranges hold for every value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qdsl.diagnostic import Source
from qdsl.dtype import dtype
from qdsl.expr import (
    Binary,
    Call,
    Cast,
    Expr,
    Item,
    Negate,
    Number,
    Range,
    Ref,
    constant,
    evaluate,
    interval,
    of_dtype,
    of_values,
    substitute,
)
from qdsl.syntax import parse

OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%"])
numbers = st.integers(0, 9).map(Number) | st.sampled_from([0.5, 2.25, 1e-05, 1e20]).map(Number)
leaves = numbers | st.sampled_from("abcq").map(Ref)


def grow(inner):
    return (
        st.builds(Binary, OPERATORS, inner, inner)
        | st.builds(Negate, inner)
        | st.builds(lambda x: Call("abs", (x,)), inner)
        | st.builds(lambda x, y: Call("max", (x, y)), inner, inner)
        | st.builds(lambda x: Item("c", (x,)), inner)
    )


@settings(max_examples=200)
@given(st.recursive(leaves, grow, max_leaves=12))
def test_printed_expressions_parse_back(e: Expr):
    text = f"scheme t weight {{ code q[n, k] : u4 w ~ {e} }} compute f16 -> f32 output f16"
    assert parse(Source("t.q", text)).items[0].decode.value == e


# ---- ranges ------------------------------------------------------------------------------------------------------
TYPES = {"a": dtype("u3"), "b": dtype("i3"), "c": dtype("e2m1"), "d": dtype("e8m0")}
GRID = np.meshgrid(*(t.decode(np.arange(1 << min(t.bits, 4))) for t in TYPES.values()), indexing="ij")
VALUES = dict(zip(TYPES, GRID, strict=True))
FORMATS = [dtype(name) for name in ("u4", "i4", "i8", "e2m1", "e4m3", "e5m2", "f16", "bf16", "f32", "i32")]


def combine(inner):
    small = st.integers(1, 5).map(Number)
    return (
        st.builds(Binary, st.sampled_from("+-*"), inner, inner)
        | st.builds(Binary, st.sampled_from(["//", "%"]), inner, small)
        | st.builds(Negate, inner)
        | st.builds(lambda f, x: Call(f, (x,)), st.sampled_from(["abs", "relu", "round", "floor", "ceil"]), inner)
        | st.builds(lambda f, x, y: Call(f, (x, y)), st.sampled_from(["min", "max"]), inner, inner)
        | st.builds(Cast, st.sampled_from(FORMATS), inner)
    )


operands = st.integers(-4, 9).map(Number) | st.just(Number(0.375)) | st.sampled_from("abcd").map(Ref)


@settings(max_examples=300)
@given(st.recursive(operands, combine, max_leaves=6))
def test_a_range_holds_every_value_and_what_fits_is_exact(e: Expr):
    found = interval(e, lambda x: of_dtype(TYPES[x.name]))
    values = np.asarray(evaluate(e, lambda x: VALUES[x.name], lambda *_: None))
    values = values[np.isfinite(values)]  # a cast to f16 may overflow; f16 holds that too
    assume(values.size)
    assert found.low <= values.min()
    assert values.max() <= found.high
    for t in FORMATS:
        if found.fits(t):
            assert np.array_equal(t.round(values), values), f"{e} in {found} is not exact in {t}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 3.0, -5.0], Range(-5, 3, 1, 3)),
        ([0.5, 6.0], Range(0.5, 6, 0.5, 2)),
        ([0.0], Range(0, 0, 1, 1)),
    ],
)
def test_range_of_constants(values, expected):
    assert of_values(np.array(values)) == expected


def test_infinite_constants_have_no_range():
    assert of_values(np.array([1.0, np.inf])).bits == np.inf


def test_zero_over_zero_is_zero():
    assert constant(Binary("/", Number(0), Number(0))) == 0.0
    assert constant(Binary("/", Number(1), Number(0))) == np.inf


def test_constants_have_no_names():
    assert constant(Binary("+", Ref("a"), Number(1))) is None
    assert constant(substitute(Binary("+", Ref("a"), Number(1)), {"a": Number(2)})) == 3
