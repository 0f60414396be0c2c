"""How long a kernel takes, predicted from its tile: what chooses where nothing was measured.

    time = launch + (memory^4 + port^4 + multiplier^4 + latency^4)^(1/4)

    memory      (weights + x + y) / what the memory delivers
    port        rounds * bytes that a CTA brings into its SM / what an SM takes in
    multiplier  rounds * work of a CTA / what an SM does
    latency     waves * trips along k * the time from a request to its data

The longest of the four decides, and one that is nearly as long still costs something: they overlap, but not perfectly.
A GPU deals the CTAs to its SMs: the busiest gets `rounds` = ceil(CTAs / SMs) of them, one after the other or several at a
time, which is all the same to what the SM delivers in total. `waves` = ceil(CTAs / CTAs that all SMs hold at once) is
what latency is paid for. The work of a CTA is its products, and its codes to decode:

    work = 2 * tokens * features * k / operations per second  +  features * k * clocks per code / clock

A warp does one after the other (mma), or the multiplier works while the warp decodes (wgmma), and the longer counts.

The constants below were fitted to 75 kernels timed on an H200 (benchmarks/results, m = 1 to 4096, five shapes): the
prediction is off by 6 % in the mean, by 13 % at worst. Other GPUs differ in the numbers of `qdsl.codegen.target.Gpu`.

A table that is modelled takes tiles in order of their tokens, so that more tokens never get a tile of fewer: the model
is not good enough to believe it where it jumps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdsl.choice import TOKENS, Key, Limits, Table, Times, merged, table_of
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import Gpu
from qdsl.manifest import Variant

LAUNCH = 2.9e-6  # s, of a kernel in a graph: to its first instruction, and from its last
LATENCY = 0.49e-6  # s, from a request of a stage to its data, under load
PORT = 41  # bytes per clock that an SM takes in from the L2 cache
CLOCKS = {"sums": 0.017, "weights": 0.020, "floats": 0.060}  # of an SM for a code, by `Work.decode`

SHAPES = tuple((n, 4096) for n in (1024, 2048, 4096, 8192, 16384, 32768))  # n, k of a modelled table: k hardly matters


@dataclass(frozen=True)
class Work:
    """A kernel's tile: the part of y that one CTA, or several that share k, compute.

    tokens, features   of y
    teams, split       parts of k: teams of warps inside a CTA, and CTAs
    slice, stages      inputs that one stage of a team holds, and stages in its ring
    threads, resident  of a CTA, and CTAs of an SM as far as registers go
    shared             bytes of shared memory of a CTA
    multiplier         "mma": a warp waits for its products; "wgmma": they are computed while it decodes
    decode             how codes become operands: "sums" (as they are, sums are corrected), "weights" (corrected in pairs),
                       "floats" (corrected in float32)
    """

    tokens: int
    features: int
    teams: int
    slice: int
    stages: int
    threads: int
    resident: int
    shared: int
    multiplier: str
    decode: str
    split: int = 1

    def residents(self, gpu: Gpu) -> int:
        """CTAs that an SM holds at once."""
        return max(1, min(self.resident, gpu.shared // (self.shared + 1024), gpu.threads // self.threads))


def bits_per_weight(weight: Weight) -> float:
    sizes = {None: 0, "u4": 4, "float16": 16, "bfloat16": 16, "float32": 32}
    return 4 + (sizes[weight.scale] + sizes[weight.zero]) / (weight.group or 4096)


def seconds(work: Work, weight: Weight, gpu: Gpu, m: int, n: int, k: int) -> float:
    """The predicted time of m tokens by an [n, k] weight."""
    row = bits_per_weight(weight) / 8 * k
    ctas = -(-m // work.tokens) * -(-n // work.features) * work.split
    rounds, waves = -(-ctas // gpu.sms), -(-ctas // (gpu.sms * work.residents(gpu)))
    memory = (n * row + 2 * m * (n + k)) / gpu.bandwidth
    port = rounds * (work.features * row + 2 * work.tokens * k) / work.split / (PORT * gpu.clock)
    trips = -(-k // (work.slice * work.teams * work.split)) / max(1, work.stages - 1) + 1
    multiplier = rounds * _work_of_a_cta(work, gpu, k // work.split)
    return LAUNCH + math.hypot(*(part**2 for part in (memory, port, multiplier, waves * trips * LATENCY))) ** 0.5


def _work_of_a_cta(work: Work, gpu: Gpu, k: int) -> float:
    operations = {"mma": gpu.mma, "wgmma": gpu.wgmma}[work.multiplier] / gpu.sms
    products = 2 * max(8, work.tokens) * work.features * k / operations
    codes = work.features * k * CLOCKS[work.decode] / gpu.clock
    return max(products, codes) if work.multiplier == "wgmma" else products + codes


def table(key: Key, weight: Weight, gpu: Gpu, works: Mapping[str, Work], variants: Sequence[Variant]) -> Table:
    """The choice among variants, by what the model says of their tiles."""
    rising = sorted(works, key=lambda name: (works[name].tokens, works[name].features))

    def times(n: int, k: int) -> dict[int, dict[str, float]]:
        return {m: {name: seconds(works[name], weight, gpu, m, n, k) for name in rising} for m in TOKENS}

    return table_of("model", key, {shape: times(*shape) for shape in SHAPES}, variants, _rising)


def _rising(times: Times) -> Limits:
    """The variant for every m, in the order they have in `times`: the sequence that costs the least, m by m together."""
    names = list(next(iter(times.values())))
    best: list[tuple[float, list[str]]] = [(0.0, [])] * len(names)  # by the variant that serves the last m
    for m in sorted(times):
        least = min(times[m].values())
        before = [min(best[: at + 1], key=lambda found: found[0]) for at in range(len(names))]
        best = [
            (cost + times[m][name] / least, [*path, name]) for (cost, path), name in zip(before, names, strict=True)
        ]
    path = min(best, key=lambda found: found[0])[1]
    return merged([*zip(sorted(times)[:-1], path, strict=False), (None, path[-1])])
