"""What a machine can do: the targets qdsl compiles for, by architecture name."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

from qdsl.diagnostic import TargetError, closest

CPU_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
ARM_LEVELS = ("armv8-a", "armv8.2-a")
GPUS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


@dataclass(frozen=True)
class Target:
    """One architecture.

    multiplies   operand types that the portable loop nest multiplies, cheapest first; anything else is widened to the
                 first that holds it exactly
    fragments    operand types of `mma.sync` that the tensor-core main loop uses
    """

    kind: str  # "cpu" or "cuda"
    arch: str
    multiplies: tuple[str, ...]
    fragments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.arch}"


def target(kind: str, arch: str) -> Target:
    """The target of that name; raises TargetError naming the legal ones."""
    if kind == "cpu":
        _known(arch, (*CPU_LEVELS, *ARM_LEVELS), "CPU level")
        return Target("cpu", arch, ("i32", "f32"), ())
    if kind == "cuda":
        if (match := re.fullmatch(r"sm_(\d+)a?", arch)) and int(match[1]) < 80:
            raise TargetError(f"{arch} is too old: the kernels need cp.async and bf16 mma, which came with sm_80")
        _known(arch, GPUS, "CUDA architecture")
        return Target("cuda", arch, ("i32", "f32"), ("f16", "bf16"))
    raise TargetError(f"unknown target `{kind}`; one of `cpu`, `cuda`")


def default_archs(kind: str) -> tuple[str, ...]:
    """What `--target` alone means: a level that nearly every machine of this kind has."""
    if kind == "cuda":
        return ("sm_80",)
    return ("armv8-a",) if platform.machine() in ("aarch64", "arm64") else ("x86-64-v3",)


def _known(arch: str, legal: tuple[str, ...], what: str) -> None:
    if arch not in legal:
        if arch in {*GPUS, *CPU_LEVELS, *ARM_LEVELS}:
            other = "cuda" if arch in GPUS else "cpu"
            raise TargetError(f"`{arch}` is no {what}; add `--target {other}`, or give one of {', '.join(legal)}")
        hint = f"did you mean `{match}`? " if (match := closest(arch, legal)) else ""
        raise TargetError(f"unknown {what} `{arch}`; {hint}known: {', '.join(legal)}")
