"""Other kernels for quantized weights and 8-bit activations on a CUDA GPU.

Each peer is one function `prepare(given, pack) -> product(x) -> call(i)`: it brings the weight of `peers.Stored` into its own
form, `given.copies` times; `product` brings a `Quantized` x into its own form; `call` multiplies by the copy of number i.  As
in `peers.py`, nothing is imported or loaded before it is asked for, and what is missing or not supported raises.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peers import BF16, Stored, dense_bits, humming, load, rotated

from qdsl.diagnostic import Error
from qdsl.runtime.timing import median_us

KINDS = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}


# ---- activations -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rule:
    """How x becomes codes of a type: scales are amax / most, of a token or of its runs of `group` inputs."""

    code: str
    most: float
    group: int | None = None


RULES = {"int8": Rule("i8", 127.0), "fp8": Rule("e4m3", 448.0), "block": Rule("e4m3", 448.0, 128)}


@dataclass(frozen=True)
class Quantized:
    """Activations as these kernels know them:

        x[m, k] ~ codes[m, k] * scale[m, k // group]

    x       [M, K] in 16 bits, for those that quantize it themselves
    codes   [M, K], int8 or float8_e4m3fn
    scale   [M, G], float32: of runs of K / G inputs
    """

    x: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor

    def first(self, m: int) -> Quantized:
        """The same of so many tokens."""
        return Quantized(self.x[:m], self.codes[:m], self.scale[:m])

    @property
    def exact(self) -> torch.Tensor:
        """codes * scale, float64."""
        m, k = self.codes.shape
        return (self.codes.double().reshape(m, self.scale.shape[1], -1) * self.scale.double()[..., None]).reshape(m, k)


def quantized(x: torch.Tensor, rule: Rule) -> Quantized:
    """x by a rule, with quotients rounded to float32 before they round to codes."""
    m, k = x.shape
    grouped, kind = x.double().reshape(m, -1, rule.group or k), KINDS[rule.code]
    scale = (grouped.abs().amax(2) / rule.most).float()
    values = (grouped / scale.double()[..., None]).float().clamp(-rule.most, rule.most)
    return Quantized(x, (values.round() if kind == torch.int8 else values).to(kind).reshape(m, k), scale)


# ---- peers -------------------------------------------------------------------------------------------------------
Product = Callable[[Quantized], Callable[[int], torch.Tensor]]
Prepare = Callable[[Stored, Path | None], Product]


@dataclass(frozen=True)
class Peer:
    """A contender, the rule of the activations that it takes or applies, and what is right for it.

    answer   which output is the right one: by default that of the rule; "codes": of the codes without scales
    least    tokens below which it does not run
    """

    prepare: Prepare
    rule: str
    answer: str = ""
    least: int = 1


def _weights(given: Stored) -> list[torch.Tensor]:
    """The codes [N, K] in their own type, once for each copy."""
    return [w for (w,) in rotated(given, given.codes.view(KINDS[given.code.name]))]


def _column_major(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def _result(x: Quantized, n: int) -> torch.Tensor:
    return torch.empty(len(x.codes), n, dtype=BF16, device=x.codes.device)


def vllm_cutlass(given: Stored, pack: Path | None) -> Product:
    """vLLM's CUTLASS kernels: scales of tokens and channels, or of blocks."""
    load(pack)
    every, blocks = _weights(given), len(given.scale) > 1
    scale = _column_major(given.scale) if blocks else given.scale

    def product(x: Quantized) -> Callable[[int], torch.Tensor]:
        y, own = _result(x, given.shape[1]), _column_major(x.scale) if blocks else x.scale

        def call(i: int) -> torch.Tensor:
            torch.ops._C.cutlass_scaled_mm(y, x.codes, every[i % len(every)].t(), own, scale, None)
            return y

        return call

    return product


def sgl(given: Stored, pack: Path | None) -> Product:
    """SGLang's CUTLASS kernels."""
    if pack is not None and (numa := pack / "libnuma.so.1.0.0").is_file():  # which its library asks for
        ctypes.CDLL(str(numa), mode=ctypes.RTLD_GLOBAL)
    load(pack, "sglang_C.so")
    every, blocks = _weights(given), len(given.scale) > 1
    name = "fp8_blockwise_scaled_mm" if blocks else f"{'int8' if given.code.is_integer else 'fp8'}_scaled_mm"
    operator = getattr(torch.ops.sgl_kernel, name).default
    scale = _column_major(given.scale) if blocks else given.scale.t().contiguous()
    last = (BF16,) if blocks else (BF16, None)

    def product(x: Quantized) -> Callable[[int], torch.Tensor]:
        own = _column_major(x.scale) if blocks else x.scale
        return lambda i: operator(x.codes, every[i % len(every)].t(), own, scale, *last)

    return product


def torch_rows(given: Stored, _: Path | None) -> Product:
    """torch's own, scales of tokens and channels."""
    every = _weights(given)
    return lambda x: (
        lambda i: torch._scaled_mm(
            x.codes, every[i % len(every)].t(), scale_a=x.scale, scale_b=given.scale, out_dtype=BF16
        )
    )


def torch_blocks(given: Stored, _: Path | None) -> Product:
    """torch's own, scales of blocks."""
    from torch.nn.functional import ScalingType, scaled_mm

    every, scale = _weights(given), _column_major(given.scale)

    def product(x: Quantized) -> Callable[[int], torch.Tensor]:
        own, runs, blocks = _column_major(x.scale), ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return lambda i: scaled_mm(x.codes, every[i % len(every)].t(), own, runs, scale, blocks, output_dtype=BF16)

    return product


def torch_int_mm(given: Stored, _: Path | None) -> Product:
    """torch's own int8: sums in int32, without scales."""
    every = _weights(given)
    return lambda x: lambda i: torch._int_mm(x.codes, every[i % len(every)].t())


def deepgemm(given: Stored, pack: Path | None) -> Product:
    """DeepGEMM, from deep_gemm/ in the pack: it compiles a kernel for every shape and some of the M."""
    if pack is not None and str(pack) not in sys.path:
        sys.path.append(str(pack))
    library = importlib.import_module("deep_gemm")
    every, scale = _weights(given), given.scale.t().contiguous()

    def product(x: Quantized) -> Callable[[int], torch.Tensor]:
        y, own = _result(x, given.shape[1]), library.get_mn_major_tma_aligned_tensor(x.scale)

        def call(i: int) -> torch.Tensor:
            library.fp8_gemm_nt((x.codes, own), (every[i % len(every)], scale), y)
            return y

        return call

    return product


# What vLLM's W4A8 kernel is compiled for: features x tokens of a tile, CTAs of a cluster.
SCHEDULES = ("128x16_1x1x1", "256x16_1x1x1", "128x32_1x1x1", "256x32_1x1x1", "128x64_1x1x1", "256x64_1x1x1", "128x128_1x1x1",
             "256x128_1x1x1", "128x256_1x1x1", "128x256_2x1x1")  # fmt: skip


def vllm_w4a8(given: Stored, pack: Path | None) -> Product:
    """vLLM's CUTLASS W4A8 with the best of its schedules for each M: int4 in groups of 128 with scales in e4m3, by which it
    multiplies codes before they round to e4m3 as well, and a scale per channel."""
    load(pack)
    words, groups, channels = w4a8_form(given)
    encoded = torch.ops._C.cutlass_encode_and_reorder_int4b(words.t())
    packed = torch.ops._C.cutlass_pack_scale_fp8(groups)
    every = rotated(given, encoded, packed)

    def product(x: Quantized) -> Callable[[int], torch.Tensor]:
        def with_schedule(i: int, schedule: str) -> torch.Tensor:
            w, scale = every[i % len(every)]
            return torch.ops._C.cutlass_w4a8_mm(x.codes, w, scale, 128, channels, x.scale, None, schedule)

        def timed(schedule: str) -> float:
            try:
                return median_us(lambda i: with_schedule(i, schedule), min(4, len(every)), x.codes.device, samples=4)
            except RuntimeError:  # a schedule that does not fit the shape
                return float("inf")

        best = min(SCHEDULES, key=timed)
        return lambda i: with_schedule(i, best)

    return product


def w4a8_form(given: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words [N, K / 8] of int4 in two's complement, scales [K / 128, N] in e4m3, and of channels [N], float32."""
    largest = given.scale.amax(0)
    if not given.symmetric or given.code.bits != 4 or given.group % 128 or given.block > 1:
        raise Error(f"takes no {given.code} of this form")
    groups = (given.scale / largest * 32).repeat_interleave(given.group // 128, 0)  # 8 times 32 still is an e4m3
    words = dense_bits(given.unsigned ^ 8, 4)
    return words, groups.to(torch.float8_e4m3fn).contiguous(), (largest * given.factor / 32).float()


def humming_with(inputs: str) -> Prepare:
    """Humming, which quantizes x per token to a type of its own spelling."""

    def prepare(given: Stored, _: Path | None) -> Product:
        call = humming(given, BF16, {"dtype": inputs, "group_size": 0})
        return lambda x: lambda i: call(x.x, i)

    return prepare


# By what a scheme is beside: weights and activations in int8, in e4m3, in e4m3 by blocks; int4 with either.
PEERS: dict[str, dict[str, Peer]] = {
    "int8": {
        "vllm_cutlass": Peer(vllm_cutlass, "int8"),
        "sgl": Peer(sgl, "int8"),
        "torch_int_mm": Peer(torch_int_mm, "int8", "codes", least=17),
        "humming_int8_with_quantization": Peer(humming_with("int8"), "int8"),
    },
    "fp8": {
        "vllm_cutlass": Peer(vllm_cutlass, "fp8"),
        "sgl": Peer(sgl, "fp8"),
        "torch": Peer(torch_rows, "fp8"),
        "humming_fp8_with_quantization": Peer(humming_with("float8e4m3"), "fp8"),
    },
    "block": {
        "vllm_cutlass": Peer(vllm_cutlass, "block"),
        "sgl": Peer(sgl, "block"),
        "torch": Peer(torch_blocks, "block", least=2),
        "deepgemm": Peer(deepgemm, "block"),
    },
    "w4a8": {
        "vllm_cutlass": Peer(vllm_w4a8, "fp8"),
        "humming_w4a8int8_with_quantization": Peer(humming_with("int8"), "int8"),
        "humming_w4a8fp8_with_quantization": Peer(humming_with("float8e4m3"), "fp8"),
    },
}
