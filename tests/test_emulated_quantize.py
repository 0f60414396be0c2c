"""The kernel that quantizes activations on a GPU, emulated: codes and scales to the bit, for teams of all sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation.emulate import library

import qdsl
from qdsl.cache import nvcc
from qdsl.codegen.cuda import host, quantize
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target

pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FEW = 1 << 11  # of the kernel's threads keep these tests' GPU busy: 4 tokens have as many as a CTA


def kernel(scheme, folder, monkeypatch):
    """(x) -> what the activation block computes, by name."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(quantize, "ENOUGH", FEW)
    planned = plan(scheme, target("cuda", "sm_90a"))
    step = next(s for v in planned.variants for s in v.steps if s.function == "quantize")
    function = quantize.lower(planned, step.args)
    call = library(host.emit({"quantize": function}, planned.target, planned.overlapped), folder)["quantize"]
    computed = [t for t in scheme.activation().operand.tensors if not t.loaded]

    def run(x, **loaded):
        sizes = {"e": 1, "m": len(x), "n": 1, "k": x.shape[1]}
        found = {}
        for t in computed:
            kind = torch.uint8 if t.dtype.bits <= 8 else torch.float32
            found[t.name] = torch.full(t.held_shape(sizes, scheme), 255, dtype=kind)
        given = {"x": x, **found, **loaded}
        call(*(given[arg] for arg in step.args))
        return found

    return run


def numbers(m, k, dtype, seed=0):
    """Some of rows of very different sizes; a row of zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, k)) * 2.0 ** random.integers(-12, 8, (m, 1))
    x[m // 2] = 0
    return torch.from_numpy(x).to(dtype)


def over(x, t):
    """x / t in float32, 0 / 0 = 0."""
    return torch.where(t == 0, torch.zeros(()), x.float() / t)


def int8(values):
    return values.round().clamp(-128, 127).to(torch.int8).view(torch.uint8)


@pytest.mark.parametrize("act", ["bf16", "f16", "f32"])
def test_int8_by_token(act, tmp_path, monkeypatch):
    """Rows for teams of all sizes, and of more than a team holds at once; what is no number, and x between 16 bytes."""
    run = kernel(qdsl.load("w8a8_dynamic", act=act), tmp_path, monkeypatch)
    for m, k in ((3, 8), (1, 208), (9, 1029), (17, 264), (33, 2048), (70, 520), (2, 16384 + 72)):
        x = numbers(m, k, DTYPES[act], seed=m)
        found, t = run(x), x.float().abs().amax(1) / 127
        assert torch.equal(found["t"], t), (m, k)
        assert torch.equal(found["a"], int8(over(x, t[:, None]))), (m, k)
    x = numbers(4, 72, DTYPES[act])
    x[0, 3], x[1, 5], x[2, 70] = torch.inf, -torch.inf, torch.nan
    found = run(x)
    assert found["t"].isnan().tolist() == [False, False, True, False] and found["t"][:2].isinf().all()
    assert not found["a"][2].any()
    apart = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(4, 72)
    assert apart.data_ptr() % 16 and all(
        torch.equal(a, b) for a, b in zip(run(apart).values(), found.values()) if a.dtype == torch.uint8
    )


def test_blocks_in_e4m3(tmp_path, monkeypatch):
    run = kernel(qdsl.load("fp8_block"), tmp_path, monkeypatch)
    for m, k in ((3, 128), (1, 4096 + 200), (9, 391), (17, 384), (33, 1024), (70, 520), (1, 32768)):
        x = numbers(m, k, torch.bfloat16, seed=m)
        groups = torch.nn.functional.pad(x.float(), (0, -k % 128)).reshape(m, -1, 128)
        found, t = run(x), groups.abs().amax(2) / 448
        expected = over(groups, t[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(found["t"], t.T), (m, k)
        assert torch.equal(found["a"], expected.reshape(m, -1)[:, :k]), (m, k)


def test_zero_points(tmp_path, monkeypatch):
    """Maxima and minima of numbers with their signs; rows without numbers of one sign."""
    run = kernel(qdsl.load("w8a8_dynamic_asym"), tmp_path, monkeypatch)
    x = numbers(6, 520, torch.bfloat16)
    x[0], x[1] = x[0].abs(), -x[1].abs()
    found = run(x)
    low, high = x.float().amin(1).clamp(max=0), x.float().amax(1).clamp(min=0)
    t = (high - low) / 255
    o = int8(-128 - over(low, t))
    assert torch.equal(found["t"], t) and torch.equal(found["o"], o)
    assert torch.equal(found["a"], int8(over(x, t[:, None]) + o.view(torch.int8)[:, None].float()))


def test_static_scales_and_what_is_no_number(tmp_path, monkeypatch):
    """Infinities are the largest codes, NaN is 0 in int8."""
    x = numbers(4, 72, torch.bfloat16)
    x[0, 3], x[1, 5], x[2, 70] = torch.inf, -torch.inf, torch.nan
    run = kernel(qdsl.load("w8a8_static_sym"), tmp_path, monkeypatch)
    for scale in (0.03, 2.0**-70, 2.0**125):
        t = torch.tensor([scale])
        assert torch.equal(run(x, t=t)["a"], int8((x.float() / t).nan_to_num(0, torch.inf, -torch.inf))), scale
    assert not run(x[3:], t=torch.zeros(1))["a"].any()  # whatever they are, they are multiplied by 0


def test_quotients_are_rounded_as_division_rounds_them():
    """What the kernel does in float32 (`quotient`), with float64 in the place of fused sums: products of two float32 are exact
    there, and their sums with a third are rounded once to 53 bits, which is enough to see a wrong last place."""
    random = np.random.default_rng(0)
    scale = random.integers(1 << 23, 1 << 24, 1 << 21).astype(np.float32) * np.float32(2.0**-30)
    for bits in (8, 11, 24):
        value = random.integers(1 << bits - 1, 1 << bits, len(scale)).astype(np.float32)
        one = np.float32(1) / scale
        found = value * one
        for _ in range(2):
            rest = (value.astype(float) - scale.astype(float) * found).astype(np.float32)
            found = (rest.astype(float) * one + found).astype(np.float32)
        assert np.array_equal(found, value / scale)
