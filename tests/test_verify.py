"""Every shipped scheme, and every test scheme that compiles, against the float64 reference; and verify can fail."""

import platform
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference
from qdsl.runtime import QuantLinear
from qdsl.runtime.verify import Report, _compare, verify

SCHEMES = Path(__file__).parent / "schemes"
# What the equations say is the same at every level; the lowest compiles quickest.
LOWEST = "x86-64-v2" if platform.machine() == "x86_64" else None
PARAMS = [
    ("awq4", {"act": "f32"}),
    ("awq4", {"group": 16, "act": "bf16"}),
    ("awq4", {"group": "k"}),
    ("awq4", {"group": 48}),
    ("gptq", {"bits": 3, "group": 32}),
    ("gptq", {"bits": 5}),
    ("gptq", {"bits": 8}),
    ("gptq_sym", {"bits": 2}),
    ("gptq_actorder", {"bits": 3, "group": 32}),
    ("fp8_block", {"fmt": "e5m2", "block": 64}),
    ("fp8_block_ue8m0", {"act": "f32", "block": 48}),
    ("mxfp8a8", {"fmt": "e5m2", "act": "f32"}),
    ("mxfp4a8", {"fmt": "e2m1"}),
    ("w4a8_group", {"group": 20}),
]


@pytest.mark.parametrize("name", qdsl.shipped())
def test_every_shipped_scheme(name):
    report = verify(qdsl.load(name))
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "params"), PARAMS, ids=lambda p: str(p))
def test_parameters_change_the_kernel_and_stay_right(name, params):
    report = verify(qdsl.load(name, **params), "cpu", LOWEST)
    assert report.passed, str(report)


@pytest.mark.parametrize("file", sorted(SCHEMES.glob("*.q")), ids=lambda f: f.stem)
def test_schemes_of_every_language_feature_compile_or_say_why_not(file):
    try:
        report = verify(qdsl.load(file), "cpu", LOWEST)
    except qdsl.Error as problem:
        refused = str(problem)
    else:
        assert report.passed, str(report)
        return
    assert re.search("can't be compiled yet|a QuantLinear is one matrix|can't hold it yet", refused)
    assert file.stem in refused


def test_verify_finds_a_wrong_weight(monkeypatch):
    """One code of one feature off by one is reported with its place."""
    original = QuantLinear.set_patterns

    def corrupt(self, patterns):
        q = patterns["q"].copy()
        q[0, 0] ^= 1
        return original(self, {**patterns, "q": q})

    monkeypatch.setattr(QuantLinear, "set_patterns", corrupt)
    report = verify(qdsl.load("w8a16"))
    assert not report.passed
    assert all(failure.at[1] == 0 for failure in report.failures)
    assert "WRONG" in str(report)
    assert "q = " in str(report)


def mine(compute: str, require: str) -> qdsl.Scheme:
    return qdsl.parse(f"""scheme mine "x"
    weight {{ code q[n, k] : i8 w ~ q }}
    activation {{ code a[m, k] : {compute.split()[0]} = x x ~ a }}
    compute {compute}
    output f32
    {require}""")


def test_sizes_are_those_that_a_scheme_takes():
    assert verify(mine("i8 -> i32", "require k % 1024 == 0")).passed
    assert verify(mine("i16 -> i32", "")).passed, "1344 products of i16 by i8 could overflow"
    with pytest.raises(
        qdsl.Error, match=r"takes none of the sizes that are verified, KxN = 8x1, .*; see its `require`"
    ):
        verify(mine("i8 -> i32", "require k % 3000 == 0"))


@pytest.mark.parametrize(("y", "bound", "passed"), [(-1, 7e4, True), (7e4, 1, True), (-7e4, 1, False), (1, 6e4, False)])
def test_infinity_where_a_right_result_may_be_one(y, bound, passed):
    found, expected = np.array([[np.inf]]), reference.Result(np.array([[float(y)]]), np.array([[float(bound)]]))
    report = Report("", "")
    _compare(
        report,
        qdsl.load("w8a16", act="f16"),
        {"q": np.zeros((1, 1), np.uint8), "s": np.zeros(1)},
        "",
        1,
        found,
        expected,
    )
    assert report.passed == passed


def test_verify_finds_an_unwritten_output(monkeypatch):
    monkeypatch.setattr(QuantLinear, "run_into", lambda self, x, y, variant=None, residual=None: None)
    report = verify(qdsl.load("w8a16"))
    assert len(report.failures) == report.cases


def test_huge_sums_stay_finite_until_they_must_not():
    """K = 8192 sums of 15 · 0.001: 122.88, though the unscaled sum is beyond f16; a truly large answer is infinite."""
    scheme = qdsl.load("awq4")
    k, n = 8192, 16
    patterns = {
        "q": np.full((n, k), 15, np.uint8),
        "z": np.zeros((n, k // 128), np.uint8),
        "s": scheme.tensor("s").dtype.encode(np.full((n, k // 128), 0.001)),
    }
    layer = QuantLinear(scheme, k, n).set_patterns(patterns)
    x = torch.ones(1, k, dtype=torch.float16)
    expected = reference.linear(scheme, x.double().numpy(), patterns, n).y
    assert layer(x).double().numpy() == pytest.approx(expected, rel=1e-3)
    assert torch.isinf(layer(x * 60000)).all()
