"""What a machine can do: the targets qdsl compiles for, by architecture name."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

from qdsl.diagnostic import TargetError, closest

# What a CPU level adds to those before it, lowest first. The levels of x86-64 above v4 are called after the first processor
# that has the unit; they have nothing else of it, so that Zen 4 runs cooperlake, and Ice Lake runs cascadelake.
_X86_UNITS: dict[str, tuple[str, ...]] = {
    "x86-64-v2": (),
    "x86-64-v3": ("avx2",),
    "x86-64-v4": ("avx512",),
    "cascadelake": ("vnni",),
    "cooperlake": ("bf16",),
    "sapphirerapids": ("amx",),
}
_ARM_UNITS: dict[str, tuple[str, ...]] = {"armv8-a": (), "armv8.2-a": ("f16",), "armv8.6-a": ("dot", "i8mm", "bf16")}
CPU_LEVELS, ARM_LEVELS = tuple(_X86_UNITS), tuple(_ARM_UNITS)
GPUS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


@dataclass(frozen=True)
class Gpu:
    """A GPU of an architecture, as the model of kernel times (`qdsl.codegen.cuda.model`) knows it.

    bandwidth    bytes per second from its memory
    mma, wgmma   16-bit operations per second of `mma.sync` and of Hopper's `wgmma`, with float32 sums, at that
                 clock; 0: it has none
    clock        cycles per second under load
    shared       bytes of shared memory of an SM
    threads      that an SM holds
    """

    name: str
    sms: int
    bandwidth: float
    mma: float
    clock: float
    shared: int
    threads: int = 2048
    wgmma: float = 0.0


# Published numbers, rounded, of the GPU that most machines of an architecture have; those of sm_90 were measured.
_A100 = Gpu("A100", 108, 1.9e12, 280e12, 1.4e9, 164 << 10)
_H200 = Gpu("H200", 132, 4.3e12, 428e12, 1.75e9, 228 << 10, wgmma=946e12)
_B200 = Gpu("B200", 148, 7.5e12, 600e12, 1.85e9, 228 << 10)
_GPUS = {
    "sm_80": _A100,
    "sm_86": Gpu("RTX 3090", 82, 0.93e12, 71e12, 1.7e9, 100 << 10, 1536),
    "sm_87": Gpu("Jetson AGX Orin", 16, 0.2e12, 40e12, 1.3e9, 164 << 10, 1536),
    "sm_89": Gpu("L40S", 142, 0.86e12, 330e12, 2.2e9, 100 << 10, 1536),
    "sm_90": _H200,
    "sm_90a": _H200,
    "sm_100": _B200,
    "sm_103": _B200,
    "sm_120": Gpu("RTX 5090", 170, 1.7e12, 210e12, 2.4e9, 100 << 10, 1536),
    "sm_121": Gpu("GB10", 48, 0.27e12, 60e12, 2.4e9, 100 << 10, 1536),
}


@dataclass(frozen=True)
class Target:
    """One architecture.

    multiplies   operand types that the portable loop nest multiplies, cheapest first; anything else is widened to the
                 first that holds it exactly
    fragments    operand types of `mma.sync` that the tensor-core main loop uses
    byte_fragments  those of `mma.sync` or `wgmma` that multiply what activations are quantized to
    matrices     bytes are multiplied as they lie in shared memory, by `wgmma`
    gpu          what kernel times are predicted for, on CUDA
    units        vector and matrix units of a CPU: "avx2", "avx512", "vnni" (`vpdpbusd` of 512 bits), "bf16"
                 (`vdpbf16ps`), "amx" (tiles of int8 and bf16); of Arm "f16", "dot", "i8mm", "bf16"
    """

    kind: str  # "cpu" or "cuda"
    arch: str
    multiplies: tuple[str, ...]
    fragments: tuple[str, ...]
    byte_fragments: tuple[str, ...] = ()
    matrices: bool = False
    gpu: Gpu | None = None
    units: frozenset[str] = frozenset()

    @property
    def dependent_launch(self) -> bool:
        """Kernels may start before their predecessors have ended (`qdsl.codegen.cuda.overlap`)."""
        return self.kind == "cuda" and int(self.arch[3:].rstrip("a")) >= 90

    @property
    def converts_fp8(self) -> bool:
        """Numbers become e4m3 and e5m2 in hardware."""
        return self.kind == "cuda" and int(self.arch[3:].rstrip("a")) >= 89

    def __str__(self) -> str:
        return f"{self.kind} {self.arch}"


def target(kind: str, arch: str) -> Target:
    """The target of that name; raises TargetError naming the legal ones."""
    if kind == "cpu":
        _known(arch, (*CPU_LEVELS, *ARM_LEVELS), "CPU level")
        return Target(
            "cpu", arch, ("i32", "f32"), (), units=_units(_ARM_UNITS if arch in _ARM_UNITS else _X86_UNITS, arch)
        )
    if kind == "cuda":
        if (match := re.fullmatch(r"sm_(\d+)a?", arch)) and int(match[1]) < 80:
            raise TargetError(f"{arch} is too old: the kernels need cp.async and bf16 mma, which came with sm_80")
        _known(arch, GPUS, "CUDA architecture")
        bytes_ = ("i8", "e4m3", "e5m2") if int(arch[3:].rstrip("a")) >= 89 else ("i8",)
        return Target("cuda", arch, ("i32", "f32"), ("f16", "bf16"), bytes_, arch == "sm_90a", _GPUS[arch])
    raise TargetError(f"unknown target `{kind}`; one of `cpu`, `cuda`")


def _units(added: dict[str, tuple[str, ...]], level: str) -> frozenset[str]:
    """All that a level has: what it adds, and what those before it do."""
    levels = list(added)
    return frozenset(unit for below in levels[: levels.index(level) + 1] for unit in added[below])


def default_archs(kind: str) -> tuple[str, ...]:
    """What `--target` alone means: what nearly every machine of this kind runs, and on a CPU all levels beyond that.

    A CPU picks its own among them when the library is opened; the machine that compiles has no say.
    """
    if kind == "cuda":
        return ("sm_80",)
    return ARM_LEVELS if platform.machine() in ("aarch64", "arm64") else CPU_LEVELS[CPU_LEVELS.index("x86-64-v3") :]


def _known(arch: str, legal: tuple[str, ...], what: str) -> None:
    if arch not in legal:
        if arch in {*GPUS, *CPU_LEVELS, *ARM_LEVELS}:
            other = "cuda" if arch in GPUS else "cpu"
            raise TargetError(f"`{arch}` is no {what}; add `--target {other}`, or give one of {', '.join(legal)}")
        hint = f"did you mean `{match}`? " if (match := closest(arch, legal)) else ""
        raise TargetError(f"unknown {what} `{arch}`; {hint}known: {', '.join(legal)}")
