"""The kernel that computes an activation block on a GPU, emulated: bit for bit what the equations make of x.

Its arithmetic is float32: next to a tie a code may be the neighbour, as in the float64 reference when its scales are off by
a few units in the last place.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from emulation.emulate import library
from tvm_ffi import Module

import qdsl
from qdsl import reference
from qdsl.cache import nvcc
from qdsl.codegen.cuda import host, quantize
from qdsl.codegen.pipeline import lower
from qdsl.codegen.plan import Plan, plan
from qdsl.codegen.target import target
from qdsl.dtype import F32
from qdsl.runtime import repack
from qdsl.scheme import Scheme

NEEDS = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
SHAPES = [(2, 2048 + 264), (2, 72), (2, 133)]  # several stretches, part of one, rows that are no whole pieces
SCHEMES = [
    ("w8a8_dynamic", {"act": "f16"}), ("w8a8_static", {}), ("fp8_block", {"fmt": "e5m2", "block": 32}), ("nvfp4", {}), ("w4a4", {}),
    ("fp8_block_ue8m0", {}), ("mxfp8a8", {"act": "f32"}), ("mxfp4a8", {"fmt": "e2m1"}),
]  # fmt: skip
ASYMMETRIC = """\
scheme asymmetric(act: type = bf16)
    "Activations between their least and their largest number, scales in bf16."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : bf16 = (amax(x) - amin(x)) / 255
    zero  o[m]    : i8   = -128 - amin(x) / t
    code  a[m, k] : i8   = x / t + o
    x ~ (a - o) * t
}

compute i8 -> i32
output act
"""


def compiled(scheme: Scheme, arch: str, folder: Path) -> tuple[Plan, Module]:
    """The emulated kernel of a plan."""
    planned = plan(scheme, target("cuda", arch))
    return planned, library(host.emit({"quantize": lower(planned)["quantize"]}, planned.target), folder)


def computed(kernel: tuple[Plan, Module], x: torch.Tensor, loaded: dict[str, np.ndarray]) -> dict:
    """What the emulated kernel makes of x, by tensor."""
    planned, module = kernel
    scheme, step = planned.scheme, planned.variants[0].steps[0]
    sizes, given, found = {"e": 1, "m": len(x), "n": 1, "k": x.shape[1]}, [x], {}
    for name in step.args[1:]:
        t = scheme.tensor(name)
        shape = t.held_shape(sizes, scheme) or (1,)
        kind = torch.uint8 if t.dtype.bits <= 8 else repack.torch_dtype(t.dtype)
        if t.loaded:
            given.append(repack.tensor_of(loaded[name].reshape(shape), kind))
            continue
        given.append(torch.full(shape, 0x55, dtype=kind))
        found[name] = given[-1]
    module["quantize"](*given)
    held = {name: repack.bits_of(t) for name, t in found.items()}
    for name, bits in held.items():
        dtype = scheme.tensor(name).dtype
        if planned.main_loop and dtype.kind == "int" and dtype.bits < 8:  # bytes of the same value
            assert np.array_equal(bits.view(np.int8), dtype.decode(bits & dtype.mask))
            held[name] = bits & dtype.mask
    return {name: b.T if scheme.tensor(name).held != scheme.tensor(name).index else b for name, b in held.items()}


def check(kernel: tuple[Plan, Module], x: torch.Tensor) -> None:
    scheme = kernel[0].scheme
    rng = np.random.default_rng(0)
    loaded = {t.name: t.dtype.encode(rng.uniform(0.01, 0.03, ())) for t in scheme.activation().operand.loaded}
    found = computed(kernel, x, loaded)
    exact, off = x.double().numpy(), 4 * F32.unit
    _, expected = reference.activate(scheme, exact, loaded)
    near = [
        reference.activate(scheme, exact, loaded, "", n)[1] for n in itertools.product((-off, off), repeat=len(found))
    ]
    for name, bits in found.items():
        kind = scheme.tensor(name).dtype
        values, wanted = kind.decode(bits), kind.decode(expected[name])
        neighbours = np.stack([kind.decode(e[name]) for e in near])
        inside = (values >= neighbours.min(0)) & (values <= neighbours.max(0))
        wrong = ~(inside | np.isnan(values) & np.isnan(wanted))
        assert not wrong.any(), (name, np.argwhere(wrong)[:4], values[wrong][:4], wanted[wrong][:4])
        assert (bits == expected[name]).mean() > 0.99 or kind.bits > 8, name


@NEEDS
@pytest.mark.parametrize(
    ("name", "params"), SCHEMES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_codes_and_scales(name, params, tmp_path):
    """fp8 in hardware, and by arithmetic where there is none."""
    scheme, arch = qdsl.load(name, **params), "sm_80" if params else "sm_90a"
    assert quantize.supported(scheme)
    kernel = compiled(scheme, arch, tmp_path)
    for m, k in SHAPES:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)) * 3
        check(kernel, x.to(repack.torch_dtype(scheme.output.dtype)))


@NEEDS
def test_a_zero_point_computed_from_the_scale(tmp_path):
    x = torch.randn(3, 264, generator=torch.Generator().manual_seed(1)) + 1
    check(compiled(qdsl.parse(ASYMMETRIC), "sm_90a", tmp_path), x.bfloat16())


@NEEDS
@pytest.mark.parametrize("name", ["w8a8_dynamic", "fp8_block"])
def test_rows_of_zeros_infinities_and_nan(name, tmp_path):
    scheme, x = qdsl.load(name), torch.randn(4, 264, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[0] = 0
    x[1, 40], x[2, 130] = math.inf, math.nan
    x[3] = torch.finfo(torch.bfloat16).max
    with np.errstate(invalid="ignore", over="ignore"):
        found, (_, expected) = (
            computed(compiled(scheme, "sm_90a", tmp_path), x, {}),
            reference.activate(scheme, x.double().numpy(), {}),
        )
    for bits, right in ((found[name], expected[name]) for name in found):
        kind = scheme.tensor("t" if bits.dtype != np.uint8 else "a").dtype
        values, wanted = kind.decode(bits), kind.decode(right)
        assert np.array_equal(np.isnan(values), np.isnan(wanted))
        assert np.array_equal(values[0], wanted[0]) and np.array_equal(values[3], wanted[3])
