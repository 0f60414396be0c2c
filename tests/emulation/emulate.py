"""Generated CUDA on the host: the source with its PTX instructions replaced by those of `simt.h`, compiled with g++.

    .cu of kernels and host wrappers --rewritten--> C++ --g++--> a library that is called like the real one, with CPU tensors

What `simt.h` does not know is an error here, not a guess.
"""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import tvm_ffi

from qdsl.cache import nvcc

HERE = Path(__file__).parent
MULTIPROCESSORS = 6  # of the emulated GPU

PRELUDE = """\
#include "simt.h"
#define threadIdx (simt::now->thread)
#define blockIdx (simt::now->cta->index)
#define __syncthreads() simt::barrier(0, simt::now->cta->threads)
#define __syncwarp() simt::sync_warp()
#define __shfl_sync(mask, value, source, width) simt::shuffle(value, source)
#define __cvta_generic_to_shared(p) simt::shared_address(p)
#define __int_as_float(bits) std::bit_cast<float>(int(bits))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__ static
"""

HOST = f"""\
#define cudaSetDevice(device) cudaSuccess
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaDeviceGetAttribute(value, ...) (*(value) = {MULTIPROCESSORS}, cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetLastError() cudaSuccess
#define cudaGetErrorString(error) "an error of the emulation"
#define cudaGetDriverEntryPointByVersion(name, found, ...) (*(found) = (void*)simt::encode)
"""

