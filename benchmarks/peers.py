"""Other kernels for 4-bit weights and 16-bit activations on a CUDA GPU, and the dense product, for `w4a16.py`.

Each peer is one function `prepare(q, s, z, dtype) -> call(x, i)`: it brings the same codes q [K, N], scales s [G, N] and zero
points z [G, N] into its own form, `copies(K, N)` times, and `call` multiplies x [M, K] by the copy of number i.  Nothing is
imported or loaded before it is asked for; what is missing raises, and the table says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from qdsl.diagnostic import Error
from qdsl.runtime.bench import COPIES
from qdsl.runtime.timing import GPU_ROTATION, median_us

Call = Callable[[torch.Tensor, int], torch.Tensor]
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], Call]

U4 = 1125899906843648  # vLLM's number for unsigned 4-bit codes


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


def copies(k: int, n: int) -> int:
    """Of a 4-bit weight, so that no call finds its own in the L2 cache."""
    return min(COPIES, GPU_ROTATION // (k * n // 2) + 1)


def load(pack: Path | None) -> None:
    """Load vLLM's operators; raises Error where they are not."""
    if pack is None:
        raise Error("no --peers DIR")
    library = pack / "vllm_C.so"
    if not library.is_file():
        raise Error(f"no {library.name} in {pack.name}")
    torch.ops.load_library(str(library))


def weight(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """(q - z)·s in float64, [K, N]."""
    group = len(q) // len(s)
    return (q.double() - z.double().repeat_interleave(group, 0)) * s.double().repeat_interleave(group, 0)


def pack_rows(q: torch.Tensor) -> torch.Tensor:
    """Codes [K, N] in int32 words [K / 8, N], the lowest k in the lowest bits."""
    k, n = q.shape
    parts = q.view(k // 8, 8, n)
    words = torch.zeros(k // 8, n, dtype=torch.int32, device=q.device)
    for lane in range(8):
        words |= parts[:, lane].to(torch.int32) << 4 * lane
    return words


def pack_columns(q: torch.Tensor) -> torch.Tensor:
    """Codes [G, N] in int32 words [G, N / 8]."""
    return pack_rows(q.t().contiguous()).t().contiguous()


# ---- peers -------------------------------------------------------------------------------------------------------
def cublas(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
    """F.linear with the dequantized weight."""
    dense = weight(q, s, z).to(dtype).t().contiguous()
    rotated = [dense, *(dense.clone() for _ in range(min(COPIES, GPU_ROTATION // dense.nbytes)))]
    return lambda x, i: functional.linear(x, rotated[i % len(rotated)])


def marlin(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
    """vLLM's Marlin: scales and zero points permuted within 64 columns, as its fragments read them."""
    k, n = q.shape
    order = [i + 8 * j for i in range(8) for j in range(8)]
    words = torch.ops._C.gptq_marlin_repack(pack_rows(q), k, n, 4, False)
    scales = s.to(dtype).reshape(-1, 64)[:, order].reshape(-1, n).contiguous()
    lanes = z.reshape(-1, 64)[:, order].reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    zeros = pack_columns(lanes.reshape(-1, n).contiguous())
    rotated = [tuple(t.clone() for t in (words, scales, zeros)) for _ in range(copies(k, n))]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=q.device)

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        w, scale, zero = rotated[i % len(rotated)]
        return torch.ops._C.marlin_gemm(
            x, None, w, None, scale, None, None, zero, locks, U4, x.shape[0], n, k, True, True, False
        )

    return call


def machete(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
    """vLLM's Machete with the best of its schedules for each M, which the first call with that M finds."""
    k, n = q.shape
    group = k // len(s)
    words = torch.ops._C.machete_prepack_B(pack_rows(q).t().contiguous().t(), dtype, U4, dtype)
    rotated = [words, *(words.clone() for _ in range(copies(k, n) - 1))]
    scales = s.to(dtype).contiguous()
    zeros = (-(s.float() * z.float())).to(dtype).contiguous()
    schedules = torch.ops._C.machete_supported_schedules(dtype, U4, dtype, dtype, None, None, None)
    best: dict[int, str] = {}

    def with_schedule(x: torch.Tensor, i: int, schedule: str) -> torch.Tensor:
        w = rotated[i % len(rotated)]
        return torch.ops._C.machete_mm(x, w, U4, None, scales, zeros, group, None, None, schedule)

    def timed(x: torch.Tensor, schedule: str) -> float:
        try:
            return median_us(lambda i: with_schedule(x, i, schedule), min(4, len(rotated)), x.device, samples=4)
        except RuntimeError:  # a schedule that does not fit the shape
            return float("inf")

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        m = x.shape[0]
        if m not in best:
            best[m] = min(schedules, key=lambda schedule: timed(x, schedule))
        return with_schedule(x, i, best[m])

    return call


def humming(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
    """Humming, from PYTHONPATH: it compiles a kernel for every shape and range of M at the first call."""
    from humming.layer import HummingLayer

    k, n = q.shape
    stored = {
        "weight": pack_rows(q).t().contiguous(),
        "weight_scale": s.t().to(dtype).contiguous(),
        "zero_point": pack_columns(z).t().contiguous(),
    }
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    layers = []
    for _ in range(copies(k, n)):
        config = {
            "dtype": "uint4",
            "group_size": k // len(s),
            "scale_dtype": names[dtype],
            "has_zero_point": True,
        }
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype).cuda()
        missing = [name for name in stored if getattr(layer, name).shape != stored[name].shape]
        if missing:
            raise Error(f"this version of humming stores {', '.join(missing)} otherwise")
        layer.load_from_tensors(stored)
        layer.transform()
        layers.append(layer)
    return lambda x, i: layers[i % len(layers)](x)


def tinygemm(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
    """torch's own int4 kernel: w = (q - 8)·s + zero, so that zero = (8 - z)·s."""
    k, n = q.shape
    t = q.t()
    pairs = (t[:, 0::2] << 4 | t[:, 1::2]).to(torch.uint8).contiguous()
    words = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    rotated = [words, *(words.clone() for _ in range(copies(k, n) - 1))]
    scales_and_zeros = torch.stack([s.float(), (8 - z.float()) * s.float()], -1).to(dtype).contiguous()
    group = k // len(s)
    return lambda x, i: torch.ops.aten._weight_int4pack_mm(x, rotated[i % len(rotated)], group, scales_and_zeros)


F16, BF16 = torch.float16, torch.bfloat16
PEERS = {
    "cublas": Peer(cublas, (BF16, F16), needs_pack=False),
    "marlin": Peer(marlin, (BF16, F16), needs_pack=True),
    "machete": Peer(machete, (BF16, F16), needs_pack=True),
    "humming": Peer(humming, (BF16, F16), needs_pack=True),
    "tinygemm": Peer(tinygemm, (BF16,), needs_pack=False, most=64),
}
