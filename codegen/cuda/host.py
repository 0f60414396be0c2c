"""TensorIR to a CUDA library that needs no compiler at run time: kernels and checked host wrappers, one nvcc run."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.host import export_cuda_host

from qdsl.cache import nvcc
from qdsl.codegen.cuda.builder import SETTLED
from qdsl.codegen.target import Target
from qdsl.diagnostic import TargetError

NO_NVCC = (
    "no CUDA compiler: compiling for CUDA needs nvcc 12.8 or newer on PATH (or $QDSL_NVCC), "
    "or its wheels: pip install 'qdsl[cuda]'"
)


def emit(functions: dict[str, tirx.PrimFunc], target: Target, overlapped: bool = False) -> str:
    """One CUDA C++ file for all functions: the kernels and a host wrapper that checks every argument.

    overlapped  all kernels wait for their predecessors themselves (`overlap`), and are launched accordingly
    """
    device = tvm.target.Target({"kind": "cuda", "arch": target.arch})
    with_host = device.with_host(tvm.target.Target("cuda_host"))
    module = tvm.compile(tvm.IRModule(functions), target=with_host, tir_pipeline="tirx").mod
    source = _completed(export_cuda_host(module))
    return _overlapped(source) if overlapped else source


_LAUNCH = "  return cudaLaunchKernelEx(config, kernel, ((Params)args)...);\n"
_OVERLAPPED_LAUNCH = """\
  cudaLaunchConfig_t overlapped = *config;
  cudaLaunchAttribute attributes[4] = {};
  for (unsigned i = 0; i < config->numAttrs; ++i) attributes[i] = config->attrs[i];
  attributes[config->numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[config->numAttrs].val.programmaticStreamSerializationAllowed = 1;
  overlapped.attrs = attributes;
  overlapped.numAttrs = config->numAttrs + 1;
  return cudaLaunchKernelEx(&overlapped, kernel, ((Params)args)...);
"""


# What the driver library exports is asked of the runtime library: linking would need libcuda where there is no GPU.
_TENSOR_MAPS = """\
static CUresult qdsl_encode_tensor_map(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* extents,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (!encode) return CUDA_ERROR_NOT_SUPPORTED;
  return encode(map, type, rank, base, extents, strides, box, steps, interleave, swizzle, promotion, fill);
}
static CUresult qdsl_error_string(CUresult error, const char** message) {
  *message = "the CUDA driver refuses the tensor map of x";
  return error;
}
#define cuTensorMapEncodeTiled qdsl_encode_tensor_map
#define cuGetErrorString qdsl_error_string
"""


MULTIPROCESSORS = "qdsl_multiprocessors"  # a function of the host: SMs of the current device
_MULTIPROCESSORS = """\
extern "C" int32_t qdsl_multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
"""

_SETTLED = """\
#include <cstdint>
static __forceinline__ __device__ void qdsl_settled(float& number) {
  asm volatile("" : "+f"(number) :: "memory");
}
static __forceinline__ __device__ void qdsl_settled(uint32_t& bits) {
  asm volatile("" : "+r"(bits) :: "memory");
}
"""


def _completed(source: str) -> str:
    """The source with what its kernels and host wrappers call."""
    if SETTLED in source:
        source = _SETTLED + source
    include = "#include <cuda_runtime.h>\n"
    needed = {"cuTensorMapEncodeTiled": _TENSOR_MAPS, MULTIPROCESSORS: _MULTIPROCESSORS}
    return source.replace(include, include + "".join(code for name, code in needed.items() if name in source), 1)


def _overlapped(source: str) -> str:
    """Every kernel of the file launched as a programmatic dependent of its predecessor (see `overlap`)."""
    assert source.count(_LAUNCH) == 1, "the host wrappers launch through one function"
    return source.replace(_LAUNCH, _OVERLAPPED_LAUNCH)


def build(source: Path, library: Path, target: Target) -> None:
    """Compile the file with nvcc; raises TargetError with nvcc's own words when it fails."""
    # Machine code for this GPU, and PTX for newer ones; architecture-specific code (sm_90a) runs nowhere else.
    code = target.arch if target.arch.endswith("a") else f"[{target.arch},{_virtual(target)}]"
    _nvcc(source, target, code, "-shared", "-Xcompiler", "-fPIC", "-o", str(library))


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel."""

    registers: int
    spilled: int  # bytes


def resources(source: Path, target: Target) -> tuple[dict[str, Resources], list[str]]:
    """Compile the file for the GPU alone: registers and spills by kernel, and the losses of speed that ptxas warns of."""
    said = _nvcc(source, target, target.arch, "-cubin", "-Xptxas", "-v", "-o", str(source.with_suffix(".cubin")))
    entry = r"entry function '(\w+)_kernel'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = {name: Resources(int(used), int(spilled)) for name, spilled, used in re.findall(entry, said, re.S)}
    return found, [line for line in said.splitlines() if "Potential Performance Loss" in line]


def _nvcc(source: Path, target: Target, code: str, *options: str) -> str:
    """What nvcc says about the file."""
    compiler = _require_nvcc()
    ffi = Path(tvm_ffi.__file__).parent
    command = [compiler, "-O3", "-std=c++17", "-gencode", f"arch={_virtual(target)},code={code}",
               f"-I{ffi / 'include'}", f"-L{ffi / 'lib'}", "-ltvm_ffi", *_wheel_paths(compiler), str(source), *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"nvcc failed on {source}:\n{(done.stderr or done.stdout).strip()[-4000:]}")
    return done.stderr


def _virtual(target: Target) -> str:
    return target.arch.replace("sm_", "compute_")


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
