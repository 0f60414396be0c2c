"""`benchmarks/a8.py` without a GPU: what contenders are given, how ours is timed, the table of goals, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference, results
from qdsl.diagnostic import Error
from qdsl.dtype import F32
from qdsl.results import Cell, Meta, Results
from qdsl.runtime import QuantLinear, bench, timing

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import a8  # noqa: E402
import beside  # noqa: E402
import goals  # noqa: E402
import peers  # noqa: E402
import peers_a8  # noqa: E402

CPU = torch.device("cpu")
K, N = 512, 256
META = Meta("0123abcd", "a machine", "2026-01-02T03:04:05Z", {"torch": "2.6"}, "a clock; floor at 1 GB/s")
CELL = Cell("fp8_dynamic(fmt=e4m3)", "bf16", None, 4096, 4096, 1, None, "qdsl", 5.0, 2e-3, 2.0)
MEASURED = [name for name, _, _ in a8.SCHEMES]
CHANNEL = """\
scheme w4a8_channel(act: type = bf16)
    "int4 by int8, scales of channels and of tokens."

weight {
    code  q[n, k] : i4
    scale s[n]    : f32
    w ~ q * s
}

activation {
    scale t[m]    : f32 = amax(abs(x)) / 127
    code  a[m, k] : i8  = x / t
    x ~ a * t
}

compute i8 -> i32
output act
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(timing, "BUDGET_S", 0.005)
    monkeypatch.setattr(bench, "COPIES", 3)
    monkeypatch.setattr(peers, "COPIES", 3)


# ---- numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MEASURED)
def test_peers_get_the_weight_of_the_scheme(name):
    ((scheme, family),) = a8.chosen(name)
    given = a8.random_problem(scheme, family, K, N, 3, CPU)
    assert np.array_equal(reference.decode_weight(scheme, given.patterns(scheme), N, K), given.stored.weight.numpy())
    assert torch.equal(given.stored.scale.bfloat16().float(), given.stored.scale), "peers hold scales in bf16"
    assert given.answer("").shape == (3, N) and given.answers.keys() >= {a8.rule_of(scheme)}


@pytest.mark.parametrize("name", MEASURED)
def test_activations_are_those_of_the_reference(name):
    ((scheme, family),) = a8.chosen(name)
    given = a8.random_problem(scheme, family, K, N, 5, CPU)
    own, x = given.activations[a8.rule_of(scheme)], given.x.double().numpy()
    _, patterns = reference.activate(scheme, x, {})
    scale = scheme.tensor("t").dtype.decode(patterns["t"])
    assert np.array_equal(scale.reshape(5, -1), own.scale.double().numpy())
    low, high = (reference.activate(scheme, x, {}, nudges=(0.0, off * F32.unit))[0] for off in (-1, 1))
    found = own.exact.numpy()
    assert ((np.minimum(low, high) <= found) & (found <= np.maximum(low, high))).all(), "off ties they are the same"
    right = reference.linear(scheme, x, given.patterns(scheme), N)
    assert (np.abs(given.y.numpy() - right.y) <= right.bound).all()
    assert torch.equal(own.first(2).exact, own.exact[:2])


