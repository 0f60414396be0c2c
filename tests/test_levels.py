"""CPU levels: which a processor has, that schemes are right at each, and that no library has instructions above its own."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.codegen.target import ARM_LEVELS, CPU_LEVELS
from qdsl.runtime import QuantLinear, processor, verify
from qdsl.runtime.artifact import find_artifact, fitting_arch
from qdsl.runtime.processor import cpu_levels

FEW = ("awq4", "w8a8_dynamic")
HERE = tuple(reversed(cpu_levels()))
CPU = torch.device("cpu")
# What is beyond a level, in objdump's text: bytes that begin an instruction, a mnemonic, operands.
EVEX = r"^ *\w+:\t(?:6[4-7] )*62 |%k[0-7]\b"
VEX = r"^ *\w+:\t(?:6[4-7] )*c[45] "
BEYOND = {"x86-64-v2": f"{VEX}|{EVEX}", "x86-64-v3": EVEX} | dict.fromkeys(
    CPU_LEVELS[2:-1], "%tmm[0-7]|tilezero|ldtilecfg"
)


@pytest.fixture
def capped(monkeypatch):
    """Let this process use levels up to one."""

    def cap(level: str) -> None:
        monkeypatch.setenv("QDSL_CPU_LEVEL", level)
        cpu_levels.cache_clear()

    yield cap
    monkeypatch.undo()
    cpu_levels.cache_clear()


@pytest.fixture
def schemes(request):
    return qdsl.shipped() if request.config.getoption("--every-level") else FEW


@functools.cache
def artifact(name: str) -> qdsl.Artifact:
    """One that holds every level of this machine but the best, at which all other tests run."""
    return qdsl.compile(qdsl.load(name), "cpu", HERE[:-1])


def machine(monkeypatch, name: str, flags: set[str], amx: bool = True) -> tuple[str, ...]:
    """The levels of a machine that is not this one."""
    monkeypatch.delenv("QDSL_CPU_LEVEL", raising=False)
    monkeypatch.setattr(processor.platform, "machine", lambda: name)
    monkeypatch.setattr(processor, "_flags", lambda: flags)
    monkeypatch.setattr(processor, "_amx_is_permitted", lambda: amx)
    return cpu_levels.__wrapped__()


# ---- which levels ------------------------------------------------------------------------------------------------
def test_the_compiler_and_the_runtime_name_the_same_levels():
    assert tuple(processor._X86) == CPU_LEVELS
    assert tuple(processor._ARM) == ARM_LEVELS


@pytest.mark.parametrize("at", range(len(CPU_LEVELS)))
def test_a_processor_has_the_levels_whose_flags_it_has(monkeypatch, at):
    needs = [set(flags) for flags in processor._X86.values()]
    flags = set().union(*needs[: at + 1])
    assert machine(monkeypatch, "x86_64", flags) == CPU_LEVELS[at::-1]
    for flag in needs[at]:
        assert machine(monkeypatch, "x86_64", set().union(*needs) - {flag}) == CPU_LEVELS[:at][::-1]


def test_arm_levels_ask_for_all_their_flags(monkeypatch):
    assert machine(monkeypatch, "aarch64", {"asimdhp"}) == ("armv8-a",)
    assert machine(monkeypatch, "aarch64", {"asimdhp", "fphp", "bf16"}) == ("armv8.2-a", "armv8-a")
    assert machine(monkeypatch, "aarch64", {"asimdhp", "fphp", "asimddp", "i8mm", "bf16"}) == ARM_LEVELS[::-1]


def test_amx_is_not_offered_where_the_kernel_refuses_it(monkeypatch):
    flags = set().union(*processor._X86.values())
    assert machine(monkeypatch, "x86_64", flags, amx=False) == CPU_LEVELS[-2::-1]


def test_the_kernel_is_not_asked_for_amx_below_its_level(capped, monkeypatch):
    monkeypatch.setattr(processor, "_amx_is_permitted", lambda: pytest.fail("asked"))
    capped("cooperlake")
    assert "sapphirerapids" not in cpu_levels()


@pytest.mark.parametrize(("level", "words"), [("x86-64-v5", "did you mean `x86-64-v"), ("AVX2", "one of x86-64-v2, ")])
def test_an_unknown_cap_is_an_error_and_not_ignored(capped, level, words):
    capped(level)
    with pytest.raises(qdsl.TargetError, match=f"QDSL_CPU_LEVEL is `{level}`.*{words}"):
        QuantLinear("awq4", 64, 16)


@pytest.mark.skipif(len(HERE) < 2, reason="this processor has one level")
def test_an_artifact_gives_a_processor_its_best_level_or_says_that_it_has_none(capped):
    capped(HERE[0])
    assert fitting_arch((*HERE[1:],), CPU) is None
    capped(HERE[-1])
    assert fitting_arch((*HERE[:-1],), CPU) == HERE[-2]
    assert fitting_arch(("sm_90a",), CPU) is None


def test_what_is_compiled_by_default_is_found_again(tmp_path, monkeypatch, capped):
    monkeypatch.setattr("qdsl.codegen.target.default_archs", lambda kind: HERE[:2])
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path))
    scheme = qdsl.load("w8a16")
    artifact = qdsl.compile(scheme)
    assert tuple(artifact.manifest.libraries) == HERE[:2]
    for level in HERE[:2]:
        capped(level)
        assert find_artifact(scheme, CPU, compile="never").path == artifact.path


# ---- at every level ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", HERE[:-1])
def test_one_artifact_is_right_at_every_level(level, schemes, capped, monkeypatch):
    monkeypatch.setattr(verify, "SIZES", ((33, 136), (48, verify.MOST)))
    capped(level)
    for name in schemes:
        monkeypatch.setenv("QDSL_ARTIFACTS", str(artifact(name).path))
        report = verify.verify(qdsl.load(name))
        assert report.passed, str(report)
        assert report.target == f"cpu {level}"


def disassembled(name: str, level: str) -> str:
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump, of binutils")
    return subprocess.run(
        ["objdump", "-d", artifact(name).library(level)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("level", [level for level in BEYOND if level in HERE[:-1]])
def test_no_library_has_instructions_above_its_level(level, schemes):
    for name in schemes:
        text = disassembled(name, level)
        found = re.search(f"(?m)^.*(?:{BEYOND[level]}).*$", text)
        assert found is None, f"{name} at {level} has {found[0]}"
        assert ("%zmm" in text) == (CPU_LEVELS.index(level) >= 2)


# ---- on another processor ----------------------------------------------------------------------------------------
ON_HASWELL = """
import sys, numpy as np, torch, qdsl
from qdsl import reference
from qdsl.runtime import QuantLinear
for name in sys.argv[1:]:
    scheme = qdsl.load(name)
    n, k = 32, 128
    given = reference.random_patterns(scheme, np.random.default_rng(0), n, k)
    x = scheme.output.dtype.round(np.random.default_rng(1).standard_normal((33, k)))
    layer = QuantLinear(scheme, k, n, "b" in given, compile="never").set_patterns(given)
    m = layer.manifest
    wanted = reference.linear(scheme, x, given, n, phase=layer.phase, precision=m.precision)
    for variant in layer.kernel.variants(k):
        y = torch.full((len(x), layer.width), float("nan"), dtype=layer.dtype)
        layer.run_into(torch.from_numpy(x).to(layer.dtype), y, variant)
        assert (abs(y.double().numpy() - wanted.y) <= wanted.bound).all(), (name, variant)
    print(layer.kernel.arch, name, flush=True)
"""


def test_a_processor_with_avx2_alone_runs_every_scheme(request, monkeypatch):
    """An emulated Haswell ends the process at the first instruction that it does not have."""
    if not request.config.getoption("--every-level"):
        pytest.skip("takes a minute; pytest --every-level")
    if (qemu := shutil.which("qemu-x86_64")) is None:
        pytest.skip("needs qemu-x86_64, of qemu-user")
    names = qdsl.shipped()
    made = [qdsl.compile(qdsl.load(name), "cpu", ("x86-64-v3",)).path for name in names]
    monkeypatch.setenv("QDSL_ARTIFACTS", os.pathsep.join(map(str, made)))
    # QEMU shows the host's /proc/cpuinfo, by which a processor is known.
    command = [qemu, "-cpu", "Haswell", "-E", "QDSL_CPU_LEVEL=x86-64-v3", sys.executable, "-c", ON_HASWELL, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [word for name in names for word in ("x86-64-v3", name)]
