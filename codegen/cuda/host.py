"""TensorIR to a CUDA library that needs no compiler at run time: kernels and checked host wrappers, one nvcc run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.host import export_cuda_host

from qdsl.cache import nvcc
from qdsl.codegen.target import Target
from qdsl.diagnostic import TargetError

NO_NVCC = (
    "no CUDA compiler: compiling for CUDA needs nvcc 12.8 or newer on PATH (or $QDSL_NVCC), "
    "or its wheels: pip install 'qdsl[cuda]'"
)


def emit(functions: dict[str, tirx.PrimFunc], target: Target) -> str:
    """One CUDA C++ file for all functions: the kernels and a host wrapper that checks every argument."""
    device = tvm.target.Target({"kind": "cuda", "arch": target.arch})
    with_host = device.with_host(tvm.target.Target("cuda_host"))
    module = tvm.compile(tvm.IRModule(functions), target=with_host, tir_pipeline="tirx").mod
    return export_cuda_host(module)


def build(source: Path, library: Path, target: Target) -> None:
    """Compile the file with nvcc; raises TargetError with nvcc's own words when it fails."""
    compiler = _require_nvcc()
    ffi = Path(tvm_ffi.__file__).parent
    virtual = target.arch.replace("sm_", "compute_")
    # Machine code for this GPU, and PTX for newer ones; architecture-specific code (sm_90a) runs nowhere else.
    code = target.arch if target.arch.endswith("a") else f"[{target.arch},{virtual}]"
    command = [compiler, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-gencode", f"arch={virtual},code={code}",
               f"-I{ffi / 'include'}", f"-L{ffi / 'lib'}", "-ltvm_ffi", *_wheel_paths(compiler), str(source), "-o", str(library)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"nvcc failed on {source}:\n{(done.stderr or done.stdout).strip()[-4000:]}")


def _require_nvcc() -> str:
    found = nvcc()
    if found is None:
        raise TargetError(NO_NVCC)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise TargetError("no C++ compiler: nvcc needs g++ on PATH (on Debian: apt install g++)")
    return found


def _wheel_paths(compiler: str) -> list[str]:
    """Where the wheels keep headers and libraries; a toolkit's nvcc finds its own."""
    root = Path(compiler).resolve().parent.parent
    return [f"-I{root / 'include'}", f"-L{root / 'lib'}"] if root.parent.name == "nvidia" else []