# Instructions (what is left of their template once operands are numbered) -> C++, {0} the first operand.
_INSTRUCTIONS: list[tuple[str, str]] = [
    (r"lop3\.b32 .*, (\d+)", "{0} = simt::lop3({1}, {2}, {3}, \\1)"),
    (r"and\.b32 .*", "{0} = {1} & {2}"),
    (r"prmt\.b32 .*", "{0} = simt::permute({1}, {2}, {3})"),
    (r"fma\.rn\.(b?f16)x2 .*", "{0} = simt::fma2({1}, {2}, {3}, BF(\\1))"),
    (r"(max|min)\.(b?f16)x2 .*", "{0} = simt::extreme2({1}, {2}, BF(\\2), f\\1f)"),  # of numbers
    (r"cvt\.rn\.(b?f16)x2\.f32 .*", "{0} = simt::pack({1}, {2}, BF(\\1))"),
    (r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2 .*", "{0} = simt::halves_\\1({1})"),
    (r"mov\.b(?:32|64) %0, %1", "{0} = {1}"),
    (r"mov\.b64 \{%0, %1\}, %2", "{0} = uint32_t({2}); {1} = uint32_t({2} >> 32)"),
    (r"mov\.b64 %0, \{%1, %2\}", "{0} = uint64_t({2}) << 32 | {1}"),
    (r"cvta\.to\.global\.u64 .*", "{0} = reinterpret_cast<uint64_t>({1})"),
    (r"ld\.shared\.u8 .*", "{0} = simt::load<uint8_t>({1})"),
    (r"ld\.shared\.u16 .*", "{0} = simt::load<uint16_t>({1})"),
    (r"ld\.shared\.b32 .*", "{0} = simt::load<uint32_t>({1})"),
    (r"ld\.shared\.f32 .*", "{0} = simt::load<float>({1})"),
    (r"ld\.shared\.v2\.(?:b32|f32) .*", "simt::load_all<uint32_t>({2}, {0}, {1})"),
    (r"ld\.shared(?:::cluster)?\.v4\.(?:b32|f32) .*", "simt::load_all<uint32_t>({4}, {0}, {1}, {2}, {3})"),
    (r"st\.shared\.v4\.(?:b32|f32) .*", "simt::store_all(simt::at({0}), {1}, {2}, {3}, {4})"),
    (r"ld\.global\.v4\.b32 .*", "const uint32_t* from = (const uint32_t*)({4}); {0} = from[0], {1} = from[1], {2} = from[2], {3} = from[3]"),
    (r"st\.global\.v2\.b32 .*", "simt::store_all((char*)({0}), {1}, {2})"),
    (r"st\.global\.v4\.b32 .*", "simt::store_all((char*)({0}), {1}, {2}, {3}, {4})"),
    (r"cp\.async\.c[ag]\.shared\.global(?:\.L2::cache_hint)? \[%0\], \[%1\], (\d+)(?:, %\d)?", "simt::copy_async({0}, {1}, \\1, \\1)"),
    (r"SIZED cp\.async\.c[ag]\.shared\.global(?:\.L2::cache_hint)? \[%0\], \[%1\], (\d+), .*", "simt::copy_async({0}, {1}, \\1, {2})"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 .*", "uint32_t* r[] = {{&{0}, &{1}, &{2}, &{3}}}; simt::load_matrices(4, r, {4})"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 .*", "uint32_t r[] = {{{1}, {2}, {3}, {4}}}; simt::store_matrices(4, {0}, r, true)"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 .*", "uint32_t r[] = {{{1}, {2}, {3}, {4}}}; simt::store_matrices(4, {0}, r, false)"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x1\.trans\.shared\.b16 .*", "uint32_t r[] = {{{1}}}; simt::store_matrices(1, {0}, r, true)"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x2\.trans\.shared\.b16 .*", "uint32_t r[] = {{{1}, {2}}}; simt::store_matrices(2, {0}, r, true)"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.b?f16\.f32 .*",
     "float* d[] = {{&{0}, &{1}, &{2}, &{3}}}; uint32_t a[] = {{{4}, {5}, {6}, {7}}}, b[] = {{{8}, {9}}}; "
     "float c[] = {{{10}, {11}, {12}, {13}}}; simt::mma(BF(\\1), d, a, b, c)"),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.(?:f32|s32)\.(s8|e4m3|e5m2)\.\1\.(?:f32|s32) .*",
     "void* d[] = {{&{0}, &{1}, &{2}, &{3}}}; uint32_t a[] = {{{4}, {5}, {6}, {7}}}, b[] = {{{8}, {9}}}; "
     "uint32_t c[] = {{std::bit_cast<uint32_t>({10}), std::bit_cast<uint32_t>({11}), std::bit_cast<uint32_t>({12}), "
     "std::bit_cast<uint32_t>({13})}}; simt::mma_bytes(simt::value_\\1, d, a, b, c)"),
    (r"shfl\.sync\.idx\.b32 .*", "{0} = simt::shuffle({1}, {2})"),
    (r"shfl\.sync\.bfly\.b32 .*", "{0} = simt::shuffle({1}, simt::now->lane() ^ {2})"),
    (r"(max|min)\.NaN\.f32 .*", "{0} = isnan({1}) || isnan({2}) ? NAN : f\\1f({1}, {2})"),
    (r"(max|min)\.NaN\.(b?f16)x2 .*", "{0} = simt::extreme2({1}, {2}, BF(\\2), f\\1f)"),
    (r"fma\.rn\.f32 .*", "{0} = fmaf({1}, {2}, {3})"),
    (r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32 .*", "{0} = simt::small_\\1({1}) << 8 | simt::small_\\1({2})"),
    (r"bar\.sync %0, %1", "simt::barrier({0}, {1})"),
    (r"barrier\.cluster\.arrive\.release\.aligned", "simt::cluster_arrive()"),
    (r"barrier\.cluster\.wait\.acquire\.aligned", "simt::cluster_wait()"),
    (r"mapa\.shared::cluster\.u32 .*", "{0} = {1} | ({2} + 1) << 24"),
    (r"mov\.u32 %0, %%cluster_ctarank", "{0} = simt::now->cta->rank"),
    (r"mbarrier\.init\.shared\.b64 .*", "simt::mbarrier_init({0}, {1})"),
    (r"mbarrier\.arrive\.shared\.b64 .*", "simt::mbarrier_arrive({0})"),
    (r"mbarrier\.arrive\.expect_tx\.shared\.b64 .*", "simt::mbarrier_arrive({0}, {1})"),
    (r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64 .*", "simt::mbarrier_arrive({0})"),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier.*", "simt::load_bytes({0}, {1}, {2}, {3})"),
    (r"cp\.async\.bulk\.tensor\.2d\.shared::cluster.*", "simt::load_box({0}, {1}, {{int({2}), int({3})}}, {4})"),
    (r"cp\.async\.bulk\.tensor\.3d\.shared::cluster.*", "simt::load_box({0}, {1}, {{int({2}), int({3}), int({4})}}, {5})"),
    (r"cp\.async\.bulk\.tensor\.4d\.shared::cluster.*", "simt::load_box({0}, {1}, {{int({2}), int({3}), int({4}), int({5})}}, {6})"),
    (r"(?:cp\.async\.(?:commit_group|wait_group \d+)|griddepcontrol\.\w+|fence\.\S+|prefetch\.tensormap .*|setmaxnreg\.\S+ \d+"
     r"|wgmma\.(?:fence|commit_group|wait_group)\.sync\.aligned(?: \d+)?)", ""),
]  # fmt: skip


def rewritten(source: str) -> str:
    """The source as C++ for the host; raises ValueError for an instruction that is not emulated."""
    for name, call in (
        ("elect.sync", "pred = simt::now->lane() == 0;"),
        ("mbarrier.try_wait", "simt::mbarrier_wait(barrier_addr_int, phase);"),
    ):
        source = re.sub(
            r'asm volatile\(\s*"\{\\n"(?:(?!;\n}).)*?' + re.escape(name) + r".*?\);", call, source, flags=re.S
        )
    source = re.sub(r"asm(?: volatile)?\((.*?)\);\n", lambda m: f"{{ {_instruction(m[1])}; }}\n", source, flags=re.S)
    shared = r"extern __shared__ __align__\(64\) uchar (\w+)\[\];"
    source = re.sub(shared, r"uchar* \1 = (uchar*)simt::shared_memory();", source)
    source = source.replace(".device.device_type) == 2)", ".device.device_type) == 1)")
    launch = r"return cudaLaunchKernelEx\(\S+, kernel, \(\(Params\)args\)\.\.\.\);"
    source = re.sub(launch, "return simt::launch(config, [=] { kernel(((Params)args)...); });", source)
    source = source.replace('extern "C" __global__', "__global__")
    return PRELUDE + HOST + source


def _instruction(asm: str) -> str:
    template, *parts = re.split(r"\s*:\s*(?![^\"]*\"(?:[^\"]*\"[^\"]*\")*[^\"]*$)", asm)
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", " ").strip().rstrip(";")
    operands = [m for part in parts[:2] for m in re.findall(r'"[^"]*"\s*\(((?:[^()]|\([^()]*\))*)\)', part)]
    condition = ""
    if wgmma := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)", text):
        tokens, count = int(wgmma[1]), int(wgmma[1]) // 2
        d = ", ".join(f"&{name}" for name in operands[:count])
        a, (descriptor, add) = ", ".join(operands[count : count + 4]), operands[count + 4 : count + 6]
        bf16 = str(wgmma[2] == "bf16").lower()
        return f"float* d[] = {{{d}}}; uint32_t a[] = {{{a}}}; simt::wgmma({tokens}, {bf16}, d, a, {descriptor}, {add})"
    if wgmma := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.(?:s32|f32)\.(s8|e4m3|e5m2)", text):
        tokens, count = int(wgmma[1]), int(wgmma[1]) // 2
        fragments = 4 if text.count("{") > 2 else 0  # A from registers, or a matrix in shared memory
        d = ", ".join(f"&{name}" for name in operands[:count])
        a = "".join(f"{name}, " for name in operands[count : count + fragments])
        rest = operands[count + fragments :]
        matrix, descriptor, add = rest[:3] if not fragments else ("0", *rest[:2])
        return (
            f"void* d[] = {{{d}}}; uint32_t a[] = {{{a}0}}; simt::wgmma_bytes({tokens}, simt::value_{wgmma[2]}, d, "
            f"{'a' if fragments else 'nullptr'}, {matrix}, {descriptor}, {add})"
        )
    if not text:  # an order for the compiler
        return ""
    if guarded := re.fullmatch(r"\{ \.reg \.pred p; setp\.ne\.b32 p, %(\d+), 0; @p (.*?);? \}", text):
        condition, text = f"if ({operands[int(guarded[1])]}) ", guarded[2]
    if text.startswith("cp.async.c") and "shared.global" in text:
        hinted = "cache_hint" in text
        if len(re.findall(r"%\d", text)) == 3 + hinted:
            text = f"SIZED {text}"
    for pattern, code in _INSTRUCTIONS:
        if found := re.fullmatch(pattern, text):
            code = re.sub(r"\\(\d)", lambda m: found[int(m[1])], code)
            code = re.sub(r"BF\((b?f16)\)", lambda m: str(m[1] == "bf16").lower(), code)
            return condition + (code.format(*operands) if code else "")
    raise ValueError(f"tests/emulation does not know `{text}`")


