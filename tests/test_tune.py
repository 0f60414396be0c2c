"""Tuning without a GPU: which variants are timed, and the whole of it on a CPU artifact with several variants."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl.artifact import MANIFEST, Artifact, open_artifact, with_table
from qdsl.choice import TOKENS, Row, Table, at, fastest, tables_from_json
from qdsl.cli import main
from qdsl.codegen.cuda import model
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target
from qdsl.diagnostic import Error
from qdsl.manifest import Manifest, plain_params
from qdsl.runtime import QuantLinear, tune
from qdsl.runtime import artifact as artifact_module
from qdsl.runtime.artifact import Kernel, cpu_levels

WEIGHT = Weight("float16", 0, "u4", "float16", 128)


# ---- exploring ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 8192), (2048, 2048)])
def test_the_best_is_found_without_timing_everything(arch, n, k):
    """On times as the model gives them: the choice is that of all times, though the hopeless ones are not taken."""
    gpu, timed, called = target("cuda", arch), [], []
    works = {c.name: c.work for c in candidates(gpu, WEIGHT) if c.work}

    def time_us(m, name):
        return model.seconds(works[name], WEIGHT, gpu.gpu, m, n, k) * 1e6

    def once(m, name):
        called.append((m, name))
        return time_us(m, name) + 15

    def sample(m, name):
        timed.append((m, name))
        return time_us(m, name)

    found = tune.explore(list(works), TOKENS, once, sample, lambda m, names: [time_us(m, name) for name in names])
    everything = {m: {name: time_us(m, name) for name in works} for m in TOKENS}
    assert fastest(found) == fastest(everything)
    assert len(timed) < 0.8 * len(works) * len(TOKENS) and set(timed) <= set(called)
    assert all(times[name] >= everything[m][name] for m, times in found.items() for name in times)


def test_a_variant_that_falls_behind_is_not_called_again():
    times = {"small": lambda m: 10.0 * m, "large": lambda m: 100.0 + m / 10, "bad": lambda m: 5000.0}
    called = []

    def once(m, name):
        called.append((m, name))
        return times[name](m)

    found = tune.explore(
        list(times),
        [1, 4, 16, 64, 256, 1024],
        once,
        lambda m, name: times[name](m),
        lambda m, names: [times[name](m) for name in names],
    )
    assert fastest(found) == ((4, "small"), (None, "large"))
    assert (256, "small") in called and (1024, "small") not in called and "small" not in found[1024]
    assert (1024, "bad") in called, "it is far behind, but it comes nearer"


def test_a_call_that_something_held_up_is_repeated():
    held = {(1, "best")}

    def once(m, name):
        late = (m, name) in held
        held.discard((m, name))
        return 1000.0 if late else 10.0

    us = {"good": 6.0, "best": 5.0}
    found = tune.explore(
        ["good", "best"], [1, 16], once, lambda m, name: us[name], lambda m, names: [us[n] for n in names]
    )
    assert fastest(found) == ((None, "best"),)


def test_those_that_are_close_are_told_by_turns():
    """A GPU at its limit of power: what is timed first is ahead, and is not once the others are timed as often."""
    samples, turns = iter([100.0, 110.0, 130.0]), {"first": 112.0, "second": 109.0}
    found = tune.explore(
        ["first", "second", "third"],
        [4096],
        lambda m, name: 1.0,
        lambda m, name: next(samples),
        lambda m, names: [turns[n] for n in names],
    )
    assert found == {4096: {"first": 112.0, "second": 109.0, "third": 130.0}}


# ---- the whole, on the CPU ---------------------------------------------------------------------------------------
@pytest.fixture
def several(tmp_path, monkeypatch):
    """An artifact of two variants that are the same function, which are said to take 10 m and 50 + m µs."""
    folder = tmp_path / "artifacts" / "several"
    artifact = qdsl.compile(qdsl.load("awq4", act="f32"), "cpu", cpu_levels()[-1:], out=folder)
    (arch,) = artifact.manifest.libraries
    (portable,) = artifact.manifest.variants[arch][""]
    variants = tuple(replace(portable, name=name, order=order) for name, order in (("one", "a"), ("two", "b")))
    row = Row(1, 1, ((None, "two"),), ((None, "two"),))
    manifest = replace(artifact.manifest, variants={arch: {"": variants}}, tables={arch: {"": Table("by hand", row)}})
    (folder / MANIFEST).write_text(manifest.to_json())
    monkeypatch.setattr(artifact_module, "_KERNELS", {})
    monkeypatch.setattr(tune, "rotation", lambda device: 1 << 16)
    times = {"one": lambda m: 10.0 * m, "two": lambda m: 50.0 + m}
    once_us = tune.Trial.once_us
    monkeypatch.setattr(tune.Trial, "once_us", lambda trial, m, name: once_us(trial, m, name) * 0 + times[name](m))
    monkeypatch.setattr(tune.Trial, "sample_us", lambda trial, m, name: times[name](m))
    monkeypatch.setattr(tune.Trial, "by_turns_us", lambda trial, m, names: [times[name](m) for name in names])
    return folder, arch


def run(folder, *shapes, tokens=(1, 4, 16, 64)):
    artifact = open_artifact(folder)
    return list(tune.tune([artifact], torch.device("cpu"), shapes, tokens))


def test_an_artifact_is_tuned(several):
    folder, arch = several
    (found,) = run(folder, (192, 48), (256, 64), (192, 41))
    assert found.arch == arch and not found.table.problems(found.artifact.manifest.variants[arch][""])
    assert [(row.n, row.k) for row in found.table.rows] == [(41, 192), (48, 192), (64, 256)]
    assert all(row.free == ((4, "one"), (None, "two")) for row in found.table.rows)
    assert all(row.fixed == ((None, "two"),) for row in found.table.rows)
    assert found.table.source.startswith("measured on ")
    cells = found.as_json()["times"]
    assert {(c["K"], c["N"], c["M"], c["variant"]) for c in cells} >= {(192, 48, 1, "one"), (256, 64, 64, "two")}


def test_rows_of_other_shapes_stay_if_they_were_measured_on_such_a_gpu(several):
    folder, arch = several
    (found,) = run(folder, (192, 48))
    tuned = with_table(found.artifact, arch, found.table)
    (again,) = tune.tune([tuned], torch.device("cpu"), [(64, 32), (192, 48)], [1])
    assert sorted((row.n, row.k) for row in again.table.rows) == [(32, 64), (48, 192)]
    assert again.table.nearest(48, 192).free == ((1, "one"), (None, "two")), "what is measured again is replaced"
    other = with_table(tuned, arch, replace(found.table, source="measured on another, long ago"))
    (fresh,) = tune.tune([other], torch.device("cpu"), [(64, 32)], [1])
    assert [(row.n, row.k) for row in fresh.table.rows] == [(32, 64)]


def test_artifacts_of_the_same_kernels_are_measured_once(several):
    folder, _ = several
    artifact = open_artifact(folder)
    first, second = tune.tune([artifact, artifact], torch.device("cpu"), [(64, 32)], [1, 2])
    assert first.table == second.table and first.times and not second.times


def test_a_single_variant_leaves_nothing_to_choose():
    lowest = qdsl.compile(qdsl.load("w8a16"), "cpu", cpu_levels()[-1:])
    (found,) = tune.tune([lowest], torch.device("cpu"), [(64, 32)], [1])
    assert found.table is None and not found.times


def test_a_wrong_variant_is_an_error_with_its_place(several, monkeypatch):
    folder, _ = several
    run_variant = artifact_module.Kernel.run_variant

    def wrong(kernel, name, x, buffers, y):
        run_variant(kernel, name, x, buffers, y)
        if name == "two" and x.shape[0] == 16:
            y[-1, -1] += 1

    monkeypatch.setattr(artifact_module.Kernel, "run_variant", wrong)
    with pytest.raises(qdsl.Error, match=r"awq4 for .*: variant two is wrong for K 192, N 48, M 16 \(1 of"):
        run(folder, (192, 48))


@pytest.mark.parametrize("name", [name for name in qdsl.shipped() if not qdsl.load(name).activations])
def test_random_weights_of_every_scheme_have_finite_answers(name):
    """As kernels for sm_90a hold them, sorted by group or not: what a trial compares with is what its buffers say."""
    scheme = qdsl.load(name)
    planned = plan(scheme, target("cuda", "sm_90a"))
    level = cpu_levels()[0]
    manifest = Manifest(
        scheme.name, scheme.text, plain_params(scheme), "cpu", {level: ""}, {level: planned.buffers}, {level: {"": planned.variants}},
        {level: {"": planned.table}}, planned.precision, None, (), {}, {}, scheme.bound,
    )  # fmt: skip
    trial = tune.Trial(Kernel(Artifact(Path(), manifest), level, scheme), 200, 512, torch.device("cpu"))
    trial._prepare(3)
    assert np.isfinite(trial.right.y).all() and trial.right.y.any() and (np.abs(trial.right.y) < 65504).all()
    codes = trial.patterns[scheme.code.name]
    assert codes.shape == (len(trial.features), 512) and len(np.unique(codes)) > min(
        200, (1 << scheme.code.dtype.bits) - 1
    )


def test_a_scheme_that_folds_features_takes_the_tables_of_its_weight(several):
    scheme = qdsl.load(Path(__file__).parent / "schemes" / "gate_up.q")
    with pytest.raises(Error, match="tune a scheme with that weight and a plain output"):
        list(tune.tune([scheme], torch.device("cpu"), [(64, 64)], (1,)))


def test_an_output_that_is_not_written_is_an_error(several, monkeypatch):
    folder, _ = several
    monkeypatch.setattr(artifact_module.Kernel, "run_variant", lambda *args: None)
    with pytest.raises(qdsl.Error, match="is wrong for K 64, N 32, M 1 "):
        run(folder, (64, 32))


# ---- the command -------------------------------------------------------------------------------------------------
def test_the_command_keeps_the_tables(several, tmp_path, monkeypatch, capsys):
    folder, arch = several
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST}
    monkeypatch.setattr(tune, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr("qdsl.cli._is_for_gpus", lambda artifact: True)
    out = tmp_path / "tables.json"
    command = ["tune", str(folder.parent), "--shapes", "192x48,256x64", "--m", "1,4,16", "--out", str(out)]
    assert main(command) == 0
    assert "one to m = 4, then two" in capsys.readouterr().out
    tuned = open_artifact(folder)
    assert tuned.library(arch), "its digest is still that of the library"
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST} == before
    assert tuned.manifest.tables[arch][""] == tables_from_json(out.read_text())[0]
    assert (
        tuned.manifest.choose(arch, 4, 48, 192).name == "one" and tuned.manifest.choose(arch, 5, 48, 192).name == "two"
    )
    layer = QuantLinear("awq4", 192, 48, dtype=torch.float32, artifact=folder)
    assert at(layer.kernel.limits(48, 192), 1) == "one"
    assert main([*command, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["table"]["rows"] and all(math.isfinite(c["us"]) for c in record["times"])
    assert len(tables_from_json(out.read_text())) == 1, "a table of the same kernels is replaced"


def test_an_artifact_shows_its_variants_and_their_table(several, capsys):
    folder, arch = several
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"  {arch}\n    one (a): linear(x, q, s, z, b, y)\n    two (b): " in shown
    assert "    by hand\n      any K and N: two\n" in shown
    assert main(["show", str(folder), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert [v["name"] for v in manifest["variants"][arch][""]] == ["one", "two"]
    assert manifest["tables"][arch][""]["spare"]["free"] == [[None, "two"]]


def test_without_a_gpu_it_is_one_clear_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "awq4"]) == 1
    problem = capsys.readouterr().err
    assert "needs" not in problem.splitlines()[1:] and "a CUDA GPU, and torch sees none" in problem


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tune", "awq5"], "did you mean `awq4`"),
        (["tune", "{empty}"], "neither an artifact nor a folder of them"),
        (["tune", "{artifact}", "-P", "group=64"], "leave out -P"),
        (["tune", "awq4", "--out", "{empty}/no/where.json"], "there is no directory"),
        (["tune", "awq4", "--out", "{artifact}/" + MANIFEST], "not a file of tables"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_timed(several, tmp_path, capsys, argv, words):
    (tmp_path / "empty").mkdir()
    assert main([a.format(empty=tmp_path / "empty", artifact=several[0]) for a in argv]) == 1
    assert words in capsys.readouterr().err
