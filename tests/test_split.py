"""How each scheme's equations meet the multiplier: the split as text, and as numbers equal to the equation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qdsl.check import check
from qdsl.diagnostic import Diagnostic, Source
from qdsl.dtype import dtype
from qdsl.expr import Expr, evaluate, names
from qdsl.scheme import Gather, Group, Operand, Scheme, Var
from qdsl.split import Split, split
from qdsl.syntax import parse

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("schemes/*.q"), *ROOT.glob("tests/schemes/*.q"), *ROOT.glob("examples/*.q")])


def scheme(text: str, **params) -> Scheme:
    return check(parse(Source("test.q", text)), params)


def shipped(name: str, **params) -> Scheme:
    return scheme((ROOT / "schemes" / f"{name}.q").read_text(), **params)


def parts(s: Scheme, operand: Operand, given: str) -> dict[str, str]:
    found = split(operand, s.compute.operand, given)
    assert isinstance(found, Split), found
    return {p: str(v) for p in ("core", "fold", "promote", "epilogue", "correction") if (v := getattr(found, p))}


WEIGHTS = {
    "awq4": {"core": "q - z", "fold": "s"},
    "w4a16_int": {"core": "q - z", "promote": "s"},
    "bnb_fp4": {"core": "c[q]", "fold": "s"},
    "fp8a16_block": {"core": "q", "fold": "s"},
    "fp8a16_channel": {"core": "q", "epilogue": "s"},
    "fp8a16_tensor": {"core": "q", "epilogue": "s"},
    "gptq_sym_actorder": {"core": "q - 8", "fold": "s"},
    "hqq": {"core": "q", "fold": "s", "correction": "-z * s"},
    "mxfp8": {"core": "q", "fold": "s"},
    "nvfp4a16": {"core": "q", "fold": "s", "epilogue": "u"},
    "q4_1": {"core": "q", "fold": "s", "correction": "o"},
    "q8_0": {"core": "q", "fold": "s"},
    "w8a16_asym": {"core": "q - z", "epilogue": "s"},
    "w8a16_group": {"core": "q", "fold": "s"},
    "gptq": {"core": "q - z", "fold": "s"},
    "gptq_actorder": {"core": "q - z", "fold": "s"},
    "gptq_sym": {"core": "q - 8", "fold": "s"},
    "mxfp4": {"core": "q", "fold": "s"},
    "nf4": {"core": "c[q]", "fold": "s"},
    "q4_0": {"core": "q - 8", "fold": "s"},
    "w8a16": {"core": "q", "epilogue": "s"},
    "w8a8_dynamic": {"core": "q", "epilogue": "s"},
    "w8a8_static": {"core": "q", "epilogue": "s"},
    "w4a4": {"core": "q", "epilogue": "s"},
    "w4a8": {"core": "i8((q - z) * r)", "epilogue": "s"},
    "fp8_block": {"core": "q", "promote": "s"},
    "fp8_dynamic": {"core": "q", "epilogue": "s"},
    "nvfp4": {"core": "q", "promote": "s", "epilogue": "u"},
    "fp8_block_ue8m0": {"core": "q", "promote": "s"},
    "fp8_static": {"core": "q", "epilogue": "s"},
    "fp8_tensor_dynamic": {"core": "q", "epilogue": "s"},
    "mxfp4a8": {"core": "q", "promote": "s"},
    "mxfp8a8": {"core": "q", "promote": "s"},
    "w4a4_flatquant": {"core": "q", "epilogue": "s"},
    "w4a8_dynamic": {"core": "q", "epilogue": "s"},
    "w4a8_fp8": {"core": "q", "promote": "s"},
    "w4a8_group": {"core": "q", "promote": "r", "epilogue": "s"},
    "w8a8_dynamic_asym": {"core": "q", "epilogue": "s"},
    "w8a8_mix": {"core": "q", "epilogue": "s"},
    "w8a8_quant_bias": {"core": "q"},
    "w8a8_static_sym": {"core": "q", "epilogue": "s"},
}
ACTIVATIONS = {
    "fp8_block_ue8m0": {"core": "a", "promote": "t"},
    "fp8_static": {"core": "a", "epilogue": "t"},
    "fp8_tensor_dynamic": {"core": "a", "epilogue": "t"},
    "mxfp4a8": {"core": "a", "promote": "t"},
    "mxfp8a8": {"core": "a", "promote": "t"},
    "w4a4_flatquant": {"core": "a", "epilogue": "t"},
    "w4a8_dynamic": {"core": "a", "epilogue": "t"},
    "w4a8_fp8": {"core": "a", "epilogue": "t"},
    "w4a8_group": {"core": "a", "epilogue": "t"},
    "w4a16_int": {"core": "a", "promote": "t"},
    "w8a8_dynamic_asym": {"core": "a", "epilogue": "t", "correction": "-o"},
    "w8a8_mix": {"core": "a", "epilogue": "t"},
    "w8a8_quant_bias": {"core": "a"},
    "w8a8_static_sym": {"core": "a", "epilogue": "t"},
    "w8a8_dynamic": {"core": "a", "epilogue": "t"},
    "w8a8_static": {"core": "a", "epilogue": "t", "correction": "-o"},
    "w4a4": {"core": "a", "epilogue": "t"},
    "w4a8": {"core": "a", "epilogue": "t"},
    "fp8_block": {"core": "a", "promote": "t"},
    "fp8_dynamic": {"core": "a", "epilogue": "t"},
    "nvfp4": {"core": "a", "promote": "t", "epilogue": "v"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_split(name):
    s = shipped(name)
    assert parts(s, s.weight, "w") == WEIGHTS[name]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_split(name):
    s = shipped(name)
    assert parts(s, s.activations[0].operand, "x") == ACTIVATIONS[name]


def test_every_shipped_scheme_is_in_the_table():
    assert {p.stem for p in ROOT.glob("schemes/*.q")} == set(WEIGHTS)


WEIGHT = """
scheme test
weight { code q[n, k] : DECLS w ~ EQUATION }
COMPUTE
output f16
"""
INTEGER = """
activation { scale t[m] : f32 = amax(abs(x)) / 127 code a[m, k] : i8 = x / t x ~ a * t }
compute i8 -> i32
"""
EQUATIONS = [
    # declarations, equation, core, factor of a group, epilogue, correction
    ("u4 zero z[n, k // 64] : u4 scale s[n, k // 64] : f16", "(q - z) * s", "q - z", "s", None, None),
    ("u4 zero z[n, k // 64] : f16 scale s[n, k // 64] : f16", "(q - z) * s", "q", "s", None, "-z * s"),
    ("u4 scale s[n, k // 32] : f16 param o[n, k // 32] : f16", "q * s + o", "q", "s", None, "o"),
    ("u4 scale s[n, k // 32] : f16 param o[n, k // 32] : f16", "q * s - o", "q", "s", None, "-o"),
    ("u4 scale s[n, k // 32] : f16 param o[n, k // 32] : f16", "o - q * s", "q", "s * -1", None, "o"),
    ("u4 scale s[n, k // 32] : f16 scale u[n] : f16 param o[n, k // 32] : f16", "(q * s + o) * u", "q", "s", "u", "o"),
    ("u4 scale s[n, k // 32] : f16 scale u[n] : f16 param o[n] : f16", "q * s * u + o", "q", "s * u", None, "o"),
    ("i8 scale s[n] : f32 zero z[n] : f32", "(q - z) / s", "q", None, "1 / s", "-z"),
]


@pytest.mark.parametrize(("decls", "equation", "core", "group", "epilogue", "correction"), EQUATIONS)
def test_split_of_an_equation(decls, equation, core, group, epilogue, correction):
    body = WEIGHT.replace("DECLS", decls).replace("EQUATION", equation)
    expected = {"core": core, "fold": group, "epilogue": epilogue, "correction": correction}
    s = scheme(body.replace("COMPUTE", "compute f16 -> f32"))
    assert parts(s, s.weight, "w") == {k: v for k, v in expected.items() if v}
    expected["promote"] = expected.pop("fold")
    s = scheme(body.replace("COMPUTE", INTEGER))
    assert parts(s, s.weight, "w") == {k: v for k, v in expected.items() if v}


def test_an_offset_that_overflows_becomes_a_correction():
    body = WEIGHT.replace("DECLS", "i8 zero z[n] : i8 scale s[n] : f32").replace("EQUATION", "(q - z) * s")
    s = scheme(body.replace("COMPUTE", "compute bf16 -> f32"))
    assert parts(s, s.weight, "w") == {"core": "q - z", "epilogue": "s"}
    s = scheme(body.replace("COMPUTE", INTEGER))
    assert parts(s, s.weight, "w") == {"core": "q", "epilogue": "s", "correction": "-z"}


def test_unsigned_bytes_do_not_fit_signed_bytes():
    s = scheme(WEIGHT.replace("DECLS", "u8").replace("EQUATION", "q").replace("COMPUTE", "compute f16 -> f32"))
    found = split(s.weight, dtype("i8"), "w")
    assert isinstance(found, Diagnostic)
    assert found.id == "inexact-operand"


# ---- as numbers --------------------------------------------------------------------------------------------------
SIZES = {"e": 2, "m": 3, "n": 12, "k": 192}
AXES = "emnk"


def random_values(s: Scheme, operand: Operand, given: str) -> dict[str, np.ndarray]:
    """A value for every tensor, as an array over the axes (e, m, n, k)."""
    rng = np.random.default_rng(1)
    groups = {t.name: rng.integers(0, 3, SIZES["k"]) for t in s.tensors if t.dtype.kind == "index"}
    values = {given: rng.standard_normal([SIZES[a] for a in AXES])}
    for t in operand.tensors:
        if t.role == "table":
            values[t.name] = np.array(t.value if t.value else rng.standard_normal(t.index[0].size))
            continue
        coarse = [
            3 if isinstance(i, Gather) else -(-SIZES[i.axis] // _size(i))
            for i in t.index
            if hasattr(i, "axis") or isinstance(i, Gather)
        ]
        integer = t.dtype.is_integer
        array = rng.integers(t.dtype.min, min(t.dtype.max, 23) + 1, coarse) if integer else rng.uniform(0.5, 2, coarse)
        array, shape = np.asarray(array, np.float64), [1] * 4
        for at, i in enumerate(t.index):
            if isinstance(i, Gather):
                array = array.take(groups[i.tensor], at)
            elif isinstance(i, Group):
                array = array.take(np.arange(SIZES[i.axis]) // _size(i), at)
            shape[AXES.index("k" if isinstance(i, Gather) else i.axis)] = array.shape[at]
        values[t.name] = array.reshape(shape)
    return values


def _size(i) -> int:
    return 1 if isinstance(i, Var) else i.size or SIZES[i.axis]


def value_of(e: Expr | None, values, otherwise: float) -> np.ndarray:
    return np.float64(otherwise) if e is None else evaluate(e, lambda node: values[node.name], lambda *_: None)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_parts_multiply_and_add_up_to_the_equation(path):
    s = scheme(path.read_text())
    for operand, given in [(s.weight, "w"), *((a.operand, "x") for a in s.activations)]:
        operand = Operand(tuple(t for t in operand.tensors if t.name in names(operand.decode)), operand.decode)
        values = random_values(s, operand, given)
        found = split(operand, s.compute.operand, given)
        core, fold, promote, epilogue = (
            value_of(getattr(found, p), values, 1) for p in ("core", "fold", "promote", "epilogue")
        )
        correction = value_of(found.correction, values, 0)
        whole = value_of(operand.decode, values, 1)
        np.testing.assert_allclose((core * fold * promote + correction) * epilogue, whole, rtol=1e-12, atol=1e-12)