def test_int4_for_vllm_holds_the_same_weight():
    """Words, scales in e4m3 and scales of channels give the weight, and so do products of codes and scales in e4m3."""
    ((scheme, family),) = a8.chosen("w4a8_group")
    given = a8.random_problem(scheme, family, K, N, 1, CPU)
    words, groups, channels = peers_a8.w4a8_form(given.stored)
    nibbles = words.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    codes = torch.from_numpy(nibbles.reshape(N, K).astype(np.int64))
    codes = codes - 16 * (codes > 7)
    products = codes.double() * groups.double().t().repeat_interleave(128, 1)
    assert groups.shape == (K // 128, N) and torch.equal(products.to(torch.float8_e4m3fn).double(), products)
    assert torch.equal(products * channels.double()[:, None], given.weight)


def test_int4_per_channel_has_the_scales_of_groups(tmp_path):
    file = tmp_path / "w4a8_channel.q"
    file.write_text(CHANNEL)
    ((scheme, family),) = a8.chosen(f"{file}:w4a8")
    given = a8.random_problem(scheme, family, K, N, 1, CPU)
    assert np.array_equal(reference.decode_weight(scheme, given.patterns(scheme), N, K), given.weight.numpy())
    _, groups, channels = peers_a8.w4a8_form(given.stored)
    scale = groups.double() * channels.double()
    assert groups.shape == (K // 128, N) and torch.allclose(scale, given.stored.scale.double().expand_as(scale))
    with pytest.raises(Error, match="takes no i8 of this form"):
        peers_a8.w4a8_form(replace(given.stored, code=qdsl.load("w8a8_dynamic").code.dtype))


def test_rules_are_those_of_schemes():
    assert [a8.rule_of(scheme) for scheme, _ in a8.chosen(None)] == ["int8", "fp8", "block", "int8", "fp8"]
    with pytest.raises(Error, match="no peer quantizes activations as it does"):
        a8.rule_of(qdsl.load("fp8_dynamic", fmt="e5m2"))


# ---- peers -------------------------------------------------------------------------------------------------------
def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales [a, b] where they meet what they scale, [rows, columns], float64."""
    a, b = scale.shape
    return scale.double().repeat_interleave(rows // a, 0).repeat_interleave(columns // b, 1)


def scaled(a: torch.Tensor, b: torch.Tensor, own: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What these kernels say they do with a [M, K] and b [K, N], and the strides that they ask for."""
    assert a.is_contiguous() and b.t().is_contiguous() and own.dtype == scale.dtype == torch.float32
    assert a.dtype == b.dtype and a.element_size() == 1
    if own.shape[1] > 1:
        assert own.t().is_contiguous() and scale.t().is_contiguous()
    return ((a.double() * spread(own, *a.shape)) @ (b.double() * spread(scale, *b.shape))).bfloat16()


def scaled_by_rows(a, b, own, scale, dtype, bias=None) -> torch.Tensor:
    assert scale.shape == (b.shape[1], 1) and dtype == torch.bfloat16
    return scaled(a, b, own, scale.t())


def int4_mm(a, words, groups, size, channels, tokens, dtype, schedule) -> torch.Tensor:
    assert words.t().is_contiguous() and groups.is_contiguous() and groups.dtype == torch.float8_e4m3fn
    nibbles = words.t().numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    codes = torch.from_numpy(nibbles.reshape(words.shape[1], -1).astype(np.int64))
    weight = (codes - 16 * (codes > 7)).double() * groups.double().t().repeat_interleave(size, 1)
    assert channels.shape == (words.shape[1],) and schedule in peers_a8.SCHEDULES
    return ((a.double() * tokens) @ (weight * channels.double()[:, None]).t()).bfloat16()


@pytest.fixture
def pretended(monkeypatch):
    """Kernels that need a GPU, as their signatures say what they do."""

    def blocks(a, b, own, _, scale, __, output_dtype):
        return scaled(a, b, own, scale)

    def nt(x, w, y):
        y.copy_(scaled(x[0], w[0].t(), x[1].t().contiguous().t(), w[1].t()))

    def tokens(a, b, *, scale_a, scale_b, out_dtype):
        return scaled(a, b, scale_a, scale_b)

    def op(function):
        return SimpleNamespace(default=function)

    own = SimpleNamespace(
        cutlass_scaled_mm=lambda y, a, b, own, scale, bias: y.copy_(scaled(a, b, own, scale)),
        cutlass_encode_and_reorder_int4b=lambda words: words, cutlass_pack_scale_fp8=lambda scale: scale,
        cutlass_w4a8_mm=int4_mm,
    )  # fmt: skip
    sgl = SimpleNamespace(
        int8_scaled_mm=op(scaled_by_rows), fp8_scaled_mm=op(scaled_by_rows),
        fp8_blockwise_scaled_mm=op(lambda a, b, own, scale, dtype: scaled(a, b, own, scale)),
    )  # fmt: skip
    deep = SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda scale: scale, fp8_gemm_nt=nt)
    monkeypatch.setattr(peers_a8, "load", lambda *_: None)
    monkeypatch.setattr(peers_a8, "median_us", lambda call, *_, **__: call(0) is None or 1.0)
    monkeypatch.setattr(torch.ops, "_C", own, raising=False)
    monkeypatch.setattr(torch.ops, "sgl_kernel", sgl, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", tokens)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", blocks, raising=False)
    kinds = SimpleNamespace(BlockWise1x128=1, BlockWise128x128=2)
    monkeypatch.setattr(torch.nn.functional, "ScalingType", kinds, raising=False)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep)


