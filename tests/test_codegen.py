"""Every shipped scheme becomes code: TensorIR and CUDA source for every target, and one library that nvcc accepts."""

import re
import subprocess

import pytest

import qdsl
from qdsl import cache
from qdsl.codegen.pipeline import emit

EMULATED = {  # whose kernels run in tests/test_emulated_*.py
    "awq4", "fp8_block", "fp8_dynamic", "fp8a16_block", "fp8a16_channel", "gptq", "gptq_actorder", "gptq_sym", "gptq_sym_actorder", "hqq",
    "mxfp4", "mxfp8", "nf4", "nvfp4a16", "q4_1", "q8_0", "w4a4", "w4a4_flatquant", "w4a8_dynamic", "w4a8_fp8", "w4a8_group", "w8a16",
    "w8a16_asym", "w8a8_dynamic", "w8a8_static",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in qdsl.shipped() if name not in EMULATED])
def test_cuda_source_of_schemes_that_nothing_emulates(name):
    source = emit(qdsl.load(name), "cuda", "sm_80", "source")
    assert "__global__" in source
    assert source.count('extern "C" __global__') >= 1


@pytest.mark.parametrize("name", ["awq4", "w8a8_dynamic", "gptq_actorder"])
def test_stages_print(name):
    scheme = qdsl.load(name)
    assert "plan of" in emit(scheme, "cpu", "x86-64-v3", "plan")
    assert "T.parallel" in emit(scheme, "cpu", "x86-64-v3", "tir")
    assert "define" in emit(scheme, "cpu", "x86-64-v3", "source")


def test_portable_offsets_are_64_bit():
    """Row bases of x and y must not wrap at 2^31 elements."""
    source = emit(qdsl.load("w8a16"), "cuda", "sm_80", "source")
    kernel = source[source.rindex('extern "C" __global__') :]
    assert "int64_t" in kernel.split("{")[0], "sizes arrive as 64-bit integers"


@pytest.mark.skipif(cache.nvcc() is None, reason="needs nvcc (pip install 'qdsl[cuda]')")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvcc_accepts_a_portable_kernel_without_spills(arch, tmp_path):
    from qdsl.codegen.cuda.host import _wheel_paths

    source = tmp_path / "k.cu"
    source.write_text(emit(qdsl.load("w4a16_int"), "cuda", arch, "source"))
    import tvm_ffi

    include = f"{tvm_ffi.__path__[0]}/include"
    nvcc = cache.nvcc()
    command = [nvcc, "-O3", "-std=c++17", f"-arch={arch}", "-cubin", "-Xptxas", "-v", f"-I{include}", *_wheel_paths(nvcc),
               str(source), "-o", str(tmp_path / "k.cubin")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # 64-bit divisions of the quantizing kernels are calls and may spill a register pair; the product must not
    product = done.stderr[done.stderr.index("function 'linear_kernel'") :].split("Compiling")[0]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", product)]
    assert spills
    assert not any(spills), product
