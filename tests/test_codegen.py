"""Every shipped scheme becomes code: TensorIR and CUDA source for every target, and one library that nvcc accepts."""

import re
import subprocess

import pytest

import qdsl
from qdsl import cache
from qdsl.codegen.pipeline import emit

SHIPPED = list(qdsl.shipped())


@pytest.mark.parametrize("name", SHIPPED)
def test_cuda_source_for_every_scheme(name):
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
    source.write_text(emit(qdsl.load("fp8_block"), "cuda", arch, "source"))
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