@functools.cache
def _gxx() -> list[str]:
    """The compiler with all that sources and their headers need."""
    compiler, ffi = nvcc(), Path(tvm_ffi.__file__).parent
    assert compiler is not None, "the headers of CUDA come with nvcc"
    said = subprocess.run(  # where nvcc looks for them, as it says itself
        [compiler, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=True
    ).stderr
    top = re.search(r"#\$ TOP=(.*)", said)
    include = re.search(r'#\$ INCLUDES="(.*?)"', said)
    assert top and include, said
    cuda = include[1].replace("$(TOP)", top[1].strip()).split()
    return ["g++", "-w", "-std=c++20", "-fPIC", "-fpermissive", f"-I{HERE}", *cuda, f"-I{ffi / 'include'}"]


@functools.cache
def _once() -> tuple[Path, Path]:
    """What every source includes first, and the instructions: compiled once, which takes longer than most sources."""
    folder = Path(tempfile.mkdtemp(prefix="qdsl-emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header, instructions = folder / "headers.h", folder / "simt.o"
    header.write_text('#include "simt.h"\n#include <tvm/ffi/function.h>\n')
    _compiled([*_gxx(), "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    # Without the checks of _FORTIFY_SOURCE, which some systems turn on: a fiber's jump looks wrong to them.
    _compiled([*_gxx(), "-O2", "-U_FORTIFY_SOURCE", "-c", str(HERE / "simt.cc"), "-o", str(instructions)])
    return header, instructions


def _compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[:4000])


def library(source: str, folder: Path):
    """The module of a generated file's functions, which take CPU tensors."""
    return tvm_ffi.load_module(str(built(source, folder / "kernels.so")))


def built(source: str, found: Path) -> Path:
    """The library of a generated file."""
    path, libraries = found.with_suffix(".cpp"), Path(tvm_ffi.__file__).parent / "lib"
    path.write_text(rewritten(source))
    header, instructions = _once()
    link = ["-shared", f"-L{libraries}", "-ltvm_ffi", str(path), str(instructions), "-o", str(found)]
    _compiled([*_gxx(), "-O0", "-include", str(header), *link])
    return found
