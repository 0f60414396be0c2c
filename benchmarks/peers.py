"""Other kernels for quantized weights and 16-bit activations on a CUDA GPU, and the dense product.

Each peer is one function `prepare(given, dtype) -> call(x, i)`: it brings the codes, scales and zero points of `Stored` into
its own form, `given.copies` times, and `call` multiplies x [M, K] by the copy of number i.  Nothing is imported or loaded
before it is asked for; what is missing or not supported raises, and the table says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from qdsl.diagnostic import Error
from qdsl.dtype import DType
from qdsl.runtime.bench import COPIES
from qdsl.runtime.timing import GPU_ROTATION, median_us

Call = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A weight as all of these kernels know it, in their own words:

        w[n, k] = (codes[n, k] - zero[n, k // group]) * scale[n, k // group] * factor

    code         type of the codes
    codes        [N, K] bit patterns, uint8
    scale        [G, N] values, float32: of runs of K / G inputs; with `block`, [G, N / block]
    scale_type   the type that holds them
    zero         [G, N] values, float32; None: the zero point is `constant`
    """

    code: DType
    codes: torch.Tensor
    scale: torch.Tensor
    scale_type: DType
    zero: torch.Tensor | None = None
    zero_is_float: bool = False
    constant: float = 0.0
    factor: float = 1.0
    block: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """K, N."""
        n, k = self.codes.shape
        return k, n

    @property
    def group(self) -> int:
        return self.codes.shape[1] // len(self.scale)

    @property
    def symmetric(self) -> bool:
        """Whether weights are codes less the middle of their range, in two's complement or not."""
        middle = 0 if self.code.kind == "int" else 1 << self.code.bits - 1
        return self.code.is_integer and self.zero is None and self.constant == middle

    @functools.cached_property
    def unsigned(self) -> torch.Tensor:
        """Codes [N, K] as unsigned integers: those in two's complement from the lowest up."""
        return self.codes ^ (1 << self.code.bits - 1) if self.code.kind == "int" else self.codes

    @functools.cached_property
    def unsigned_zero(self) -> torch.Tensor:
        """The zero points [G, N] of `unsigned` codes, uint8."""
        assert self.zero is not None and not self.zero_is_float
        return (self.zero + (1 << self.code.bits - 1) * (self.code.kind == "int")).to(torch.uint8)

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """w [N, K], float64."""
        values = torch.from_numpy(self.code.decode(torch.arange(1 << self.code.bits).numpy())).to(self.codes.device)
        zero = self.constant if self.zero is None else self._spread(self.zero)
        return (values[self.codes.int()] - zero) * self._spread(self.scale) * self.factor

    def _spread(self, grouped: torch.Tensor) -> torch.Tensor:
        (k, n), wide = self.shape, grouped.double().t()
        return wide.repeat_interleave(n // wide.shape[0], 0).repeat_interleave(k // wide.shape[1], 1)

    @property
    def copies(self) -> int:
        return copies(*self.shape, self.code.bits)


def copies(k: int, n: int, bits: int) -> int:
    """Of a weight, so that no call finds its own in the L2 cache."""
    return min(COPIES, GPU_ROTATION // (k * n * bits // 8) + 1)


Prepare = Callable[[Stored, torch.dtype], Call]


@dataclass(frozen=True)
class Peer:
    """A contender: `prepare`, the types it takes, and where it comes from.

    needs_pack   whether it is in the directory given as --peers
    most         tokens beyond which it is not run; None: any number
    """

    prepare: Prepare
    dtypes: tuple[torch.dtype, ...]
    needs_pack: bool
    most: int | None = None


def load(pack: Path | None, name: str = "vllm_C.so") -> None:
    """Load the operators of a library, vLLM's by default; raises Error where they are not."""
    if pack is None:
        raise Error("no --peers DIR")
    library = pack / name
    if not library.is_file():
        raise Error(f"no {library.name} in {pack.name}")
    torch.ops.load_library(str(library))


def dense_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, K] side by side in int32 words [rows, K * bits / 32], the first in the lowest bits."""
    rows, k = codes.shape
    each = codes.reshape(rows, k // 32, 32).to(torch.int64)
    words = torch.zeros(rows, k // 32, bits, dtype=torch.int64, device=codes.device)
    for lane in range(32):
        word, low = divmod(lane * bits, 32)
        words[..., word] |= each[..., lane] << low & 0xFFFFFFFF
        if low + bits > 32:
            words[..., word + 1] |= each[..., lane] >> 32 - low
    return words.reshape(rows, k // 32 * bits).to(torch.int32)


def rotated(given: Stored, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(given.copies - 1))]


def _refuse(what: str) -> None:
    raise Error(f"takes no {what}")


# ---- peers -------------------------------------------------------------------------------------------------------
def dense(weight: torch.Tensor, dtype: torch.dtype) -> Call:
    """F.linear with the dequantized weight [N, K]: cuBLAS."""
    first = weight.to(dtype).contiguous()
    every = [first, *(first.clone() for _ in range(min(COPIES, GPU_ROTATION // first.nbytes)))]
    return lambda x, i: functional.linear(x, every[i % len(every)])


# vLLM's numbers for types of weights: exponent and mantissa bits, sign, bias, whether all are finite, how NaN is spelled.
def _vllm_type(exponent: int, mantissa: int, signed: bool, bias: int, finite: bool, nan: int) -> int:
    return exponent | mantissa << 8 | signed << 16 | bias << 17 | finite << 49 | nan << 50


def _vllm(given: Stored) -> int:
    """The number of the type of the weights; raises Error where vLLM has none."""
    code = given.code
    if code.name in ("e4m3", "e2m1"):
        nan = 2 if code.name == "e4m3" else 0
        return _vllm_type(code.exponent, code.mantissa, True, 0, True, nan)
    if code.is_integer and code.bits in (4, 8) and given.symmetric:
        return _vllm_type(0, code.bits, False, 1 << code.bits - 1, False, 1)
    if code.name == "u4" and given.zero is not None and not given.zero_is_float:
        return _vllm_type(0, 4, False, 0, False, 1)
    _refuse(f"{code} with such zero points")
    raise AssertionError


def marlin(given: Stored, dtype: torch.dtype) -> Call:
    """vLLM's Marlin: scales and zero points permuted within 64 columns, as its fragments read them; of rows, within 32."""
    k, n = given.shape
    kind, bits = _vllm(given), given.code.bits
    group = given.group if len(given.scale) > 1 else -1
    if group not in (-1, 16, 32, 64, 128):
        _refuse(f"groups of {group}")
    packed = dense_bits(given.unsigned if given.code.is_integer else given.codes, bits).t().contiguous()
    words = torch.ops._C.gptq_marlin_repack(packed, k, n, bits, False)
    wide = [i + 8 * j for i in range(8) for j in range(8)]
    narrow = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = narrow if group == -1 else wide
    whole = given.scale.repeat_interleave(n // given.scale.shape[1], 1) * (
        1 if given.code.name == "e2m1" else given.factor
    )
    scales = whole.to(dtype).reshape(-1, len(order))[:, order].reshape(-1, n).contiguous()
    bias = (1 << (7 if dtype == BF16 else 4)) - (1 << given.code.exponent - 1) if given.code.is_float else 0
    zeros = total = None
    if given.zero is not None:
        lanes = given.unsigned_zero.reshape(-1, 64)[:, wide].reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
        zeros = dense_bits(lanes.reshape(-1, n), 4).contiguous()
    if given.code.name == "e4m3":  # the exponents of its fp8 count from another bias
        scales = (scales.float() * 2.0**bias).to(dtype)
    if given.code.name == "e2m1":
        scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n)
        if given.scale_type.name == "e8m0":
            scales = scales.to(torch.float8_e8m0fnu)
        else:
            halves = (scales.half() * 2**7).view(torch.int16) << 1
            scales = halves.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
            total = torch.tensor([given.factor * 2.0 ** (bias - 7)], device=scales.device)
    every = rotated(given, words, scales, *(() if zeros is None else (zeros,)))
    processors = torch.cuda.get_device_properties(words.device).multi_processor_count
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=words.device)

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        w, scale, *zero = every[i % len(every)]
        return torch.ops._C.marlin_gemm(
            x,
            None,
            w,
            None,
            scale,
            None,
            total,
            zero[0] if zero else None,
            locks,
            kind,
            x.shape[0],
            n,
            k,
            True,
            True,
            False,
        )

    return call