@pytest.mark.parametrize("name", MEASURED)
def test_peers_are_called_as_they_ask_for(name, pretended):
    ((scheme, family),) = a8.chosen(name)
    found = [c for c in a8.contenders(scheme, family, None) if not c.name.startswith(("qdsl", "humming"))]
    given = a8.random_problem(scheme, family, K, N, 20, CPU)
    cells, absent = beside.measure(found, given, (1, 2, 20), "", a8.H200)
    assert not absent and len(cells) == 3 * len(found)
    assert all(c.us is None or c.rel_err < 2**-8 for c in cells)
    assert {c.contender for c in cells if c.us} == {c.name for c in found}


def test_humming_quantizes_itself(monkeypatch):
    """What its layers are made of, in its own words, and that the same codes and scales come into them."""
    made = []

    class Layer(torch.nn.Module):
        def __init__(self, shape_n, shape_k, weight_config, torch_dtype, input_config):
            super().__init__()
            bits, group = (4 if weight_config["dtype"] == "uint4" else 8), weight_config["group_size"] or shape_k
            self.weight = torch.empty(shape_n, shape_k * bits // 32, dtype=torch.int32)
            self.weight_scale = torch.empty(shape_n, shape_k // group, dtype=torch_dtype)
            self.config = weight_config["dtype"], weight_config["group_size"], input_config
            made.append(self)

        def cuda(self):
            return self

        def load_from_tensors(self, tensors):
            self.tensors = tensors

        def transform(self):
            pass

        def forward(self, x):
            return x

    layer = SimpleNamespace(HummingLayer=Layer)
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace(layer=layer))
    monkeypatch.setitem(sys.modules, "humming.layer", layer)
    configs = []
    for scheme, family in a8.chosen(None):
        given = a8.random_problem(scheme, family, K, N, 2, CPU)
        for contender in (c for c in a8.contenders(scheme, family, None) if c.name.startswith("humming")):
            call = contender.prepare(given, contender.dtype)
            assert torch.equal(call(given.x, 0), given.x), "it takes x in 16 bits"
            assert torch.equal(made[-1].tensors["weight_scale"].float().t(), given.stored.scale)
            configs.append((contender.name.removesuffix("_with_quantization"), *made[-1].config))
    int8, fp8 = ({"dtype": name, "group_size": 0} for name in ("int8", "float8e4m3"))
    assert configs == [
        ("humming_int8", "uint8", 0, int8), ("humming_fp8", "float8e4m3", 0, fp8),
        *2 * [("humming_w4a8int8", "uint4", 128, int8), ("humming_w4a8fp8", "uint4", 128, fp8)],
    ]  # fmt: skip


# ---- ours --------------------------------------------------------------------------------------------------------
def test_the_last_step_multiplies_what_the_first_has_left():
    scheme = qdsl.load("w8a8_dynamic")
    portable = qdsl.compile(scheme, "cpu", ["x86-64-v2"])  # SIMD kernels are one step
    layers = []
    for seed in (0, 1):
        patterns = reference.random_patterns(scheme, np.random.default_rng(seed), N, K)
        layers.append(QuantLinear(scheme, K, N, device="cpu", artifact=portable).set_patterns(patterns))
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = [layer(x) for layer in layers]
    y = torch.full((3, N), float("nan"), dtype=torch.bfloat16)
    last = layers[0].last_step(x, y)
    assert torch.equal(y, right[0])
    x.zero_()  # nothing is quantized any more
    for layer, expected in reversed([*zip(layers, right)]):
        last(layer)
        assert torch.equal(y, expected)
    with pytest.raises(ValueError, match="needed is a contiguous"):
        layers[0].last_step(x, y[:2])


@pytest.mark.parametrize("name", MEASURED)
def test_all_contenders_are_compared_and_the_absent_are_named(name, capsys):
    ((scheme, family),) = a8.chosen(name)
    found = a8.contenders(scheme, family, None)
    given = a8.random_problem(scheme, family, K, N, 20, CPU)
    cells, absent = beside.measure(found, given, (1, 20), "", a8.H200)
    assert results.check(json.loads(Results(META, tuple(cells)).to_json())) == [] and len(cells) == 2 * len(found)
    ours = [c for c in cells if c.contender.startswith("qdsl")]
    assert {c.contender for c in ours} == {"qdsl", "qdsl_with_quantization"}
    assert all(c.us and c.rel_err < 4e-3 and c.dtype == "bf16" for c in ours)
    assert all(c.rel_err < 4e-3 for c in cells if c.us), "what runs on a CPU is right there, too"
    assert {"vllm_cutlass"} <= absent.keys() and not any(label.startswith("qdsl") for label in absent)
    assert "vllm_cutlass absent: no --peers DIR" in capsys.readouterr().out


def test_sums_without_scales_are_compared_with_those_of_codes(capsys):
    ((scheme, family),) = a8.chosen("w8a8_dynamic")
    found = a8.named(a8.contenders(scheme, family, None), "torch_int_mm")
    cells, absent = beside.measure(found, a8.random_problem(scheme, family, K, N, 20, CPU), (1, 20), "", a8.H200)
    assert not absent and [c.us is None for c in cells] == [True, False] and cells[1].rel_err == 0
    assert "torch_int_mm is not run below M = 17" in capsys.readouterr().out


def test_what_is_slow_is_timed_with_one_copy(monkeypatch):
    monkeypatch.setattr(beside, "SLOW_S", -1.0)
    monkeypatch.setattr(beside, "Timed", lambda call, count, device: (count, device))
    scheme = qdsl.load("w8a8_dynamic")
    given = a8.random_problem(scheme, "int8", K, N, 2, CPU)
    right = beside.Contender("vllm", torch.bfloat16, None, scheme, answer="int8")
    assert beside.ready(right, lambda x, _: given.y[: len(x)].to(x.dtype), given, 2)[0] == (1, CPU)


# ---- runs --------------------------------------------------------------------------------------------------------
def test_schemes_and_contenders_are_chosen_by_name():
    assert [scheme.name for scheme, _ in a8.chosen(None)] == MEASURED
    assert [(s.name, f) for s, f in a8.chosen("w4a8_fp8, fp8_block")] == [("w4a8_fp8", "w4a8"), ("fp8_block", "block")]
    assert all(str(scheme.output.dtype) == "bf16" for scheme, _ in a8.chosen(None))
    with pytest.raises(Error, match=r"no 'awq4' among w8a8_dynamic, .*; NAME:FAMILY is any other"):
        a8.chosen("awq4")
    with pytest.raises(Error, match="no family 'int4' among int8, fp8, block, w4a8"):
        a8.chosen("w4a8_fp8:int4")
    found = [c for scheme, family in a8.chosen(None) for c in a8.contenders(scheme, family, None)]
    assert {c.name for c in a8.named(found, "qdsl")} == {"qdsl", "qdsl_with_quantization"}
    assert {c.name for c in a8.named(found, "sgl, humming_fp8")} == {"sgl", "humming_fp8_with_quantization"}
    assert len(a8.named(found, None)) == len(found) and not a8.named(found, "marlin")


def test_names_of_nobody_are_refused():
    args = a8.parsed(["--only", "qdsl,marlin", "--commit", "cafe"])
    with pytest.raises(Error, match="no contender 'marlin'; there are qdsl, qdsl_with_quantization, vllm_cutlass, "):
        a8.side_by_side(beside.Run(args, CPU, a8.H200))


def test_a_run_is_written_shape_by_shape(tmp_path):
    file = tmp_path / "r.json"
    args = a8.parsed(
        ["--only", "qdsl", "--schemes", "w8a8_dynamic", "--shapes", "128x64,256x64", "--tokens", "1,2", "--out", str(file),
         "--commit", "cafe"]
    )  # fmt: skip
    run = beside.Run(args, CPU, a8.H200)
    a8.side_by_side(run)
    found = results.read(file)
    assert not run.failed and "1450 TFLOP/s" in found.meta.method
    assert [(c.K, c.M, c.contender) for c in found.cells[:3]] == [
        (128, 1, "qdsl"), (128, 1, "qdsl_with_quantization"), (128, 2, "qdsl")
    ]  # fmt: skip
    assert len(found.cells) == 8 and "| w8a8_dynamic | 256×64 | " in goals.a8_table(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert a8.main(["--commit", "cafe"]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert a8.parsed(["--commit", "cafe"]).tokens == a8.TOKENS
    with pytest.raises(SystemExit):
        a8.main(["--shapes", "100x64"])
    assert "multiples of 128" in capsys.readouterr().err


# ---- goals -------------------------------------------------------------------------------------------------------
def synthetic() -> Results:
    times = {
        (1, "qdsl"): 9.0, (1, "qdsl_with_quantization"): 11.0, (1, "sgl"): 10.0, (1, "torch"): 14.0,
        (32, "qdsl"): 9.1, (32, "qdsl_with_quantization"): 11.0, (32, "sgl"): 10.0,
        (64, "qdsl"): 9.9, (64, "qdsl_with_quantization"): 12.0, (64, "sgl"): 10.0, (64, "torch"): None,
        (256, "qdsl"): 20.1, (256, "sgl"): 21.0, (256, "humming_fp8_with_quantization"): 20.0,
        (1024, "qdsl"): None, (1024, "sgl"): 50.0, (1024, "deepgemm"): None,
    }  # fmt: skip
    cells = [replace(CELL, M=m, contender=name, us=us) for (m, name), us in times.items()]
    w4a8 = replace(CELL, scheme="w4a8", group=128, K=8192, N=8192)
    for m, us in ((1, 12.0), (16, 99.0), (64, 15.1)):
        cells += [replace(w4a8, M=m, us=8.0), replace(w4a8, M=m, us=us, contender="qdsl_with_quantization")]
    int8 = replace(CELL, scheme="w8a8_dynamic", M=64)
    cells += [replace(int8, us=8.0), replace(int8, us=7.0, contender="torch_int_mm")]
    return Results(META, tuple(cells))


def test_goals():
    found = {(row.cell.scheme.partition("(")[0], row.cell.M): row for row in goals.activated(synthetic())}
    words = {place: row.words for place, row in found.items()}
    assert words == {
        ("fp8_dynamic", 1): ("met", "–"), ("fp8_dynamic", 32): ("missed", "–"), ("fp8_dynamic", 64): ("met", "–"),
        ("fp8_dynamic", 256): ("missed", "–"), ("w8a8_dynamic", 64): ("–", "–"),
        ("w4a8", 1): ("–", "met"), ("w4a8", 16): ("–", "–"), ("w4a8", 64): ("–", "missed"),
    }  # fmt: skip
    assert str(found["fp8_dynamic", 1]) == "9.0 (10.0 sgl), 11.0"
    assert str(found["fp8_dynamic", 256]) == "**20.1** (20.0 humming_fp8\\*), –"
    assert str(found["w4a8", 64]) == "8.0, **15.1**" and str(found["w8a8_dynamic", 64]) == "8.0, –"


def test_the_table_counts_goals():
    text = goals.a8_table(synthetic())
    assert "**2 of 4 products meet their goal, 1 of 2 with quantization.** Absent: deepgemm. " in text
    assert "| w4a8, group 128 | 8192×8192 | 8.0, 12.0 | 8.0, 99.0 | – | 8.0, **15.1** | – |" in text, (
        "1024 tokens of ours failed, and have no column"
    )
    assert "0 of 0 products" in goals.a8_table(Results(META, ()))


def test_the_readme_takes_the_table(tmp_path, monkeypatch, capsys):
    page, file = tmp_path / "README.md", tmp_path / "r.json"
    monkeypatch.setattr(goals, "README", page)
    begin, end = goals.A8_MARKS
    page.write_text(f"above\n{begin}\n\n{end}\nbelow\n")
    assert goals.main(["--a8", str(file), "--readme"]) == 1
    assert "r.json: not a readable text file" in capsys.readouterr().err and begin in page.read_text()
    results.write(file, synthetic())
    assert goals.main(["--a8", str(file), "--readme"]) == 0
    assert "products meet their goal" in page.read_text() and page.read_text().endswith(f"{end}\nbelow\n")
    assert begin in (ROOT / "benchmarks" / "README.md").read_text()
    with pytest.raises(SystemExit):
        goals.main(["--a8", "--weight-only"])
