"""How long a kernel takes, predicted from its tile: what chooses where nothing was measured.

    time = launch + further waves + exchange + (memory^3 + port^3 + multiplier^3 + latency^3)^(1/3)

    memory      (weights + x + y) / what the memory delivers; or else weights of the fullest SM / what it takes from there
    port        rounds * bytes that a CTA brings into its SM / what an SM takes in
    multiplier  rounds * work of a CTA / what an SM does
    latency     waves * trips along k * the time from a request to its data

The longest of the four decides, and one that is nearly as long still costs something: they overlap, but not perfectly.
A GPU deals the CTAs to its SMs: the busiest gets `rounds` = ceil(CTAs / SMs) of them, one after the other or several at a
time, which is all the same to what the SM delivers in total. `waves` = ceil(CTAs / CTAs that all SMs hold at once) is
what latency is paid for. The fullest SM may get all that it holds in every wave, more than its share: an SM alone draws
far less from memory than the memory delivers.

With mma a warp does one after the other: the products of a CTA and its codes to decode,

    work = 2 * tokens * features * k / operations per second  +  features * k * clocks per code / clock

With wgmma the multiplier works while the warp decodes. Its time is the cube root of a sum of cubes again: of these two
summands, of the instructions, which take their time however few tokens they have, and of all products of the whole GPU
at full speed, for power slows it down where all SMs multiply. A CTA has its SM to itself, so every wave after the first
begins with nothing on its way. CTAs that share k exchange their sums, in all of their parts or in the last.

The constants below were fitted to 775 times of 30 kernels on an H200 (groups of 128, m = 1 to 4096, five shapes). The
prediction is off by 6 % in the mean, and by less than 14 % in nine of ten cases; of kernels that take at most half as long
again as the fastest, by 6 % in the mean and by 23 % at worst. The worst of all takes half the time predicted.

Where the model chooses among what was timed, its kernel takes 4 % longer than the fastest in the mean of 45 pairs of m and
shape, and 22 % at worst. Other GPUs differ in the numbers of `qdsl.codegen.target.Gpu`.

A table that is modelled takes tiles in order of their tokens, so that more tokens never get a tile of fewer: the model
is not good enough to believe it where it jumps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdsl.choice import TOKENS, Key, Limits, Table, Times, merged, table_of
from qdsl.codegen.cuda.weight import BYTES, NIBBLES, Weight
from qdsl.codegen.target import Gpu
from qdsl.manifest import Variant

LAUNCH = 2.85e-6  # s, of a kernel in a graph: to its first instruction, and from its last
OVERLAPPED = 1.9e-6  # s, the same of one that is launched before its predecessor has ended
LATENCY = 0.33e-6  # s, from a request of a stage to its data, under load
WAVE = 1.5e-6  # s, from the last product of a CTA of wgmma to the first of the next on its SM
EXCHANGE = 1.75e-6  # s, for the CTAs of a cluster to add their sums
STREAM = 28  # bytes per clock that an SM takes in from memory
PORT = {"cp.async": 43, "TMA": 57}  # bytes per clock that an SM takes in from the L2 cache
CLOCKS = {"sums": 0.010, "weights": 0.011, "floats": 0.055, "bytes": 0.003}  # of an SM for a code, by `Work.decode`
INSTRUCTION = 34 / 1024  # clocks of an SM for a weight in wgmma of few tokens: an instruction has 64 x 16 weights
PORTABLE = 1e11  # products per second where there are no tiles

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
    fed                "cp.async": every warp copies what it multiplies; "TMA": others do
    tail               two CTAs share k of a part in a last round that has parts for half of the SMs only
    overlapped         it is launched before its predecessor has ended
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
    fed: str
    decode: str
    split: int = 1
    tail: bool = False
    overlapped: bool = False

    def residents(self, gpu: Gpu) -> int:
        """CTAs that an SM holds at once."""
        return max(1, min(self.resident, gpu.shared // (self.shared + 1024), gpu.threads // self.threads))


def bits_per_weight(weight: Weight) -> float:
    own = (kind for role, kind in weight.grouped.items() if not weight.place(role))
    grouped = sum(4 if kind in NIBBLES else 8 * BYTES[kind] for kind in own)
    return weight.code.bits + grouped / (weight.group or 4096)


def seconds(work: Work, weight: Weight, gpu: Gpu, m: int, n: int, k: int) -> float:
    """The predicted time of m tokens by an [n, k] weight."""
    row = bits_per_weight(weight) / 8 * k
    ctas, residents = -(-m // work.tokens) * -(-n // work.features) * work.split, work.residents(gpu)
    rounds, waves = float(-(-ctas // gpu.sms)), float(-(-ctas // (gpu.sms * residents)))
    halved = work.tail and 0 < ctas % gpu.sms <= gpu.sms // 2
    if halved:
        rounds, waves = rounds - 0.5, waves - 0.5
    most = waves * residents if rounds > 1 else rounds
    streamed = most * work.features * row / work.split / (STREAM * gpu.clock)
    x = 2 / weight.unit  # bytes of an input
    memory = max((n * row + m * (2 * n + x * k)) / gpu.bandwidth, streamed)
    port = rounds * (work.features * row + x * work.tokens * k) / work.split / (PORT[work.fed] * gpu.clock)
    trips = -(-k // (work.slice * work.teams * work.split)) / max(1, work.stages - 1) + 1
    latency = waves * trips * LATENCY

    weights = rounds * work.features * k / work.split
    codes = weights * CLOCKS[work.decode] / gpu.clock
    ahead = OVERLAPPED if work.overlapped else LAUNCH
    if work.multiplier == "mma":
        multiplier = weights * 2 * max(8, work.tokens) / (gpu.mma * weight.unit / gpu.sms) + codes
    else:
        rate, instruction = gpu.wgmma * weight.unit, INSTRUCTION / weight.unit
        products = weights * 2 * work.tokens / (rate / gpu.sms)
        multiplier = _longest(products, codes, weights * instruction / gpu.clock, 2 * m * n * k / rate)
        ahead += max(0, waves - 1) * WAVE
    if work.split > 1 or halved:
        ahead += (1 if halved else waves) * EXCHANGE
    return ahead + _longest(memory, port, multiplier, latency)


def _longest(*times: float) -> float:
    return sum(time**3 for time in times) ** (1 / 3)


def table(key: Key, weight: Weight, gpu: Gpu, works: Mapping[str, Work], variants: Sequence[Variant]) -> Table:
    """The choice among variants, by what the model says of their tiles."""
    rising = sorted(works, key=lambda name: (works[name].tokens, works[name].features))
    others = [v.name for v in variants if v.name not in works]

    def times(n: int, k: int) -> dict[int, dict[str, float]]:
        of_tiles = {m: {name: seconds(works[name], weight, gpu, m, n, k) for name in rising} for m in TOKENS}
        return {m: {**found, **dict.fromkeys(others, m * n * k / PORTABLE)} for m, found in of_tiles.items()}

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
