"""Kernels that multiply planes of bytes, run without a GPU: what codes and zero points they take, and which x is exact."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qdsl import reference
from qdsl.cache import nvcc
from qdsl.codegen.cuda import hopper, host, planes
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Shared, Weight
from qdsl.codegen.target import target
from qdsl.dtype import dtype

sys.path.insert(0, str(Path(__file__).parent))
from emulation.emulate import library
from test_emulated_kernels import Case, run

NEEDS = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
HOPPER = target("cuda", "sm_90a")
WEIGHTS = {
    "u2": Weight("float16", 0, "u2", "float16", 128, dtype("u2")),
    "u4": Weight("float16", 0, "u4", "e4m3", 32),
    "i4": Weight("bfloat16", 0, "i4", "bfloat16", 96, dtype("i4")),
    "float-zero": Weight("float16", 0, "float16", "float16", 64, dtype("u2"), (), "float32", True),
    "i3-of-rows": Weight("float16", 0, "i3", "float16", 32, dtype("i3"), shared=(("zero", Shared(1, None)),)),
}
PLAIN = Weight("float16", 0, None, None, None, dtype("u2"))  # w = q, and no more


@NEEDS
@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_and_zero_points(name, tmp_path):
    """Some tokens of each tile, ragged features and groups; a ring that goes around, with stages that end within x."""
    names = {"u2": ("p1_wide", "p2"), "float-zero": ("p1",), "u4": ("p1_narrow",)}.get(name, ("p2",))
    worst = run("sm_90a", WEIGHTS[name], [(3, 72, 200), (1, 40, 4616)], tmp_path, names)
    assert worst.keys() == set(names) and max(worst.values()) <= 1, worst


@functools.cache
def compiled(weight: Weight, folder: Path):
    functions = {c.name: c.lower(c.name) for c in candidates(HOPPER, weight) if c.name in ("p1", "p2")}
    return library(host.emit(functions, HOPPER, overlapped=True), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planes")


def multiply(folder: Path, kernel: str, x: torch.Tensor):
    """y of codes in float16, and the codes."""
    case = Case(PLAIN, len(x), 32, x.shape[1])
    y = torch.full((len(x), 32), float("nan"), dtype=x.dtype)
    compiled(PLAIN, folder)[kernel](x, *case.buffers, y)
    return y, case.w


@NEEDS
@pytest.mark.parametrize("kernel", ["p1", "p2"])
def test_single_numbers_and_integers_are_exact(kernel, folder):
    """Every kind of float16: the least and the largest, and those whose leading digit would be 128 if c were not halved."""
    bits = [0x0001, 0x03FF, 0x0400, 0x1BF7, 0x1BF8, 0x3BFF, 0x3C00, 0x3FF7, 0x3FF8, 0xBFFF, 0x4555, 0x6AAB, 0x7800, 0x53FC]  # fmt: skip
    values = torch.from_numpy(np.array(bits, np.uint16).view(np.float16))
    places = np.random.default_rng(0).permutation(264)[: len(values)]
    x = torch.zeros((len(values), 264), dtype=torch.float16)
    x[range(len(values)), places] = values
    y, w = multiply(folder, kernel, x)
    assert torch.equal(y, (x.double() @ torch.from_numpy(w).T).half())
    x = torch.from_numpy(np.random.default_rng(1).integers(-9, 10, (4, 264))).half()
    y, w = multiply(folder, kernel, x)
    assert torch.equal(y.double(), x.double() @ torch.from_numpy(w).T)


@NEEDS
def test_small_numbers_beside_large_ones(folder):
    """Off by no more than `x_bits` says, beside what rounds in float32 and at last: powers of two from 2^-24 to 2^15."""
    rng = np.random.default_rng(2)
    x = torch.from_numpy(rng.uniform(-2, 2, (6, 600)) * 2.0 ** rng.integers(-24, 8, (6, 600))).half()
    x[:, 1::7] = 0
    y, w = multiply(folder, "p2", x)
    given = x.double().numpy()
    cut = reference.cut(given, planes.x_bits(PLAIN))
    assert (cut > 0).any() and (cut[given == 0] == 0).all()
    exact = given @ w.T
    bound = cut @ w.T + 2.0**-11 * np.abs(exact) + 2.0**-22 * (np.abs(given) @ w.T)
    assert (np.abs(y.double().numpy() - exact) <= bound).all()


@NEEDS
def test_a_token_is_the_same_whatever_is_beside_it(folder):
    """Also beside one that is not finite, which gets NaN; bit by bit, by both kernels, which have the same order."""
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((4, 520))).half()
    x[1, 7], x[2, 300] = torch.inf, torch.nan
    both, _ = multiply(folder, "p2", x)
    assert both[1:3].isnan().all() and both[[0, 3]].isfinite().all()
    one, _ = multiply(folder, "p1", x)
    assert torch.equal(one.view(torch.int16)[[0, 3]], both.view(torch.int16)[[0, 3]])
    orders = {c.order for c in candidates(HOPPER, PLAIN) if c.name in ("p1", "p2")}
    assert orders == {"planes 8 teams by 256, sums of 128"}


def test_which_weights_have_them():
    def names(weight):
        return [c.name for c in candidates(HOPPER, weight) if c.x_bits]

    assert names(WEIGHTS["u2"]) == ["p1_narrow", "p1", "p1_wide", "p2"]
    assert names(WEIGHTS["u4"]) == ["p1_narrow", "p1", "p2"], "the others have no room"
    others = [
        Weight("float16", 0, "u3", "float16", 128, dtype("u2")),  # sums of more than 22 bits
        Weight("float16", 0, None, "float16", 48, dtype("u2")),
        Weight("float16", 0, None, "float32", 64, dtype("u4"), tuple(map(float, range(16)))),
        Weight("bfloat16", 0, None, "e8m0", 32, dtype("e2m1")),
        Weight("float16", 0, "u5", "float16", 128, dtype("u5")),
    ]
    assert not any(map(names, others))
    assert [t.resident for t in planes.tiles(WEIGHTS["u2"])] == [2, 2, 1, 2]
    for weight in WEIGHTS.values():
        for tile in planes.tiles(weight):
            assert hopper.pool_bytes(weight, hopper.fitted(weight, tile)) <= hopper.SM_SHARED // tile.resident - 1024
    assert str(planes.tiles(WEIGHTS["u2"])[1]).endswith("16 stages of 256, corrects planes, x in 4 planes of bytes")
