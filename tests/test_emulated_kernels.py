"""Kernels for sm_80 and sm_90a, run without a GPU: every instruction of them on the host, against float64.

The emulation (`emulation/simt.h`) is slow, so shapes are small: no multiple of any tile, and long enough along k to go around
every ring.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference
from qdsl.cache import nvcc
from qdsl.codegen.cuda import hopper, host, main_loop, wgmma
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import NIBBLES, Shared, Weight
from qdsl.codegen.plan import fragment_codes, places, plan
from qdsl.codegen.target import target
from qdsl.dtype import dtype
from qdsl.order import Inputs
from qdsl.runtime import repack
from qdsl.runtime.buffer import packed, unpacked

sys.path.insert(0, str(Path(__file__).parent))

from emulation.emulate import library, rewritten

TEST_SCHEMES = Path(__file__).parent / "schemes"
KINDS = {"float16": (torch.float16, 2.0**-11), "bfloat16": (torch.bfloat16, 2.0**-8)}
NUMBERS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
TABLE = tuple(np.linspace(-1, 1, 24).astype(np.float32).tolist())
WEIGHTS = {
    "u4": Weight("float16", 0, "u4", "float16", 128),
    "u4-bf16": Weight("bfloat16", 0, "u4", "float16", 64),
    "hqq": Weight("bfloat16", 0, "float16", "float16", 64),
    "hqq-f16": Weight("float16", 0, "float16", "float16", 64),
    "i8-f32": Weight("bfloat16", 0, "i8", "float32", 128, dtype("i8")),
    "e5m2-scale": Weight("bfloat16", 0, "u4", "e5m2", 16),
    "u1": Weight("bfloat16", 0, "u1", "bfloat16", 32, dtype("u1")),
    "u2": Weight("float16", 0, "u2", "float16", 64, dtype("u2")),
    "u3": Weight("bfloat16", 4, None, "float16", 128, dtype("u3")),
    "u5": Weight("float16", 0, "u5", "float16", 48, dtype("u5")),
    "i6": Weight("bfloat16", 0, None, "bfloat16", 64, dtype("i6")),
    "u7": Weight("float16", 0, "float16", "float16", 64, dtype("u7")),
    "u8": Weight("float16", 0, "u8", "float16", 128, dtype("u8")),
    "u8-bf16": Weight("bfloat16", 0, "u8", "float32", 128, dtype("u8")),
    "i8": Weight("bfloat16", 0, None, None, None, dtype("i8")),
    "e4m3": Weight("bfloat16", 0, None, "float32", 128, dtype("e4m3")),
    "e4m3-f16": Weight("float16", 0, None, None, None, dtype("e4m3")),
    "e5m2": Weight("float16", 0, None, "float16", 64, dtype("e5m2")),
    "e2m3": Weight("bfloat16", 0, None, "e8m0", 32, dtype("e2m3")),
    "mxfp4": Weight("bfloat16", 0, None, "e8m0", 32, dtype("e2m1")),
    "mxfp4-f16": Weight("float16", 0, None, "e8m0", 32, dtype("e2m1")),
    "nvfp4": Weight("float16", 0, None, "e4m3", 16, dtype("e2m1")),
    "table": Weight("bfloat16", 0, None, "float16", 48, dtype("u5"), TABLE),
    "nf4": Weight("float16", 0, None, "float32", 64, dtype("u4"), TABLE[4:20]),
    "q4_1": Weight("float16", 0, None, "float16", 32, offset="float16"),
    "premultiplied": Weight("bfloat16", 0, None, "float16", 64, dtype("u5"), (), "float16", True),
    "table-offset": Weight("float16", 0, None, "float16", 64, dtype("u3"), TABLE[:8], "float32"),
    "i8-zero": Weight("bfloat16", 0, "i8", None, None, dtype("i8")),
    "i4-zero": Weight("float16", 0, "i4", "float16", 64, dtype("i4")),
    "blocks": Weight("bfloat16", 0, None, "float32", 128, dtype("e4m3"), shared=(("scale", Shared(40, 128)),)),
    "blocks-e8m0": Weight("bfloat16", 0, None, "e8m0", 64, dtype("e4m3"), shared=(("scale", Shared(128, 64)),)),
    "zero-of-a-row": Weight("float16", 0, "u4", "float16", 32, shared=(("zero", Shared(1, None)),)),
    "zero-of-all": Weight("float16", 0, "u5", "float16", 64, dtype("u5"), shared=(("zero", Shared(None, None)),)),
}


class Case:
    """A random weight [n, k] and what kernels take for it, and x [m, k]."""

    def __init__(self, weight: Weight, m: int, n: int, k: int):
        self.weight, self.m, self.n, self.k = weight, m, n, k
        rng = np.random.default_rng(m * 31 + n * 7 + k)
        code = weight.code
        patterns = rng.integers(0, len(weight.table) or 1 << code.bits, (n, k)).astype(np.uint8)
        patterns[~np.isfinite(code.decode(patterns))] = 0
        values = np.array(weight.table)[patterns] if weight.table else code.decode(patterns)
        own = () if weight.table else places(code, weight.half.mantissa)
        self.buffers = [torch.from_numpy(fragment_codes(2, code.bits, bool(weight.table), own).pack(patterns))]
        found = {"scale": np.ones((n, k)), "zero": np.zeros((n, k)), "offset": np.zeros((n, k))}
        for role, kind in weight.grouped.items():
            number, place = dtype(NUMBERS.get(kind, kind)), weight.place(role) or Shared(1, weight.group)
            shape = tuple(-(-of // by) if by else 1 for of, by in ((n, place.features), (k, place.inputs)))
            drawn = rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-7, -3, shape)
            if role == "zero":
                drawn = np.floor(rng.uniform(0, 1 << code.bits, shape)) - (1 << code.bits - 1) * (kind[0] == "i")
            bits = number.encode(drawn)
            rows, columns = np.arange(n) // (place.features or n), np.arange(k) // (place.inputs or k)
            found[role] = number.decode(bits)[rows][:, columns]
            self.buffers.append(declared(bits, kind) if weight.place(role) else stored(bits, kind))
        scale = found["scale"]
        self.w = (values - weight.bias - found["zero"]) * scale + found["offset"] * (-1 if weight.subtract else 1)
        kind, self.unit = KINDS[weight.compute]
        self.x = torch.from_numpy(rng.standard_normal((m, k))).to(kind)
        exact = self.x.double().numpy()
        self.y = exact @ self.w.T
        # w rounds once, y once, sums in float32 of codes that are off by up to 2048 / factor
        offset = max(abs(weight.nothing(r) / weight.factor(r)) for r in range(2)) + 256
        self.bound = (
            1.05 * self.unit * (np.abs(exact) @ np.abs(self.w).T)
            + 2.0**-20 * offset * (np.abs(exact) @ (np.abs(scale) + np.abs(found["offset"])).T)
            + 1.05 * self.unit * np.abs(self.y)
            + 1e-6
        )

    def check(self, function) -> float:
        """The worst error over its bound."""
        y = torch.full((self.m, self.n), float("nan"), dtype=self.x.dtype)
        function(self.x, *self.buffers, y)
        return float((np.abs(y.double().numpy() - self.y) / self.bound).max())


def stored(bits: np.ndarray, kind: str) -> torch.Tensor:
    """[n, groups] -> [tiles of 16, groups, c, r], as kernels take scales and zeros; two u4 in a byte."""
    n, groups = bits.shape
    rows = np.pad(bits, ((0, -n % 16), (0, 0))).reshape(-1, 2, 8, groups).transpose(0, 3, 2, 1)
    if kind in NIBBLES:
        return torch.from_numpy(np.ascontiguousarray(rows[..., 0] | rows[..., 1] << 4).astype(np.uint8))
    return declared(rows, kind)


def declared(bits: np.ndarray, kind: str) -> torch.Tensor:
    """Number by number."""
    found = torch.from_numpy(np.ascontiguousarray(bits))
    return found.view({name: getattr(torch, name) for name in NUMBERS}.get(kind, torch.uint8))


def run(arch: str, weight: Weight, shapes, folder: Path, names=None) -> dict[str, float]:
    goal = target("cuda", arch)
    kernels = [c for c in candidates(goal, weight) if names is None or c.name in names]
    functions = {c.name: c.lower(c.name) for c in kernels}
    module = library(host.emit(functions, goal, goal.dependent_launch), folder)
    worst: dict[str, float] = {}
    for m, n, k in shapes:
        case = Case(weight, m, n, k)
        for c in kernels:
            if k % c.k_multiple == 0:
                worst[c.name] = max(worst.get(c.name, 0.0), np.nan_to_num(case.check(module[c.name]), nan=np.inf))
    return worst


NEEDS = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
SHAPES = [(3, 72, 200), (20, 40, 136)]  # one part of y and several; ragged groups, features and steps
HOPPER = (
    "h8",
    "t1",
    "t8_long",
    "t8_split",
    "t16_broad",
    "w32_narrow",
    "w64_wide",
    "w64_tail",
    "w128_split",
    "w152",
    "w256_tail",
)


@NEEDS
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_code_on_hopper(name, tmp_path):
    worst = run("sm_90a", WEIGHTS[name], SHAPES[:1], tmp_path, ("t8", "w32_narrow"))
    assert len(worst) == 2 and max(worst.values()) <= 1, worst


@NEEDS
@pytest.mark.parametrize("name", ["u4", "q4_1"])
def test_codes_less_their_zero_points(name, tmp_path):
    """Sixteen tokens: no products with ones, but for offsets."""
    worst = run("sm_90a", WEIGHTS[name], SHAPES[1:], tmp_path, ("t16_wide",))
    assert len(worst) == 1 and max(worst.values()) <= 1, worst


@NEEDS
def test_every_power_of_two_as_a_scale(tmp_path):
    """All 256 of them, a feature each, as float32 that scales a sum and as bf16 that scales weights."""
    weight, goal, n, k = WEIGHTS["mxfp4"], target("cuda", "sm_90a"), 256, 32
    bits = np.arange(n).astype(np.uint8)[:, None]
    ones = np.full((n, k), weight.code.encode(np.array([1.0]))[0], np.uint8)
    codes = fragment_codes(2, weight.code.bits, places=places(weight.code, weight.half.mantissa)).pack(ones)
    x = torch.eye(1, k, dtype=torch.bfloat16)
    functions = {c.name: c.lower(c.name) for c in candidates(goal, weight) if c.name in ("t1", "w32")}
    module = library(host.emit(functions, goal, goal.dependent_launch), tmp_path)
    for name in functions:
        y = torch.zeros((1, n), dtype=torch.bfloat16)
        module[name](x, torch.from_numpy(codes), stored(bits, "e8m0"), y)
        assert np.array_equal(y.double().numpy()[0], dtype("e8m0").decode(bits[:, 0]), equal_nan=True), name


@NEEDS
@pytest.mark.parametrize("name", ["u4", "u3", "u8", "e4m3", "mxfp4-f16", "nvfp4", "table"])
def test_codes_on_sm_80(name, tmp_path):
    worst = run("sm_80", WEIGHTS[name], SHAPES[:1], tmp_path, ("m8", "m64"))
    assert len(worst) == 2 and max(worst.values()) <= 1, worst


@NEEDS
def test_kernels_of_every_kind(tmp_path):
    """Clusters, teams, persistent kernels with a last round in halves: on a GPU of 6 multiprocessors it is often short."""
    worst = run("sm_90a", WEIGHTS["u4"], [*SHAPES, (70, 328, 136)], tmp_path, HOPPER)
    assert worst.keys() == set(HOPPER) and max(worst.values()) <= 1, worst


@NEEDS
def test_teams_of_persistent_kernels_go_on_around_the_ring(tmp_path):
    """Several parts for every CTA, each with one stage for two teams: a team must not end up in the slots of the other."""
    worst = run("sm_90a", WEIGHTS["u4"], [(130, 200, 136)], tmp_path, ("w32_tail", "w64_tail", "w256_tail"))
    assert len(worst) == 3 and max(worst.values()) <= 1, worst


@NEEDS
def test_rings_that_codes_are_asked_for_ahead_and_go_around(tmp_path):
    """More stages than slots, with few CTAs, which wait for all before them, and with many, which only wait for x."""
    worst = run("sm_90a", WEIGHTS["u4"], [(3, 72, 2200), (20, 72, 2200)], tmp_path, ("t8", "t16_split"))
    assert len(worst) == 2 and max(worst.values()) <= 1, worst


@NEEDS
def test_stages_half_as_long_where_two_would_fill_the_ring(tmp_path):
    weight = WEIGHTS["u8"]
    (tile,) = (t for t in wgmma.tiles() if t.name == "w64_tail")
    assert (tile.slice, hopper.fitted(weight, tile).slice, hopper.fitted(weight, tile).stages) == (4, 2, 6)
    worst = run("sm_90a", weight, [(20, 72, 520), (260, 72, 136)], tmp_path, ("w64_tail", "w256", "w256_tail"))
    assert len(worst) == 3 and max(worst.values()) <= 1, worst


@NEEDS
def test_gate_and_up_through_every_way_to_store(tmp_path):
    """Two rows of a fragment make one feature of y: the sums of a warp, of teams, of clusters, and of warpgroups."""
    names = ("p2", "t8", "t16_split", "w32_narrow", "w64_tail", "w152", "w256_tail", "w128_split")
    scheme, goal = qdsl.load(TEST_SCHEMES / "gate_up_channel.q"), target("cuda", "sm_90a")
    planned = plan(scheme, goal)
    functions = main_loop.lower(planned, [f"linear_{name}" for name in names])
    module = library(host.emit(functions, goal, goal.dependent_launch), tmp_path)
    assert len(functions) == len(names)
    for m, n, k in ((3, 72, 200), (20, 52, 136), (70, 400, 136)):
        patterns = reference.random_patterns(scheme, np.random.default_rng(0), n, k)
        step, given = planned.variants[0].steps[-1], []
        for arg in step.args[1:-1]:
            buffer, declared = planned.buffer(arg), scheme.tensor(arg)
            given.append(packed(buffer, declared, patterns[arg], Inputs(k)))
            assert np.array_equal(unpacked(buffer, declared, given[-1], patterns[arg].shape, Inputs(k)), patterns[arg])
        x = torch.from_numpy(np.random.default_rng(1).standard_normal((m, k))).half()
        expected = reference.linear(scheme, x.double().numpy(), patterns, n, precision=planned.precision)
        for name in functions:
            y = torch.full((m, n // 2), float("nan"), dtype=torch.float16)
            module[name](x, *given, y)
            assert (np.abs(y.double().numpy() - expected.y) <= expected.bound).all(), (name, m)


@NEEDS
def test_the_emulation_sees_what_is_wrong(tmp_path):
    """A code, a scale and a number of x that are another make an error; so does an instruction that it does not know."""
    case, weight = Case(WEIGHTS["u4"], 3, 72, 200), WEIGHTS["u4"]
    goal = target("cuda", "sm_90a")
    (kernel,) = (c for c in candidates(goal, weight) if c.name == "t8")
    text = host.emit({"t8": kernel.lower("t8")}, goal, overlapped=True)
    function = library(text, tmp_path)["t8"]
    assert case.check(function) <= 1
    for buffer, at in (
        (case.buffers[0].view(torch.int32), (2, 1, 5, 1)),
        (case.buffers[1], (1, 1, 3, 0)),
        (case.x, (1, 150)),
    ):
        before = buffer[at].clone()
        buffer[at] = before ^ 0x77777777 if buffer.dtype == torch.int32 else before + 4
        assert case.check(function) > 1
        buffer[at] = before
    with pytest.raises(ValueError, match="does not know `lop9"):
        rewritten(text.replace("lop3.b32 ", "lop9.b32 "))


SCHEMES = [
    ("awq4", {"group": 32}), ("gptq", {"bits": 3, "act": "bf16", "scale_type": "bf16"}), ("gptq", {"bits": 8}), ("gptq_sym", {"bits": 2}),
    ("hqq", {"bits": 2}), ("mxfp4", {}), ("mxfp8", {"act": "f16"}), ("nvfp4a16", {}), ("nf4", {}), ("q8_0", {}), ("w8a16", {}),
    ("fp8a16_channel", {"fmt": "e5m2"}), ("gptq_actorder", {"group": 32}), ("gptq_actorder", {"bits": 3, "group": 24}),
    ("gptq_sym_actorder", {"bits": 8}), ("gptq", {"group": 20}), ("q4_1", {}), ("w8a16_asym", {}), ("fp8a16_block", {"block": 48}),
    ("w8a16_asym", {"zero_type": "f32", "group": 40}), ("fresh.q", {}), ("gate_up.q", {}), ("gate_up_channel.q", {}), ("gate_up_actorder.q", {}),
]  # fmt: skip


@NEEDS
@pytest.mark.parametrize(
    ("name", "params"), SCHEMES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_schemes_from_their_equation_to_their_numbers(name, params, tmp_path):
    """The planner's layouts and epilogue with kernels of sm_80, within the bound of the reference."""
    scheme, goal = qdsl.load(TEST_SCHEMES / name if name.endswith(".q") else name, **params), target("cuda", "sm_80")
    planned, (m, n, k) = plan(scheme, goal), SHAPES[0]
    order = planned.main_loop.order
    functions = main_loop.lower(planned, ("order_inputs", "linear_m8", "linear_m64"))
    module = library(host.emit(functions, goal), tmp_path)
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), n, k)
    inputs = Inputs(k, {t.name: patterns[t.name] for t in scheme.weight.tensors if t.role == "index"})
    step = next(v for v in planned.variants if v.name == "m8").steps[-1]
    given = [packed(planned.buffer(arg), scheme.tensor(arg), patterns[arg], inputs) for arg in step.args[1:-1]]
    kind = repack.torch_dtype(scheme.output.dtype)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((m, k))).to(kind)
    y = torch.full((m, n // (scheme.output.half or ("", 1))[1]), float("nan"), dtype=kind)
    expected = reference.linear(scheme, x.double().numpy(), patterns, n, precision=planned.precision)
    if order:
        source = torch.from_numpy(order.runs(inputs).source)
        ordered = torch.full((m, len(source)), float("nan"), dtype=kind)
        module["order_inputs"](x, source, ordered)
        x = ordered
    for name in functions.keys() - {"order_inputs"}:  # one that corrects sums, one that corrects weights
        y.fill_(float("nan"))
        module[name](x, *given, y)
        assert (np.abs(y.double().numpy() - expected.y) <= expected.bound).all(), name
