"""`qdsl bench` on the CPU, the format of results, and the scripts of benchmarks/: tables, goals and what they refuse."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import cli, plot, reference, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Meta, Results
from qdsl.runtime import bench, timing

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import beside  # noqa: E402
import goals  # noqa: E402
import host_cost  # noqa: E402
import peers  # noqa: E402
import w4a16  # noqa: E402
import weight_only  # noqa: E402

CPU = torch.device("cpu")
META = Meta("0123abcd", "a machine", "2026-01-02T03:04:05Z", {"torch": "2.6"}, "a clock; floor at 1 GB/s")
CELL = Cell("awq4(scale_type=f16)", "f16", 128, 4096, 4096, 1, None, "qdsl", 5.0, 2e-4, 2.0)
TINY = """\
scheme tiny(act: type = f32)
    "Bytes and one scale per channel."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

compute act -> f32
output act
"""
FLOOR = ("--bandwidth", "20", "--flops", "0.2")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(timing, "BUDGET_S", 0.005)
    monkeypatch.setattr(bench, "COPIES", 3)
    monkeypatch.setattr(peers, "COPIES", 3)


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.q"
    file.write_text(TINY)
    return file


def failing(capsys, *argv: object) -> str:
    assert cli.main([str(a) for a in argv]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and err.startswith("error: "), err
    return err


# ---- the command -------------------------------------------------------------------------------------------------
def test_the_command_measures_and_writes(tiny, tmp_path, capsys):
    out = tmp_path / "r.json"
    argv = ["bench", str(tiny), "--shapes", "64x32,48x16", "--m", "1,5", "--out", str(out), *FLOOR]
    assert cli.main(argv) == 0
    head, ceilings, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("tiny(act=f32) on ") and "thread" in head
    assert ceilings == "floor: 20 GB/s and 0.2 TFLOP/s (given)"
    assert columns.split() == ["K", "N", "M", "us", "GB/s", "TFLOP/s", "roofline", "torch", "us", "error"]
    assert [row.split()[:3] for row in rows] == [[k, n, m] for k, n in (("64", "32"), ("48", "16")) for m in "15"]
    found = results.read(out)
    assert [(c.contender, c.M) for c in found.cells[:4]] == [("qdsl", 1), ("torch", 1), ("qdsl", 5), ("torch", 5)]
    assert all(c.us > 0 and c.rel_err < 1e-5 and c.threads == torch.get_num_threads() for c in found.cells)
    assert found.cells[0].floor_us == pytest.approx((64 * 32 + 4 * 32 + 4 * (64 + 32)) / 20e9 * 1e6)
    assert {c.scheme for c in found.cells} == {"tiny"} and {c.dtype for c in found.cells} == {"f32"}


def test_the_command_prints_the_file_as_json(tiny, capsys):
    assert cli.main(["bench", str(tiny), "--shapes", "64x32", "--m", "2", "--json", *FLOOR]) == 0
    found = results.parse(capsys.readouterr().out)
    assert [c.contender for c in found.cells] == ["qdsl", "torch"]
    assert found.meta.device == results.processor() and "wall clock" in found.meta.method


def test_half_precision_stands_beside_float32_on_a_cpu(tiny, capsys):
    assert cli.main(["bench", str(tiny), "-P", "act=f16", "--shapes", "64x32", "--m", "2", "--json", *FLOOR]) == 0
    assert [c.dtype for c in results.parse(capsys.readouterr().out).cells] == ["f16", "f32"]
    assert cli.main(["bench", str(tiny), "-P", "act=bf16", "--shapes", "64x32", "--m", "2", "--json", *FLOOR]) == 0
    assert [c.dtype for c in results.parse(capsys.readouterr().out).cells] == ["bf16", "bf16"]


@pytest.mark.gpu
def test_the_command_on_a_gpu(capsys, monkeypatch):
    monkeypatch.undo()
    assert cli.main(["bench", "awq4", "--target", "cuda", "--shapes", "1024x512", "--m", "1,17", "--json"]) == 0
    found = results.parse(capsys.readouterr().out)
    assert (
        all(c.threads is None and 0 < c.us < 1000 and c.rel_err < 1e-3 for c in found.cells) and len(found.cells) == 4
    )
    assert "CUDA graph replays" in found.meta.method and "8192x8192x8192 in float16" in found.meta.method
    assert found.meta.device == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_a_call_on_a_gpu_allocates_its_output_alone(capsys):
    host_cost.main(["--shape", "1024x512"])
    assert "allocations beyond the output: 0 a call, 0 bytes" in capsys.readouterr().out


def test_activations_that_share_a_scale_are_compared_as_a_whole():
    text = qdsl.source("w8a8_dynamic").text
    assert bench._rows_stand_alone(qdsl.load("awq4")) and bench._rows_stand_alone(qdsl.parse(text))
    assert not bench._rows_stand_alone(qdsl.parse(text.replace("scale t[m]    :", "scale t[]     :")))


def test_the_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(bench, "last_level_cache", lambda: 0)
    found = bench.ceilings(qdsl.load("w8a16", act="f32"), CPU)
    assert 0.1e9 < found.bandwidth < 1e13 and 1e9 < found.operations < 1e14
    assert "of 256 MiB" in found.source and "2048x2048x2048 in float32" in found.source
    assert bench.ceilings(qdsl.load("w8a16"), CPU, 2e9, 3e12) == bench.Ceilings(2e9, 3e12, "given")


def test_a_wrong_kernel_is_an_error(tiny, capsys, monkeypatch):
    right = reference.linear

    def shifted(*args, **kwargs):
        found = right(*args, **kwargs)
        return type(found)(found.y + 1.0, found.bound)

    monkeypatch.setattr(reference, "linear", shifted)
    said = failing(capsys, "bench", tiny, "--shapes", "64x32", "--m", "2", *FLOOR)
    assert "wrong output for K 64, N 32, M 2: y[0, 0] is " in said and "64 are wrong" in said and "qdsl verify" in said


def test_what_no_kernel_wrote_is_wrong_in_rows_that_are_not_compared_too():
    scheme = qdsl.load("w8a16")
    right = bench._Answer(scheme, np.array([0, 7]), np.ones((2, 3)), np.full((2, 3), 0.1), np.ones((2, 3)))
    y = torch.ones(9, 3)
    assert right.error_of(y, "wrong") == 0
    assert right.error_of(y[:4], "wrong") == 0, "rows beyond M are not asked for"
    y[5, 1] = float("nan")
    with pytest.raises(Error, match=r"wrong: y\[5, 1\] was not written \(1 are wrong\)"):
        right.error_of(y, "wrong")
    y[5, 1], y[7, 2] = 1, 1.2
    with pytest.raises(Error, match=r"y\[7, 2\] is 1.2\d*, should be 1 within 0.1"):
        right.error_of(y, "wrong")


def test_many_rows_are_sampled_with_the_last_of_every_m():
    rows = bench._looked_at((1, 16, 4096), 8192, 8192)
    assert {0, 15, 4095} <= set(rows) and len(rows) < 300 and (np.diff(rows) > 0).all()
    assert (bench._looked_at((1, 9), 64, 64) == np.arange(9)).all()


def test_declared_bytes_are_codes_scales_zeros_x_and_y():
    weights = 4096 * 4096 // 2 + 4096 * 32 * 2 + 4096 * 32 // 2
    assert bench.declared_bytes(qdsl.load("awq4"), 1, 4096, 4096) == weights + 2 * (4096 + 4096)
    assert bench.declared_bytes(qdsl.load("w8a16"), 3, 64, 32) == 64 * 32 + 64 * 4 + 3 * 2 * (64 + 32)
    assert beside.H200.floor_us(weights + 2 * 8192, 2 * 4096**2) == pytest.approx(2.0308539534883723)


# ---- what the command refuses ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("option", "text", "words"), [
    ("--shapes", "4096", "argument --shapes: item 1 of '4096' is '4096', not KxN; write 4096x14336,8192x8192"),
    ("--shapes", "64x64,0x64", "item 2 of '64x64,0x64' is '0x64'"), ("--shapes", "64x64,", "item 2"),
    ("--shapes", "axb", "'axb'"), ("--shapes", "64x64x64", "not KxN"), ("--shapes", "-4x4", "not KxN"),
    ("--m", "1,x", "argument --m: item 2 of '1,x' is 'x', not a number of tokens; write 1,16,64"),
    ("--m", "0", "item 1"), ("--m", "1.5", "'1.5'"), ("--m", "", "item 1"), ("--bandwidth", "fast", "'fast' is not a positive number"),
    ("--flops", "0", "'0' is not"), ("--flops", "nan", "'nan' is not"),
])  # fmt: skip
def test_wrong_options(option, text, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "awq4", f"{option}={text}"])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_repeated_sizes_are_measured_once():
    assert cli.shapes("2x3, 4x5,2x3") == ((2, 3), (4, 5)) and cli.tokens("3,1,3") == (3, 1)
    with pytest.raises(argparse.ArgumentTypeError):
        cli.tokens("1 2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys):
    assert "needs a CUDA GPU, and torch sees none; `--target cpu`" in failing(
        capsys, "bench", "awq4", "--target", "cuda"
    )


def test_a_shape_that_the_scheme_refuses(tmp_path, capsys):
    file = tmp_path / "even.q"
    file.write_text(TINY.replace("weight {", "require k % 64 == 0\n\nweight {"))
    said = failing(capsys, "bench", file, "--shapes", "64x16,65x16", *FLOOR)
    assert "requires k % 64 == 0" in said and "k = 65" in said
    assert "more than any layer has" in failing(capsys, "bench", file, "--shapes", "999999936x99999", *FLOOR)


def test_no_matplotlib_is_said_before_anything_is_measured(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench.Bench, "__init__", lambda *_: pytest.fail("measured first"))
    assert "pip install 'qdsl[plot]'" in failing(capsys, "bench", tiny, "--plot", tmp_path / "p.png")


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_files_that_can_not_be_written(option, tiny, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="draws with matplotlib, of the extra `plot`")
    monkeypatch.setattr(bench.Bench, "__init__", lambda *_: pytest.fail("measured first"))
    assert "no directory" in failing(capsys, "bench", tiny, option, tmp_path / "absent" / "r.png")
    (tmp_path / "r.png").mkdir()
    assert "is a directory" in failing(capsys, "bench", tiny, option, tmp_path / "r.png")
    if option == "--plot":
        assert "a plot is a .pdf, .png, .svg file" in failing(capsys, "bench", tiny, option, tmp_path / "r.txt")


# ---- pictures ----------------------------------------------------------------------------------------------------
def test_a_plot_is_drawn(tiny, tmp_path):
    pytest.importorskip("matplotlib", reason="draws with matplotlib, of the extra `plot`")
    file = tmp_path / "p.png"
    assert cli.main(["bench", str(tiny), "--shapes", "64x32", "--m", "3", "--plot", str(file), *FLOOR]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_line_a_contender_and_a_floor_a_scheme(tmp_path):
    pytest.importorskip("matplotlib", reason="draws with matplotlib, of the extra `plot`")
    cells = [replace(c, K=k) for c in synthetic().cells for k in (4096, 8192)]
    plot.draw(Results(META, tuple(cells)), tmp_path / "p.svg")
    other = tuple(replace(c, group=32, floor_us=3.0) for c in synthetic().cells if c.contender == "qdsl")
    plot.draw(Results(META, (*synthetic().cells, *other)), tmp_path / "q.svg")
    assert (tmp_path / "p.svg").stat().st_size < (tmp_path / "q.svg").stat().st_size * 4
    with pytest.raises(Error, match="nothing to draw"):
        plot.draw(Results(META, ()), tmp_path / "p.svg")


# ---- time --------------------------------------------------------------------------------------------------------
class FakeGpu:
    """A GPU whose calls take a known time, in place of torch.cuda: a graph is the list of its calls."""

    def __init__(self, us: float):
        self.us, self.clock, self.capturing, self.replays = us, 0.0, None, 0

    def call(self, _: int) -> None:
        if self.capturing is None:
            self.clock += self.us
        else:
            self.capturing.append(self.us)

    def synchronize(self) -> None:
        assert self.capturing is None, "nothing may wait while a graph is captured"

    def graph(self, graph):
        gpu = self

        class Capture:
            def __enter__(self):
                gpu.capturing = graph.calls

            def __exit__(self, *_):
                gpu.capturing = None

        return Capture()

    def CUDAGraph(self):  # noqa: N802
        gpu = self

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                gpu.replays += 1
                gpu.clock += sum(self.calls) + 3.0  # a launch

        self.last = Graph()
        return self.last

    def Event(self, enable_timing):  # noqa: N802
        gpu = self

        class Event:
            def record(self):
                self.at = gpu.clock

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e-3

        return Event()


@pytest.mark.parametrize(
    ("us", "copies", "calls"), [(5.0, 48, 48), (5.0, 12, 24), (3000.0, 4, 4), (500.0, 1, 4), (1e-3, 1, 24)]
)
def test_graphs_are_long_enough_for_their_launch_not_to_show(us, copies, calls, monkeypatch):
    gpu = FakeGpu(us)
    for name in ("synchronize", "graph", "CUDAGraph", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    found = timing.median_us(gpu.call, copies, torch.device("cuda"))
    assert len(gpu.last.calls) == calls
    assert us <= found <= us * 1.03 + 3.1 / calls


def test_wall_clock_goes_through_every_copy():
    seen = []
    assert timing.median_us(seen.append, 5, CPU) > 0
    assert seen[:5] == [0, 1, 2, 3, 4] and set(seen) == {0, 1, 2, 3, 4}


def test_the_rotation_is_larger_than_the_last_cache(monkeypatch):
    assert timing.rotation(torch.device("cuda")) == 400 << 20
    monkeypatch.setattr(timing, "last_level_cache", lambda: 384 << 20)
    assert timing.rotation(CPU) == 768 << 20


# ---- the format --------------------------------------------------------------------------------------------------
def test_results_survive_a_file(tmp_path):
    absent = replace(CELL, contender="marlin_fp16", us=None, rel_err=None)
    found = Results(META, (CELL, absent, replace(CELL, group="k", threads=4), replace(CELL, group=None)))
    results.write(tmp_path / "r.json", found)
    assert results.read(tmp_path / "r.json") == found
    data = json.loads((tmp_path / "r.json").read_text())
    assert [*data] == ["meta", "cells"] and [*data["meta"]] == ["commit", "device", "date", "versions", "method"]
    names = ["scheme", "dtype", "group", "K", "N", "M", "threads", "contender", "us", "rel_err", "floor_us"]
    assert [*data["cells"][0]] == names


def test_every_results_file_of_the_repository_is_one():
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert files
    for file in files:
        if not file.stem.startswith("counts"):  # which tests/test_cpu_bench.py reads
            results.read(file)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    results.write(tmp_path / "r.json", Results(META, (CELL,)))
    before = (tmp_path / "r.json").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        results.write(tmp_path / "r.json", Results(META, ()))
    assert (tmp_path / "r.json").read_text() == before and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: d.pop("meta"), '"meta"'), (lambda d: d["meta"].pop("commit"), "meta: no `commit`"),
    (lambda d: d["meta"].update(host="x"), "meta: unknown `host`"), (lambda d: d["meta"].update(device=""), "`device` is ''"),
    (lambda d: d["meta"].update(versions=[1]), "`versions`"), (lambda d: d["cells"][0].pop("us"), "cell 0: no `us`"),
    (lambda d: d["cells"][0].update(variant="m1"), "cell 0: unknown `variant`"),
    (lambda d: d["cells"][0].update(us=-1), "`us` is -1, not a positive number or null"),
    (lambda d: d["cells"][0].update(us="5"), "`us`"), (lambda d: d["cells"][0].update(M=0), "`M` is 0"),
    (lambda d: d["cells"][0].update(K=True), "`K` is True"), (lambda d: d["cells"][0].update(floor_us=None), "`floor_us`"),
    (lambda d: d["cells"][0].update(group="all"), "`group`"), (lambda d: d["cells"][0].update(threads=0), "`threads`"),
    (lambda d: d["cells"].append(dict(d["cells"][0])), "cell 1: a second one"), (lambda d: d["cells"].append(3), "cell 1: not an object"),
])  # fmt: skip
def test_what_is_not_of_the_format_is_refused(change, said, tmp_path):
    data = json.loads(Results(META, (CELL,)).to_json())
    change(data)
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(Error) as problem:
        results.read(tmp_path / "r.json")
    assert said in str(problem.value) and str(problem.value).startswith(f"{tmp_path / 'r.json'}: not results")


def test_unreadable_files(tmp_path):
    for text, said in (
        (b"{", "not JSON"),
        (b"\xff\xfe", "not a readable"),
        (b"[]", "not results"),
        (b"[NaN", "not JSON"),
    ):
        (tmp_path / "r.json").write_bytes(text)
        with pytest.raises(Error, match=said):
            results.read(tmp_path / "r.json")


def test_runs_are_joined_only_if_they_agree():
    old = Results(META, (CELL, replace(CELL, M=2)))
    newer = replace(META, date="2027-01-01T00:00:00Z")
    found = results.joined(old, newer, (replace(CELL, us=4.0), replace(CELL, M=4)))
    assert [(c.M, c.us) for c in found.cells] == [(1, 4.0), (2, 5.0), (4, 5.0)] and found.meta == newer
    for change in ({"commit": "f"}, {"device": "another"}, {"versions": {"torch": "2.7"}}, {"method": "a stopwatch"}):
        with pytest.raises(Error, match=f"{next(iter(change))} was"):
            results.joined(old, replace(META, **change), ())


def test_a_label_names_the_parameters_without_a_field():
    assert results.scheme_label(qdsl.load("gptq", bits=3)) == "gptq(bits=3, scale_type=f16)"
    assert results.scheme_label(qdsl.load("q4_0")) == "q4_0"
    assert results.meta("x", "y", {}, "cafe").commit == "cafe" and results.meta("x", "y", {}).commit


# ---- goals -------------------------------------------------------------------------------------------------------
TIMES = {"marlin_bf16": 10.0, "marlin_fp16": 8.0, "machete_bf16": 12.0, "humming_bf16": 9.0, "tinygemm_bf16": 7.5,
         "cublas_bf16": 11.0, "cublas_fp16": 10.5}  # fmt: skip


def synthetic(ours: float = 5.0, floor: float = 2.0, times: dict | None = None) -> Results:
    cells = []
    for m in (1, 2, 16, 64, 128, 256, 1024, 4096, 5000):
        for dtype in ("f16", "bf16"):
            cells.append(replace(CELL, dtype=dtype, M=m, us=ours, floor_us=floor))
        for name, us in (times or TIMES).items():
            dtype = "f16" if name.endswith("fp16") else "bf16"
            us = None if name.startswith("tinygemm") and m > 64 else us
            scheme = f"{CELL.scheme.partition('(')[0]}(scale_type={dtype})"  # peers have scales in their own type
            cells.append(replace(CELL, scheme=scheme, dtype=dtype, M=m, contender=name, us=us, floor_us=floor))
    return Results(META, tuple(cells))


def test_goals():
    found = {(v.cell.dtype, v.cell.M): v for v in goals.verdicts(synthetic())}
    expected = {
        ("f16", 1): ("tinygemm_bf16", 0.65 * 7.5), ("bf16", 2): ("tinygemm_bf16", 0.65 * 7.5),
        ("f16", 16): ("tinygemm_bf16", 0.70 * 7.5), ("f16", 64): ("tinygemm_bf16", 0.75 * 7.5),
        ("f16", 128): ("marlin_fp16", 0.95 * 8), ("bf16", 256): ("humming_bf16", 0.95 * 9),
        ("f16", 1024): ("cublas_fp16", 10.5), ("bf16", 4096): ("cublas_bf16", 11.0),
    }  # fmt: skip
    for place, (name, goal) in expected.items():
        assert (found[place].best.contender, found[place].goal) == (name, pytest.approx(goal)), place
    assert found["f16", 1].word == "missed" and found["f16", 64].word == "met"
    assert found["f16", 5000].goal is None and found["f16", 5000].word == "–"


def test_a_goal_gives_way_to_the_floor():
    for m, goal in ((1, 1.15 * 6 + 1.5), (8, 1.15 * 6 + 1.5), (16, 1.2 * 6 + 2), (32, 0.75 * 7.5)):
        assert goals.limit(m, 7.5, 6.0) == pytest.approx(goal)


def test_there_is_no_goal_without_the_peers_it_is_about():
    few = {name: TIMES[name] for name in ("tinygemm_bf16", "cublas_bf16")}
    rows = goals.verdicts(synthetic(times=few))
    assert all(row.goal is None for row in rows) and rows[0].best.contender == "tinygemm_bf16"
    text = goals.table(synthetic(times=few))
    assert "**0 of 0 goals met.** Absent: humming, machete, marlin." in text


def test_the_table_counts_goals_and_names_who_was_absent():
    text = goals.table(synthetic(times={**TIMES, "machete_fp16": None}))
    assert "**12 of 16 goals met.** Absent: machete_fp16. " in text
    assert "| f16 | 4096×4096 | 1 | 5.0 | 40% | 7.5 tinygemm_bf16 | 4.9 | missed |" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 19


def test_the_readme_takes_the_table_in_place(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    monkeypatch.setattr(goals, "README", page)
    results.write(tmp_path / "r.json", synthetic())
    page.write_text(f"above\n{goals.BEGIN}\nold\n{goals.END}\nbelow\n")
    assert goals.main([str(tmp_path / "r.json"), "--readme"]) == 0
    once = page.read_text()
    assert "old" not in once and once.startswith("above\n") and once.endswith("below\n") and "goals met" in once
    assert goals.main([str(tmp_path / "r.json"), "--readme"]) == 0
    assert page.read_text() == once
    page.write_text("no marks")
    assert goals.main([str(tmp_path / "r.json"), "--readme"]) == 1
    assert "put the two lines where the table goes" in capsys.readouterr().err
    assert goals.BEGIN in (ROOT / "benchmarks" / "README.md").read_text()


def test_goals_without_a_file(tmp_path, capsys):
    assert goals.main([str(tmp_path / "absent.json")]) == 1
    assert "absent.json: not a readable text file" in capsys.readouterr().err


# ---- side by side ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_codes_are_packed_little_end_first(bits):
    q = torch.randint(0, 1 << bits, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = peers.dense_bits(q, bits).numpy().view(np.uint32)
    assert words.shape == (3, 2 * bits)
    for row in range(3):
        number = sum(int(word) << 32 * at for at, word in enumerate(words[row]))
        assert [number >> bits * k & (1 << bits) - 1 for k in range(64)] == q[row].tolist()


def test_numbers_of_a_problem_are_the_same_in_both_types():
    given = w4a16.random_problem(256, 64, 2, None, 3, CPU)
    stored = given.stored
    for t in (stored.scale, given.x):
        assert torch.equal(t.half().float(), t.float()) and torch.equal(t.bfloat16().float(), t.float())
    assert stored.codes.max() == 15 and stored.codes.min() == 0 and stored.zero.max() == 15
    symmetric = w4a16.random_problem(256, 64, 2, 8, 3, CPU).stored
    assert symmetric.zero is None and symmetric.symmetric and not stored.symmetric


def test_all_contenders_get_the_same_numbers_and_the_absent_are_named(capsys):
    found = w4a16.contenders(lambda act: qdsl.load("awq4", act=act))
    assert len({c.label for c in found}) == len(found) == 11
    given = w4a16.random_problem(256, 64, 2, None, 4, CPU)
    cells, absent = beside.measure(found, given, (1, 4), "no --peers DIR", beside.H200)
    assert results.check(json.loads(Results(META, tuple(cells)).to_json())) == [] and len(cells) == 22
    errors = {c.contender: c.rel_err for c in cells if c.M == 4 and c.dtype == "f16" and c.us}
    assert errors.keys() == {"qdsl", "cublas_fp16"} and all(0 < e < 1e-3 for e in errors.values())
    out = capsys.readouterr().out
    assert all(f"  {name}_bf16 absent: no --peers DIR" in out for name in ("marlin", "machete", "humming"))
    assert "tinygemm_bf16 absent: NotImplementedError" in out and absent.keys() == {
        *(f"{name}_{kind}" for name in ("marlin", "machete", "humming") for kind in ("bf16", "fp16")), "tinygemm_bf16"
    }  # fmt: skip


def test_other_groups_and_the_symmetric_scheme(capsys):
    schemes = [qdsl.load("awq4", group=g) for g in (128, 32, "k")] + [qdsl.load("gptq_sym")]
    cells = []
    for scheme in schemes:
        group = scheme.params["group"]
        zero = 8 if scheme.name == "gptq_sym" else None
        given = w4a16.random_problem(256, 64, 1 if group == "k" else 256 // group, zero, 2, CPU)
        ours = beside.qdsl_with(scheme)
        found, absent = beside.measure([ours], given, (2,), "", beside.H200)
        cells += found
        assert not absent and found[0].rel_err < 1e-3
    head, *rows = w4a16.granularity([replace(c, us=10.0) for c in cells], schemes)
    assert len(rows) == 3 and [row.split("  ")[0] for row in rows[-2:]] == [
        "awq4(scale_type=f16)",
        "gptq_sym(bits=4, scale_type=f16)",
    ]
    base, fine = (bench.declared_bytes(s, 2, 64, 256) for s in schemes[:2])
    assert rows[0].split()[-1] == f"{base / fine:.2f}" and head.split()[-1] == "ratio"
    missed = w4a16.granularity([replace(c, us=30.0 if c.group == 32 else 10.0) for c in cells], schemes)
    assert missed[1].endswith("missed") and not missed[2].endswith("missed")


WIDE = sorted({name for name, _ in weight_only.SCHEMES})


@pytest.mark.parametrize("name", WIDE)
def test_every_scheme_of_weights_alone_has_its_numbers(name, capsys):
    """The weight by the equation on tensors is the one that the layer multiplies by, and the one that peers are given."""
    scheme = weight_only.chosen(name)[0]
    given = weight_only.random_problem(scheme, 256, 64, 3, CPU)
    found = [beside.qdsl_with(scheme), beside.dense_of(scheme, beside.qdsl_with(scheme).dtype)]
    cells, absent = beside.measure(found, given, (3,), "", beside.H200)
    assert not absent and all(c.rel_err < 4e-3 for c in cells)
    patterns = given.patterns(scheme)
    assert np.array_equal(reference.decode_weight(scheme, patterns, 64, 256), given.weight.numpy())
    if given.stored is not None:
        assert torch.equal(given.stored.weight, given.weight)
    assert (given.stored is None) == (name in ("nf4", "bnb_fp4", "q4_1", "gptq_actorder", "gptq_sym_actorder"))


def test_all_shipped_schemes_of_weights_alone_are_measured():
    assert set(WIDE) == {name for name in qdsl.shipped() if not qdsl.load(name).activations}


def test_goals_of_weights_alone(tmp_path, monkeypatch):
    def cell(scheme, m, us, contender="qdsl", floor=8.0):
        return replace(CELL, scheme=scheme, dtype="f16", M=m, us=us, contender=contender, floor_us=floor)

    cells = [cell("awq4", 1, 10.0), cell("wide", 1, 24.0, floor=16.0), cell("wide", 1, 28.0, "humming_fp16", 16.0),
             cell("awq4", 256, 40.0), cell("wide", 256, 41.0), cell("wide", 256, 42.0, "marlin_fp16"),
             cell("wide", 256, 40.5, "cublas_fp16"), cell("awq4", 64, 9.0)]  # fmt: skip
    found = {(row.cell.scheme, row.cell.M): row for row in goals.besides(Results(META, tuple(cells)))}
    assert found["awq4", 1].goal == pytest.approx(1.15 * 10 + 1.5) and found["awq4", 64].goal is None
    assert found["wide", 1].goal == pytest.approx(0.85 * 28) and found["wide", 1].word == "missed"
    assert found["wide", 256].goal == 40.5 and str(found["wide", 256]) == "**41.0** (42.0 marlin, 40.5 cublas)"
    assert "**1 of 3 goals met**, 1 of 2 of those for few tokens" in goals.weight_only_table(
        Results(META, tuple(cells))
    )


def test_a_wrong_contender_is_no_contender(capsys):
    scheme = qdsl.load("awq4")
    given = w4a16.random_problem(128, 64, 1, None, 2, CPU)
    wrong = beside.Contender("qdsl", beside.F16, lambda given, d: lambda x, i: x.new_zeros(len(x), 64), scheme)
    cells, absent = beside.measure([wrong], given, (1, 2), "", beside.H200)
    assert [c.us for c in cells] == [None, None] and "from M = 1 on: wrong output" in absent["qdsl_fp16"]


def test_cliffs():
    cells = [replace(CELL, M=m, us=us) for m, us in ((4, 9.0), (1, 5.0), (2, 6.0), (3, 10.0), (8, None))]
    assert w4a16.cliffs(cells) == ["f16, K 4096, N 4096: M 3 takes 10.00 us, 1.11 times M 4"]
    assert w4a16.SWEEP[:65] == tuple(range(1, 66)) and w4a16.SWEEP[65:71] == (127, 128, 129, 255, 256, 257)
    assert w4a16.SWEEP[-2:] == (4095, 4096)


def test_contenders_are_chosen_by_name():
    found = w4a16.contenders(lambda act: qdsl.load("awq4", act=act))
    assert [c.label for c in beside.chosen(found, "qdsl,marlin_fp16")] == ["qdsl_fp16", "qdsl_bf16", "marlin_fp16"]
    with pytest.raises(Error, match="no contender 'marlim'; there are qdsl_fp16, "):
        beside.chosen(found, "marlim")


def test_a_run_keeps_what_a_file_holds(tmp_path):
    scheme, file = qdsl.load("awq4"), tmp_path / "r.json"
    ours = beside.Contender("qdsl", beside.F16, lambda given, d: lambda x, i: exact(x, given.weight), scheme)

    def exact(x, weight):
        return (x.double() @ weight.t()).to(x.dtype)

    for shape in ((128, 64), (256, 64)):
        args = w4a16.parsed(["--out", str(file), "--append", "--tokens", "1,2", "--commit", "cafe"])
        run = beside.Run(args, CPU)
        run.shape([ours], w4a16.random_problem(*shape, 1, None, 2, CPU), "")
        assert not run.failed
    assert [(c.K, c.M) for c in results.read(file).cells] == [(128, 1), (128, 2), (256, 1), (256, 2)]
    with pytest.raises(Error, match="commit was 'cafe' and is 'f00d'; write another file"):
        beside.Run(w4a16.parsed(["--out", str(file), "--append", "--commit", "f00d"]), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_side_by_side_without_a_gpu(capsys):
    assert w4a16.main(["--commit", "cafe"]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        w4a16.main(["--shapes", "100x64"])
    assert "multiples of 128" in capsys.readouterr().err


def test_a_pack_that_is_not_there(tmp_path):
    with pytest.raises(Error, match="no --peers DIR"):
        peers.load(None)
    with pytest.raises(Error, match=r"no vllm_C.so in"):
        peers.load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_host_cost(capsys, monkeypatch):
    monkeypatch.setattr(host_cost, "BURSTS", 3)
    assert host_cost.main([]) in (0, 1)
    out = capsys.readouterr().out
    assert "K 128, N 16, M 1" in out and "goal 12 us" in out and "not counted on a CPU" in out
    assert host_cost.main(["--scheme", "awq5"]) == 1
    assert "did you mean `awq4`?" in capsys.readouterr().err
