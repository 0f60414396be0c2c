"""Products of bytes on tensor cores, emulated: quantized activations by quantized weights, from the scheme to y."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulation.emulate import library

import qdsl
from qdsl import reference
from qdsl.cache import nvcc
from qdsl.codegen.cuda import host
from qdsl.codegen.pipeline import lower
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target
from qdsl.order import Inputs
from qdsl.runtime import repack
from qdsl.runtime.buffer import packed
from qdsl.scheme import Scheme
from qdsl.split import WIDENED

NEEDS = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
SCHEMES = {
    "int8": qdsl.load("w8a8_dynamic"),
    "w4a8": qdsl.load("w4a8_dynamic"),
    "e4m3": qdsl.load("fp8_dynamic"),
    "e5m2": qdsl.load("fp8_dynamic", fmt="e5m2", act="f16"),
    "blocks": qdsl.load("fp8_block"),
    "powers-of-two": qdsl.load("fp8_block_ue8m0"),
    "static": qdsl.load("fp8_static"),
    "w4a8-groups": qdsl.load("w4a8_group", group=128),
    "w4a8-fp8": qdsl.load("w4a8_fp8"),
    "w4a8-rescaled": qdsl.load("w4a8"),
    "zero-point": qdsl.load("w8a8_static"),
    "zero-points": qdsl.load("w8a8_dynamic_asym"),
    "w4a4": qdsl.load("w4a4"),
    "flatquant": qdsl.load("w4a4_flatquant"),
}
ALL_KERNELS = ("int8", "blocks", "w4a8-groups")  # the others differ in what comes after the products
WHOLE, NIBBLES = ("w16", "w16_split", "w64_wide", "w128_tail"), ("w16", "w16_split", "w64_tail", "w128")


def run(scheme: Scheme, names, shapes, folder: Path, arch: str = "sm_90a") -> dict[str, float]:
    """The worst error of each kernel over its bound."""
    goal = target("cuda", arch)
    planned = plan(scheme, goal)
    wanted = {step.function for v in planned.variants if v.name in names for step in v.steps}
    module = library(host.emit(lower(planned, wanted), goal, planned.overlapped), folder)
    worst: dict[str, float] = {}
    for m, n, k in shapes:
        patterns = reference.random_patterns(scheme, np.random.default_rng(0), n, k)
        x = torch.from_numpy(np.random.default_rng(1).standard_normal((m, k))).to(
            repack.torch_dtype(scheme.output.dtype)
        )
        expected = reference.linear(scheme, x.double().numpy(), patterns, n, precision=planned.precision)
        given = {"x": x, "y": torch.empty(m, n, dtype=x.dtype)}
        sizes = {"e": 1, "m": m, "n": n, "k": k}
        for t in (t for t in scheme.activation().operand.tensors if not t.loaded):
            kind = torch.uint8 if t.dtype.bits == 8 or t.role == "code" else torch.float32
            given |= {t.name: torch.full(t.held_shape(sizes, scheme) or (1,), 255, dtype=kind)}
        given |= {
            name: torch.full((m, k), torch.nan, dtype=x.dtype if name == WIDENED else torch.float32)
            for v in planned.variants[:1]
            for s in v.steps
            for name in s.args
            if "." in name
        }
        given |= {b.tensor: packed(b, scheme.tensor(b.tensor), patterns[b.tensor], Inputs(k)) for b in planned.buffers}
        for variant in (v for v in planned.variants if v.name in names):
            given["y"].fill_(float("nan"))
            for step in variant.steps:
                module[step.function](*(given[arg] for arg in step.args))
            error = np.abs(given["y"].double().numpy() - expected.y) / expected.bound
            worst[variant.name] = max(worst.get(variant.name, 0.0), float(np.nan_to_num(error, nan=np.inf).max()))
    return worst


@NEEDS
@pytest.mark.parametrize("name", SCHEMES)
def test_every_kind_of_byte(name, tmp_path):
    kernels = NIBBLES if SCHEMES[name].code.dtype.bits == 4 else WHOLE
    kernels = kernels if name in ALL_KERNELS else kernels[1:3]
    worst = run(SCHEMES[name], kernels, [(3, 72, 208), (20, 40, 144)], tmp_path)
    assert worst.keys() == set(kernels) and max(worst.values()) <= 1, worst


MANY = {
    "int8": ("w256", "w128_tall"),
    "blocks": ("w256", "w128_tall", "w128_turned", "w256_turned_tail"),
    "w4a8-groups": ("w256_tail",),
}


@NEEDS
@pytest.mark.parametrize("name", MANY)
def test_many_tokens(name, tmp_path):
    """Instructions of 128 tokens, two for 256; sums of their own for 128 tokens and one of two blocks; rows of tokens."""
    worst = run(SCHEMES[name], MANY[name], [(140, 200, 400)], tmp_path)
    assert worst.keys() == set(MANY[name]) and max(worst.values()) <= 1, worst


OLDER = {
    ("int8", "sm_80"): ("b1", "b128"),
    ("zero-points", "sm_80"): ("b8",),
    ("w4a8-groups", "sm_86"): ("b32",),
    ("w4a8-rescaled", "sm_80"): ("b1", "b16"),
    ("blocks", "sm_89"): ("b16", "b64"),
}


@NEEDS
@pytest.mark.parametrize(("name", "arch"), OLDER)
def test_mma_of_bytes(name, arch, tmp_path):
    """Of architectures without wgmma: int8 since sm_80, fp8 since sm_89."""
    worst = run(SCHEMES[name], OLDER[name, arch], [(3, 72, 208), (70, 40, 1040)], tmp_path, arch)
    assert worst.keys() == set(OLDER[name, arch]) and max(worst.values()) <= 1, worst


WIDENED_CODES = {
    ("nvfp4", "sm_90a"): ("t8", "w64"),
    ("mxfp8a8", "sm_89"): ("m1",),
    ("fp8_block_ue8m0", "sm_80"): ("m64",),
}


@NEEDS
@pytest.mark.parametrize(("name", "arch"), WIDENED_CODES)
def test_codes_that_a_target_cannot_multiply_are_widened_exactly(name, arch, tmp_path):
    kernels = WIDENED_CODES[name, arch]
    worst = run(qdsl.load(name), kernels, [(3, 72, 208), (20, 40, 144)], tmp_path, arch)
    assert worst.keys() == set(kernels) and max(worst.values()) <= 1, worst


def test_what_is_no_product_of_codes_alone_stays_portable():
    """Scales of groups in float32 are no factors of 16-bit floats, and sums of 16-bit floats are none of integers."""
    for name, arch in (("fp8_block", "sm_86"), ("w4a8_fp8", "sm_80"), ("w4a16_int", "sm_90a")):
        assert plan(qdsl.load(name), target("cuda", arch)).main_loop is None
    assert plan(qdsl.load("mxfp8a8", act="f16"), target("cuda", "sm_90a")).main_loop is None, "f16 has fewer exponents"


@pytest.mark.parametrize(
    "change", [("(a - o)", "(a - o / 2)"), ("(a - o)", "(a - o * 3)"), ("o[]     : i8", "o[]     : f32")]
)
def test_a_correction_that_is_no_small_whole_number_stays_portable(change):
    """It is multiplied in integers, and what is no integer or does not fit would come out wrong."""
    text = qdsl.load("w8a8_static").text
    assert change[0] in text and plan(qdsl.parse(text), target("cuda", "sm_90a")).main_loop.corrected
    changed = qdsl.parse(text.replace(*change).partition("layout")[0])
    assert plan(changed, target("cuda", "sm_90a")).main_loop is None


@NEEDS
def test_more_numbers_of_a_token_than_the_staging_has_room_for(tmp_path):
    """What is stored beside the ring, 16 tokens at a time, has room for numbers of four tensors."""
    text = qdsl.load("w4a8_dynamic").text.partition("layout")[0]
    more = "".join(f"    scale t{i}[m] : f32 = amax(abs(x)) + {i}\n" for i in range(5))
    factors = "".join(f" * t{i}" for i in range(5))
    text = text.replace("    code  a[m, k]", f"{more}    code  a[m, k]").replace("x ~ a * t", f"x ~ a * t{factors}")
    worst = run(qdsl.parse(text), ("w128_wide",), [(70, 72, 144)], tmp_path)
    assert worst["w128_wide"] <= 1, worst