def machete(given: Stored, dtype: torch.dtype) -> Call:
    """vLLM's Machete with the best of its schedules for each M, which the first call with that M finds."""
    kind = _vllm(given)
    if not given.code.is_integer:
        _refuse(str(given.code))
    if given.group != 128 and len(given.scale) > 1:
        _refuse(f"groups of {given.group}")
    packed = dense_bits(given.unsigned, given.code.bits)
    words = torch.ops._C.machete_prepack_B(packed.t(), dtype, kind, dtype)
    every = rotated(given, words)
    scales, zeros, zero_type = given.scale.to(dtype).contiguous(), None, None
    if given.zero is not None:
        zeros, zero_type = (-(given.scale.float() * given.unsigned_zero.float())).to(dtype).contiguous(), dtype
    schedules = torch.ops._C.machete_supported_schedules(dtype, kind, dtype, zero_type, None, None, None)
    best: dict[int, str] = {}

    def with_schedule(x: torch.Tensor, i: int, schedule: str) -> torch.Tensor:
        (w,) = every[i % len(every)]
        return torch.ops._C.machete_mm(x, w, kind, None, scales, zeros, given.group, None, None, schedule)

    def timed(x: torch.Tensor, schedule: str) -> float:
        try:
            return median_us(lambda i: with_schedule(x, i, schedule), min(4, len(every)), x.device, samples=4)
        except RuntimeError:  # a schedule that does not fit the shape
            return float("inf")

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        m = x.shape[0]
        if m not in best:
            best[m] = min(schedules, key=lambda schedule: timed(x, schedule))
        return with_schedule(x, i, best[m])

    return call


