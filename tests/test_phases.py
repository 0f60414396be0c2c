"""Phases: a layer is one of them, an artifact holds all, and everything that runs kernels says which."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference, results
from qdsl.artifact import MANIFEST, open_artifact, with_table
from qdsl.choice import Row, Table
from qdsl.cli import main
from qdsl.codegen.cuda import host
from qdsl.codegen.pipeline import compile_into, emit
from qdsl.codegen.plan import plans
from qdsl.codegen.target import target
from qdsl.diagnostic import CheckpointError
from qdsl.manifest import Manifest
from qdsl.runtime import QuantLinear, repack, tune
from qdsl.runtime import artifact as artifact_module
from qdsl.runtime.artifact import Kernel, cpu_levels
from qdsl.runtime.verify import verify

SCHEMES = Path(__file__).parent / "schemes"
PHASES = SCHEMES / "phases.q"
N, K = 33, 144


def filled(file, phase, **options):
    """(a layer of a phase with random weights, the bit patterns of all phases)."""
    layer = QuantLinear(file, K, N, True, phase=phase, **options)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(0), N, K)
    return layer.set_patterns(patterns), patterns


def inputs(layer, m=5):
    return torch.from_numpy(np.random.default_rng(1).standard_normal((m, K))).to(layer.dtype)


def agrees(layer, patterns, phase) -> bool:
    expected = reference.linear(layer.scheme, inputs(layer).double().numpy(), patterns, N, phase=phase)
    return bool((np.abs(layer(inputs(layer)).double().numpy() - expected.y) <= expected.bound).all())


# ---- layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", ["phases", "shared_names"])
def test_a_layer_is_in_one_phase(file):
    answers = {}
    for phase in ("prefill", "decode"):
        layer, patterns = filled(SCHEMES / f"{file}.q", phase)
        assert agrees(layer, patterns, phase) and agrees(pickle.loads(pickle.dumps(layer)), patterns, phase)
        assert f"phase={phase}" in repr(layer)
        answers[phase] = layer(inputs(layer))
        again = QuantLinear(layer.scheme, K, N, True, phase=phase)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again(inputs(layer)), answers[phase])
    assert not torch.equal(answers["prefill"], answers["decode"])


@pytest.mark.parametrize("role", ["", "both"])
def test_the_first_phase_serves_a_layer_of_no_role(role):
    layer, patterns = filled(PHASES, role)
    assert agrees(layer, patterns, "prefill") and layer.kernel.phase == "prefill"


def test_a_layer_loads_the_tensors_of_its_phase():
    layer, patterns = filled(PHASES, "decode")
    tensors = repack.write(layer.scheme, layer.scheme.layouts["modelslim"], patterns)
    assert set(tensors) == {"weight", "weight_scale", "input_scale", "input_offset", "bias"}
    assert torch.equal(
        QuantLinear(PHASES, K, N, True, phase="decode").load(tensors)(inputs(layer)), layer(inputs(layer))
    )
    del tensors["input_scale"], tensors["input_offset"]
    QuantLinear(PHASES, K, N, True, phase="prefill").load(tensors)
    with pytest.raises(CheckpointError, match="`input_scale` is missing"):
        QuantLinear(PHASES, K, N, True, phase="decode").load(tensors)
    assert set(filled(PHASES, "prefill")[0].state_dict()) == {"q", "s", "b", "_extra_state"}


def test_a_phase_that_is_none():
    with pytest.raises(qdsl.Error, match=r"no phase `train` \(it has: prefill, decode\)"):
        QuantLinear(PHASES, K, N, phase="train")


def test_what_one_phase_loads_and_another_computes():
    """The scheme has the loaded tensor; each phase has its own."""
    s = qdsl.load(SCHEMES / "shared_names.q")
    assert s.tensor("t").loaded and s.in_phase("decode").tensor("t").loaded
    assert not s.in_phase("prefill").tensor("t").loaded and s.in_phase("prefill").phases == ()


# ---- plans and artifacts -----------------------------------------------------------------------------------------
def test_a_weight_lies_in_one_way_for_all_phases():
    """Where only one phase has tensor-core kernels, the other's portable ones read its layout."""
    found = plans(qdsl.load(PHASES), target("cuda", "sm_90a"))
    assert found["prefill"].main_loop and not found["decode"].main_loop
    for name in "qsb":
        assert found["prefill"].buffer(name) == found["decode"].buffer(name)
    assert "phase decode: plan of phases(act=bf16)" in emit(qdsl.load(PHASES), "cuda", "sm_90a", "plan")


def test_every_kernel_of_a_library_that_overlaps_waits():
    source = emit(qdsl.load(PHASES), "cuda", "sm_90a", "source")
    kernels = {}
    for body in re.split(r"(?=extern \"C\" __global__)", source)[1:]:  # the last of a name is its definition
        kernels[re.search(r"(\w+)_kernel\(", body)[1]] = body
    assert {"prefill_quantize", "decode_quantize", "prefill_linear", "decode_linear", "prefill_linear_w16"} <= set(
        kernels
    )
    assert [name for name, body in kernels.items() if "griddepcontrol_wait()" not in body] == []


