"""TensorIR to a CPU library through LLVM, with the OpenMP shim linked in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx

from qdsl.codegen.target import ARM_LEVELS, Target
from qdsl.diagnostic import TargetError

_SHIM = Path(__file__).with_name("openmp_shim.cc")


# What LLVM calls a unit.
_X86_FEATURES = {
    "vnni": ("+avx512vnni",),
    "bf16": ("+avx512bf16",),
    "amx": ("+amx-tile", "+amx-int8", "+amx-bf16"),
}
_ARM_FEATURES = {"f16": "+fullfp16", "dot": "+dotprod", "i8mm": "+i8mm", "bf16": "+bf16"}


def _llvm(target: Target) -> tvm.target.Target:
    if target.arch in ARM_LEVELS:
        features = ["+neon", *(name for unit, name in _ARM_FEATURES.items() if unit in target.units)]
        return tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": features})
    version = 4 if "avx512" in target.units else 3 if "avx2" in target.units else 2
    features = [name for unit, names in _X86_FEATURES.items() if unit in target.units for name in names]
    if "avx512" in target.units:
        features.append("-prefer-256-bit")  # x86-64-v4 means Skylake, whose clock fell under 512-bit instructions
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": f"x86-64-v{version}", "mtriple": "x86_64-linux-gnu", "mattr": features}
    )


def emit(functions: dict[str, tirx.PrimFunc], target: Target) -> tuple[tvm.runtime.Module, str]:
    """The compiled module and its LLVM IR."""
    executable = tvm.compile(tvm.IRModule(functions), target=_llvm(target))
    return executable, executable.mod.inspect_source("ll")


def build(executable, library: Path) -> None:
    """Link the module and the shim into a shared library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise TargetError(
            "no C++ compiler: linking a CPU kernel needs g++ (on Debian: apt install g++) or clang++ on PATH"
        )
    shim = library.with_suffix(".shim.o")
    include = Path(tvm_ffi.__file__).parent / "include"
    command = [compiler, "-O2", "-std=c++17", "-fPIC", f"-I{include}", "-c", str(_SHIM), "-o", str(shim)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"{compiler} could not compile the OpenMP shim:\n{done.stderr.strip()[-2000:]}")
    try:
        executable.export_library(str(library), options=[str(shim)], cc=compiler)
    finally:
        shim.unlink(missing_ok=True)
