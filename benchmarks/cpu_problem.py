"""What cpu.py measures: classes of products, the numbers of a problem, and what a contender is.

Problems come from a seed, so that every process, of whatever environment, has the same codes, scales, zero points and x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
OURS, DENSE, LIMIT = "qdsl", "torch_bf16", "limit_"  # contenders; limits are what the machine can do, as a time
TOKENS = (1, 4, 16, 64, 256)
MOST = max(TOKENS)  # rows of x
LOOKED_AT = (*range(16), *range(16, MOST, 21), *(m - 1 for m in TOKENS if m > 16))  # rows of y that are compared


# ---- classes -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ours:
    """A scheme of qdsl and the kind of problem that it takes."""

    scheme: str
    params: Mapping[str, object]
    kind: str


@dataclass(frozen=True)
class Class:
    """Products that stand beside one another.

    units   of limits.c that may multiply, with the operations of such a unit that one multiplication takes
    """

    ours: tuple[Ours, ...]
    units: Mapping[str, int]


_16_BITS = {"f32": 1, "bf16": 1, "amx_bf16": 1}
_8_BITS = {"i8": 1, "amx_i8": 1}
_TWO_PLANES = {"f32": 1, "i8": 2, "amx_i8": 2}  # float32 as two int8
CLASSES: Mapping[str, Class] = {
    "w4a16_bf16": Class((Ours("awq4", {"act": "bf16", "scale_type": "bf16"}, "u4"),), _16_BITS),
    "w4a16_f32": Class((Ours("awq4", {"act": "f32"}, "u4"), Ours("w4a16_int", {}, "u4")), _TWO_PLANES),
    "w4a8": Class((Ours("w4a8_group", {"group": 128}, "i4_group"), Ours("w4a8_dynamic", {}, "i4")), _8_BITS),
    "w8a8": Class((Ours("w8a8_dynamic", {}, "i8"),), _8_BITS),
    "w8a16": Class((Ours("w8a16", {}, "i8"), Ours("w8a16_group", {}, "i8_group")), _16_BITS),
    "fp8": Class((Ours("fp8a16_channel", {}, "e4m3"),), _16_BITS),
    "nf4": Class((Ours("nf4", {"act": "bf16"}, "nf4"),), _16_BITS),
    "mxfp4": Class((Ours("mxfp4", {}, "e2m1"),), _16_BITS),
}


# ---- problems ----------------------------------------------------------------------------------------------------
GROUPS = {
    "u4": 128,
    "i4_group": 128,
    "i8_group": 128,
    "nf4": 64,
    "e2m1": 32,
    "i4": 0,
    "i8": 0,
    "e4m3": 0,
}  # 0: of a channel
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGE_E4M3 = 0x68  # the pattern of 64; what is beyond the largest number is none


@dataclass(frozen=True, eq=False)
class Problem:
    """A weight [N, K] and x [MOST, K]; compared by identity.

    q   codes [N, K]: i8 of i4 and i8, or else u8, the bits of e4m3 and e2m1 among them
    s   scales [N, groups], float32, of eight bits of mantissa: f16 and bf16 hold them
    z   zero points [N, groups], u8, of u4 alone
    x   float32
    """

    kind: str
    q: Tensor
    s: Tensor
    z: Tensor | None
    x: Tensor

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    @property
    def group(self) -> int:
        return self.k // self.s.shape[1]

    @property
    def bits(self) -> int:
        return 8 if self.kind in ("i8", "i8_group", "e4m3") else 4

    @property
    def unsigned(self) -> Tensor:
        """Codes of 4 bits counted from the least one, u8."""
        return (self.q + 8).to(torch.uint8) if self.kind.startswith("i4") else self.q

    @property
    def zeros(self) -> Tensor:
        """Zero points of `unsigned`, u8 [N, groups]."""
        return self.z if self.z is not None else torch.full(self.s.shape, 8, dtype=torch.uint8)

    @functools.cached_property
    def weight(self) -> Tensor:
        """float32 [N, K]; exact but for nf4, whose product with its scale rounds once."""
        return self.scaled(decoded(self.kind, self.q), self.z)

    def scaled(self, values: Tensor, zeros: Tensor | None = None) -> Tensor:
        """(values - zeros) times the scales, [N, K]."""
        values = values.view(self.n, -1, self.group)
        if zeros is not None:
            values = values - zeros.float()[..., None]
        return (values * self.s[..., None]).view(self.n, self.k)

    @functools.cached_property
    def _answers(self) -> dict[torch.dtype, Tensor]:
        return {}

    def exact(self, act: torch.dtype, weight: Tensor | None = None) -> Tensor:
        """Some rows of x·Wᵀ in float64, [len(LOOKED_AT), N], with x in a type and the weight of the problem, or another one."""
        if weight is not None:
            return self.x[list(LOOKED_AT)].to(act).double() @ weight.double().t()
        if act not in self._answers:
            self._answers[act] = self.exact(act, self.weight)
        return self._answers[act]


def decoded(kind: str, q: Tensor) -> Tensor:
    """The numbers of codes, float32."""
    if kind == "nf4":
        return torch.tensor(NF4)[q.int()]
    if kind == "e2m1":
        return torch.tensor([*E2M1, *(-v for v in E2M1)])[q.int()]
    if kind == "e4m3":
        return q.view(torch.float8_e4m3fn).float()
    return q.float()


def problem(kind: str, k: int, n: int) -> Problem:
    """The problem of a kind and a shape."""
    rng = np.random.default_rng((list(GROUPS).index(kind), k, n))
    groups = k // GROUPS[kind] if GROUPS[kind] else 1

    def random(low: int, high: int, shape: tuple[int, ...], dtype: type = np.uint8) -> Tensor:
        return torch.from_numpy(rng.integers(low, high, shape, dtype=dtype))

    s = random(128, 256, (n, groups), np.int16).float() * 2.0**-14
    if kind == "e2m1":  # whose scales are powers of two
        s = torch.exp2(random(-8, -4, (n, groups), np.int16).float())
    if kind.startswith("i"):
        half = 1 << int(kind[1]) - 1
        q = random(-half, half, (n, k), np.int8)
    elif kind == "e4m3":
        q = random(0, LARGE_E4M3 + 1, (n, k)) | random(0, 2, (n, k)) << 7
    else:
        q = random(0, 16, (n, k))
    z = random(0, 16, (n, groups)) if kind == "u4" else None
    x = torch.from_numpy(rng.standard_normal((MOST, k), dtype=np.float32))
    return Problem(kind, q, s, z, x)


# ---- contenders --------------------------------------------------------------------------------------------------
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Built:
    """A contender's product for one problem.

    copies   of the weight, each to be called with x
    exact    the right rows of the output, as of `Problem.exact`, where it has codes of its own
    verify   raises Error if an output is wrong in a way that a norm does not show
    keep     what the calls need alive
    """

    copies: Sequence[Call]
    exact: Tensor | None = None
    verify: Callable[[Tensor], None] | None = None
    keep: Any = None


@dataclass(frozen=True)
class Contender:
    """Whose kernel, for which class and kind of problem, from which type of x.

    make      of a problem, the number of copies and that of threads
    fixed     whether the number of threads is that of `make`; else torch's holds
    scheme    of ours
    """

    name: str
    group: str
    kind: str
    act: torch.dtype
    make: Callable[[Problem, int, int], Built]
    fixed: bool = False
    scheme: str = ""

    @property
    def key(self) -> str:
        return "/".join(filter(None, (self.name, self.kind, self.scheme)))


def rotated(count: int, tensors: Sequence[Tensor], call: Callable[..., Tensor]) -> list[Call]:
    """Calls with as many copies of a weight's tensors."""

    def bound(own: tuple[Tensor, ...]) -> Call:
        return lambda x: call(x, *own)

    return [bound(tuple(tensors)), *(bound(tuple(t.clone() for t in tensors)) for _ in range(count - 1))]


# ---- packing -----------------------------------------------------------------------------------------------------
def nibbles(q: Tensor) -> Tensor:
    """u8 [.., columns / 2]: two codes in a byte, the first one low."""
    return (q[..., ::2] | (q[..., 1::2] << 4)).contiguous()


def words(lanes: Tensor) -> Tensor:
    """int32 [..]: eight codes [.., 8] in a word, the first one low."""
    packed = (lanes.to(torch.int64) << torch.arange(0, 32, 4)).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32).contiguous()


def awq_order(q: Tensor) -> Tensor:
    """int32 [.., columns / 8]: words as AutoAWQ orders them."""
    return words(q.view(*q.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]])