def humming(given: Stored, dtype: torch.dtype, inputs: Mapping[str, object] | None = None) -> Call:
    """Humming, from PYTHONPATH: it compiles a kernel for every shape and range of M at the first call.

    `inputs` is its configuration of activations, where it is to quantize them.
    """
    from humming.layer import HummingLayer

    (k, n), code = given.shape, given.code
    names = {"bf16": "bfloat16", "f16": "float16", "e8m0": "float8e8m0", "e4m3": "float8e4m3"}
    own = "bf16" if dtype == BF16 else "f16"
    held = given.scale_type.name if given.scale_type.name in ("e8m0", "e4m3") else own
    kinds = {"e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}
    kind = getattr(torch, kinds[held]) if held in kinds else dtype
    config = {"dtype": f"uint{code.bits}" if code.is_integer else f"float{code.bits}e{code.exponent}m{code.mantissa}"}
    scale = given.scale.t().contiguous()
    stored = {"weight": dense_bits(given.unsigned if code.is_integer else given.codes, code.bits)}
    if given.block > 1:
        config |= {"group_size": given.group, "group_size_n": given.block, "scale_type": "block"}
        stored["weight_scale"] = scale
    else:
        config |= {"scale_dtype": names[held], "group_size": given.group if len(given.scale) > 1 else 0}
        stored["weight_scale"] = (scale * (1 if held in kinds else given.factor)).to(kind)
        if held == "e4m3":
            config["scale_2_type"] = "tensor"
            stored["weight_scale_2"] = torch.tensor([given.factor], device=scale.device)
    if given.zero is not None:
        config["has_zero_point"] = True
        if given.zero_is_float:
            config["is_fp_zero_point"], stored["zero_point"] = True, given.zero.t().to(dtype).contiguous()
        else:
            stored["zero_point"] = dense_bits(given.unsigned_zero, code.bits).t().contiguous()
    elif code.is_integer and not given.symmetric:
        _refuse("constant zero points off the middle")
    layers = []
    for _ in range(given.copies):
        more = {"input_config": dict(inputs)} if inputs else {}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(config), torch_dtype=dtype, **more).cuda()
        wrong = [name for name in stored if getattr(layer, name).shape != stored[name].shape]
        if wrong:
            raise Error(f"this version of humming stores {', '.join(wrong)} otherwise")
        layer.load_from_tensors(stored)
        layer.transform()
        layers.append(layer)
    return lambda x, i: layers[i % len(layers)](x)


def tinygemm(given: Stored, dtype: torch.dtype) -> Call:
    """torch's own int4 kernel: w = (q - 8)·s + zero, so that zero = (8 - z)·s."""
    if given.code.name != "u4" or given.zero is None:
        _refuse(f"{given.code} with such zero points")
    t = given.codes
    pairs = (t[:, 0::2] << 4 | t[:, 1::2]).to(torch.uint8).contiguous()
    every = rotated(given, torch.ops.aten._convert_weight_to_int4pack(pairs, 8))
    s, z = given.scale.float(), given.zero.float()
    scales_and_zeros = torch.stack([s, (8 - z) * s], -1).to(dtype).contiguous()
    return lambda x, i: torch.ops.aten._weight_int4pack_mm(x, every[i % len(every)][0], given.group, scales_and_zeros)


F16, BF16 = torch.float16, torch.bfloat16
PEERS = {
    "marlin": Peer(marlin, (BF16, F16), needs_pack=True),
    "machete": Peer(machete, (BF16, F16), needs_pack=True),
    "humming": Peer(humming, (BF16, F16), needs_pack=True),
    "tinygemm": Peer(tinygemm, (BF16,), needs_pack=False, most=64),
}