def test_the_manifest_has_the_variants_of_every_phase(capsys):
    artifact = qdsl.compile(qdsl.load(PHASES), "cpu", cpu_levels()[-1:])
    m = artifact.manifest
    assert Manifest.from_json(m.to_json()) == m
    (arch,) = m.libraries
    assert list(m.variants[arch]) == list(m.tables[arch]) == ["prefill", "decode"]
    assert m.choose(arch, 3, N, K, "decode").steps[-1].function == "decode_linear"
    assert main(["show", str(artifact.path)]) == 0
    shown = capsys.readouterr().out
    assert f"{arch}, phase prefill\n    portable (by rising k): prefill_quantize_t(x, t)" in shown
    assert f"{arch}, phase decode\n    portable (by rising k): decode_quantize_a(x, c, o, a)" in shown


def test_architectures_may_want_a_weight_in_ways_of_their_own(tmp_path, monkeypatch):
    """sm_90a multiplies bytes as they lie in shared memory, sm_80 those in registers: one artifact, a layout for each."""
    monkeypatch.setattr(host, "build", lambda source, library, target: library.write_bytes(b""))
    scheme, archs = qdsl.load("w8a8_mix"), ("sm_80", "sm_90a")
    compile_into(tmp_path, scheme, "cuda", archs, "digest", {})
    artifact = open_artifact(tmp_path)
    for phase in scheme.phases:
        one, other = (Kernel(artifact, arch, scheme, phase=phase) for arch in archs)
        assert "  layouts for sm_80\n" in str(artifact) and "  layouts for sm_90a\n" in str(artifact)
        assert one.buffers["q"] != other.buffers["q"] and one.names == other.names
        for kernel in (one, other):
            planned = plans(scheme, target("cuda", kernel.arch))[phase]
            assert {name: kernel.buffers[name] for name in kernel.names} == {b.tensor: b for b in planned.buffers}


def test_verify_goes_through_every_phase():
    report = verify(qdsl.load(PHASES))
    assert report.passed and report.as_json()["phases"] == ["prefill", "decode"]
    assert f"{report.cases} cases of prefill and decode" in str(report)


def test_verify_says_in_which_phase_something_is_wrong(monkeypatch):
    original = QuantLinear.set_patterns

    def corrupt(self, patterns):
        if self.phase == "decode":
            patterns = {**patterns, "q": patterns["q"] ^ 1}
        return original(self, patterns)

    monkeypatch.setattr(QuantLinear, "set_patterns", corrupt)
    report = verify(qdsl.load(PHASES))
    assert not report.passed and all(f.case.startswith("decode, ") for f in report.failures)


def test_bench_measures_the_phase_it_is_told(capsys, monkeypatch):
    words = ["bench", str(PHASES), "--shapes", "64x32", "--m", "2", "--bandwidth", "1", "--flops", "1", "--json"]
    for phase in ("prefill", "decode"):
        assert main([*words, "--phase", phase]) == 0
        cells = json.loads(capsys.readouterr().out)["cells"]
        assert {c["scheme"] for c in cells} == {f"phases(phase={phase})"}
    assert main([*words, "--phase", "train"]) == 1
    assert results.scheme_label(qdsl.load(PHASES)) == "phases(phase=prefill)"


def test_tune_keeps_a_table_for_each_phase(tmp_path, monkeypatch):
    artifact = qdsl.compile(qdsl.load(PHASES, act="f32"), "cpu", cpu_levels()[-1:], out=tmp_path / "artifact")
    (arch,) = artifact.manifest.libraries
    row = Row(1, 1, ((None, "one"),), ((None, "one"),))
    variants, tables = {}, {}
    for phase, (portable,) in artifact.manifest.variants[arch].items():
        variants[phase] = tuple(
            replace(portable, name=n, order=o) for n, o in (("one", "a"), ("two", "b"), (phase, "c"))
        )
        tables[phase] = Table("by hand", row)
    manifest = replace(artifact.manifest, variants={arch: variants}, tables={arch: tables})
    (artifact.path / MANIFEST).write_text(manifest.to_json())
    monkeypatch.setattr(artifact_module, "_KERNELS", {})
    monkeypatch.setattr(tune, "rotation", lambda device: 1 << 16)
    once_us, us = tune.Trial.once_us, {"one": 9.0, "two": 5.0}
    monkeypatch.setattr(tune.Trial, "once_us", lambda trial, m, name: 0 * once_us(trial, m, name) + us.get(name, 1.0))
    monkeypatch.setattr(tune.Trial, "sample_us", lambda trial, m, name: us.get(name, 1.0))
    found = list(tune.tune([open_artifact(artifact.path)], torch.device("cpu"), [(K, N)], [2]))
    assert [t.phase for t in found] == ["prefill", "decode"]
    for tuned in found:
        assert str(tuned).startswith(f"{artifact.path}, phase {tuned.phase}: ")
        with_table(open_artifact(artifact.path), arch, tuned.table, tuned.phase)
    kept = open_artifact(artifact.path).manifest
    assert {phase: kept.choose(arch, 2, N, K, phase).name for phase in variants} == {
        "prefill": "prefill",
        "decode": "decode",
    }
