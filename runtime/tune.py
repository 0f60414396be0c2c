"""Which variant is the fastest for which m and shape, measured on this machine's GPU: `qdsl tune`.

    artifact, (K, N), M --random weights, rotated past the caches--> every variant --checked--> timed --> Table

Every variant's output is compared with float64, at the ends of the features and for some rows, and as a whole with the
first variant's.  A variant that a single call shows to be hopeless is not timed any closer; those that are close to the
best are timed by turns.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

import qdsl
from qdsl import reference
from qdsl.artifact import Artifact
from qdsl.choice import TOKENS, Table, Times, table_of
from qdsl.diagnostic import Error
from qdsl.manifest import Buffer
from qdsl.order import SOURCE, Inputs
from qdsl.runtime.artifact import Kernel, find_artifact, register
from qdsl.runtime.buffer import packed, stored_shape, torch_type, unpacked
from qdsl.runtime.repack import torch_dtype
from qdsl.runtime.timing import WARMING, Timed, device_name, medians_by_turns, rotation
from qdsl.scheme import Group, Scheme, Tensor, Var
from qdsl.transform import free_sizes

HOPELESS = 3  # times the best: a few calls are enough to know
CLOSE = 1.2  # times the best: to be timed by turns
FALLEN = 10  # times the best, and
GROWN = 1.3  # times as far behind as at the m before: not called for any larger m
CALLS = 4  # few, but not one: the first after a pause takes tens of µs
LAUNCH_US = 20  # of such a call that is no kernel's time, at most
COPIES = 256
SAMPLES = 7  # of a median
LIKE_FIRST = 0.02  # relative distance of two outputs: both round weights and sums, in bf16 to 3 digits
ROWS = 8  # of y that are compared with float64
LARGE = 64  # of float codes: sums of larger ones could be more than an f16 holds

Report = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """What was found for an artifact, or for one phase of it.

    table   None where there is nothing to choose
    times   µs, by (n, k), m and variant; empty where another artifact of the same kernels was timed
    phase   whose kernels these are; empty where the scheme has none
    """

    artifact: Artifact
    arch: str
    table: Table | None
    times: dict[tuple[int, int], Times]
    phase: str = ""

    def __str__(self) -> str:
        phase = f", phase {self.phase}" if self.phase else ""
        return f"{self.artifact.path}{phase}: {self.table or 'one variant, nothing to choose'}"

    def as_json(self) -> dict[str, Any]:
        m = self.artifact.manifest
        times = [
            {"K": k, "N": n, "M": tokens, "variant": name, "us": us}
            for (n, k), by_m in self.times.items()
            for tokens, by_name in by_m.items()
            for name, us in by_name.items()
        ]
        return {"artifact": str(self.artifact.path), "scheme": m.scheme, "params": dict(m.params), "arch": self.arch,
                "phase": self.phase, "table": self.table and asdict(self.table), "times": times}  # fmt: skip


def require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise Error(
            "tuning times kernels on a CUDA GPU, and torch sees none; run it where one is: compiled artifacts need no compiler there"
        )
    return torch.device("cuda")


def tune(
    subjects: Sequence[Artifact | Scheme], device: torch.device, shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int], report: Report = lambda _: None,
) -> Iterator[Tuned]:  # fmt: skip
    """Measure artifacts (of schemes: those that layers would use) for (K, N) shapes and numbers of tokens.

    The largest of the usual numbers is always among them, since its choice serves all beyond. Rows of other shapes that
    were measured on a GPU of this name stay. Artifacts of the same kernels are measured once. Raises Error at the first
    wrong output.
    """
    known: dict[tuple, Table] = {}
    tokens = (*tokens, TOKENS[-1])
    for subject in subjects:
        if isinstance(subject, Artifact):
            m = subject.manifest
            scheme, artifact = qdsl.parse(m.text, m.scheme, **m.params), subject
        else:
            scheme, artifact = subject, find_artifact(subject, device)
        if scheme.output.half:
            raise Error(
                f"{scheme.bound} makes one feature of several, and takes the tables of its weight; tune a scheme with that "
                "weight and a plain output, and compile this one again"
            )
        for phase in scheme.phases or ("",):
            kernel = register(artifact, device, scheme, phase=phase)
            variants, before = (by[kernel.arch][phase] for by in (artifact.manifest.variants, artifact.manifest.tables))
            kind = (kernel.arch, before.key, tuple((v.name, v.order) for v in variants))
            times: dict[tuple[int, int], Times] = {}
            if len(variants) > 1 and kind not in known:
                report(
                    f"{' '.join([scheme.bound, *filter(None, [phase])])} for {kernel.arch}, {len(variants)} variants"
                )
                times = {(n, k): _shape(kernel, n, k, tokens, device, report) for k, n in dict.fromkeys(shapes)}
                source = f"measured on {device_name(device)}, "
                table = table_of(source + datetime.date.today().isoformat(), before.key, times, variants)
                own = before.source.startswith(source) and " with " not in before.source  # not those of similar kernels
                stay = [row for row in before.rows if own and (row.n, row.k) not in times]
                known[kind] = replace(table, rows=(*stay, *table.rows))
            yield Tuned(artifact, kernel.arch, known.get(kind), times, phase)


def _shape(kernel: Kernel, n: int, k: int, tokens: Sequence[int], device: torch.device, report: Report) -> Times:
    try:
        trial = Trial(kernel, n, k, device)
        names = kernel.variants(k)
        times = explore(
            names, tokens, trial.once_us, trial.sample_us, trial.by_turns_us, lambda m: report(f"K {k}, N {n}, M {m}")
        )
    except torch.OutOfMemoryError:
        raise Error(f"K {k}, N {n}: too large for the memory of this GPU; leave it out of --shapes") from None
    return times


def explore(
    names: Sequence[str], tokens: Sequence[int], once_us: Callable[[int, str], float], sample_us: Callable[[int, str], float],
    by_turns_us: Callable[[int, Sequence[str]], Sequence[float]], report: Callable[[int], None] = lambda _: None,
) -> Times:  # fmt: skip
    """The time of every variant for rising m: of a hopeless one that of a call, of others a sample, and medians, by turns, of
    those that are close to the best.

    A variant that has fallen far behind, and clearly further than at the m before, has no time for any larger m. A kernel
    made for many tokens is far behind for few, too, but comes closer.
    """
    found: dict[int, dict[str, float]] = {}
    behind: dict[str, float] = {}  # variant -> times the best, at the m before
    left = list(names)
    for m in sorted(set(tokens)):
        report(m)
        times: dict[str, float] = {}
        for name in sorted(
            left, key=lambda name: behind.get(name, 0.0)
        ):  # the best come first: others are told by them
            best = min(times.values(), default=math.inf)
            hopeless = HOPELESS * best + LAUNCH_US
            once = once_us(m, name)
            if once > hopeless:  # or something held it up
                once = min(once, once_us(m, name))
            times[name] = once if once > hopeless else sample_us(m, name)
        close = [name for name, us in times.items() if us <= CLOSE * min(times.values())]
        if len(close) > 1:
            times.update(zip(close, by_turns_us(m, close), strict=True))
        now = {name: us / min(times.values()) for name, us in times.items()}
        left = [name for name in left if now[name] <= max(FALLEN, GROWN * behind.get(name, math.inf))]
        found[m], behind = times, now
    return found


# ---- one shape ---------------------------------------------------------------------------------------------------
class Trial:
    """A random [n, k] weight in as many copies as it takes for none to stay in a cache, and calls of variants on it."""

    def __init__(self, kernel: Kernel, n: int, k: int, device: torch.device):
        self.kernel, self.n, self.k, self.device = kernel, n, k, device
        self.generator = torch.Generator(device).manual_seed(n * 31 + k)
        self.inputs, free = self._inputs(), free_sizes(kernel.scheme, k)
        if free is None:
            raise Error(
                f"K {k}: no x of so many features can be transformed as {kernel.scheme.bound} says; leave it out"
            )
        self.free = free
        first = [self._random(name) for name in kernel.names]
        count = min(COPIES, rotation(device) // max(1, sum(b.nbytes for b in first)) + 2)
        self.copies = [first, *([b.clone() for b in first] for _ in range(count - 1))]
        self.features, self.patterns = self._sample(first)
        self.m = 0
        self.timed: dict[str, Timed] = {}  # variants, for m

    def _inputs(self) -> Inputs:
        """Groups of equal size, their inputs anywhere where a tensor names them."""
        order = self.kernel.order
        if order is None or order.index is None:
            return Inputs(self.k)
        return Inputs(self.k, {order.index: np.random.default_rng(self.k).permutation(self.k) // order.group})

    def _random(self, name: str) -> torch.Tensor:
        """Random numbers in the kernel's layout: any bits are codes, scales are around 1/100."""
        device, generator, order = self.device, self.generator, self.kernel.order
        if name == SOURCE:
            return torch.tensor(order.runs(self.inputs).source, device=device)
        tensor, buffer = self.kernel.scheme.tensor(name), self.kernel.buffers[name]
        kind = torch_type(buffer)
        if tensor.optional:
            return torch.empty((0, *[1] * (len(buffer.layout.axes) - 1)), dtype=kind, device=device)
        if tensor.role == "index":
            return packed(buffer, tensor, self.inputs.groups[name].astype(np.uint32), self.inputs).to(device)
        shape = stored_shape(buffer, tensor, self._shape(tensor, self.n), self.inputs)
        if kind.is_floating_point:
            low, high = (0.0, 15.0) if tensor.role == "zero" else (0.005, 0.015)
            return (torch.rand(shape, generator=generator, device=device) * (high - low) + low).to(kind)
        drawn = torch.from_numpy(_bytes(tensor, buffer)).to(device)
        count = math.prod(shape) * kind.itemsize
        at = torch.randint(0, len(drawn), (count,), dtype=torch.int32, generator=generator, device=device)
        return drawn[at].view(kind).reshape(shape)

    def _shape(self, tensor: Tensor, n: int) -> tuple[int, ...]:
        return tensor.shape({"e": 1, "m": 1, "n": n, "k": self.k, **self.free}, self.kernel.scheme)

    def _sample(self, buffers: Sequence[torch.Tensor]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The first and the last few features, and what the weight's tensors hold for them."""
        held = [(t, self.kernel.buffers[t.name], b) for t, b in zip(self._tensors(), buffers) if not t.optional]
        blocks = [found for t, buffer, _ in held if (found := _features_of_a_row(t, buffer))]
        step = math.lcm(*blocks)
        starts = sorted({0, max(0, self.n - 1) // step * step})
        parts = [(start, min(self.n, start + step)) for start in starts]
        patterns: dict[str, np.ndarray] = {}
        for tensor, buffer, stored in held:
            block = _features_of_a_row(tensor, buffer)
            if block is None:
                patterns[tensor.name] = unpacked(buffer, tensor, stored, self._shape(tensor, self.n), self.inputs)
                continue
            cut = []
            for start, end in parts:
                rows, shape = stored[start // block : -(-end // block)], self._shape(tensor, end - start)
                cut.append(unpacked(buffer, tensor, rows, shape, self.inputs))
            patterns[tensor.name] = np.concatenate(cut)
        return np.concatenate([np.arange(start, end) for start, end in parts]), patterns

    def _tensors(self) -> list[Tensor]:
        return [self.kernel.scheme.tensor(name) for name in self.kernel.names if name != SOURCE]

    def _prepare(self, m: int) -> None:
        """x, y, and the right answer for some rows and features."""
        self.m, self.timed, scheme = m, {}, self.kernel.scheme
        kind = torch_dtype(scheme.output.dtype)
        self.x = torch.randn((m, self.k), generator=self.generator, device=self.device).to(kind)
        self.y = torch.empty((m, self.n), dtype=kind, device=self.device)
        self.first: torch.Tensor | None = None
        self.rows = np.unique(np.linspace(0, m - 1, ROWS, dtype=int))
        x = self.x[torch.from_numpy(self.rows).to(self.device)].double().cpu().numpy()
        manifest = self.kernel.artifact.manifest
        self.right = reference.linear(
            scheme,
            x,
            self.patterns,
            len(self.features),
            precision=manifest.precision,
        )

    def call(self, name: str, copy: int) -> None:
        self.kernel.run_variant(name, self.x, self.copies[copy], self.y)

    def once_us(self, m: int, name: str) -> float:
        """A call: one is checked, then a few are timed."""
        if m != self.m:
            self._prepare(m)
        self.y.fill_(float("nan"))
        self.call(name, 0)
        self._check(name)
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.call(name, len(self.copies) - 1)
            return (time.perf_counter() - start) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for call in range(CALLS):
            self.call(name, -1 - call % len(self.copies))
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS

    def sample_us(self, m: int, name: str) -> float:
        assert m == self.m, "called once before"
        timed = self.timed[name] = Timed(lambda copy: self.call(name, copy), len(self.copies), self.device)
        return [timed.sample() for _ in range(WARMING + 1)][-1]

    def by_turns_us(self, m: int, names: Sequence[str]) -> list[float]:
        assert m == self.m, "sampled before"
        return medians_by_turns([self.timed[name] for name in names], SAMPLES)

    def _check(self, name: str) -> None:
        """Raises Error unless the sample is within the derived bound, and all of y is as the first variant's."""
        rows, features = (torch.from_numpy(at).to(self.device) for at in (self.rows, self.features))
        found = self.y[rows][:, features].double().cpu().numpy()
        wrong = ~(np.abs(found - self.right.y) <= self.right.bound)
        if self.first is None:
            self.first = self.y.clone()
        other = float((self.y.float() - self.first.float()).norm() / self.first.float().norm())
        if wrong.any() or not other < LIKE_FIRST:
            m = self.kernel.artifact.manifest
            raise Error(
                f"{m.scheme} for {self.kernel.arch}: variant {name} is wrong for K {self.k}, N {self.n}, M {self.m} "
                f"({wrong.sum()} of {wrong.size} elements looked at; {other:.2g} from the first variant); "
                "`qdsl verify` looks closer"
            )


def _bytes(tensor: Tensor, buffer: Buffer) -> np.ndarray:
    """The bytes that random ones of a buffer are drawn from: any bits are codes, but for floats that are none or huge."""
    format, packed = tensor.dtype, any(axis.runs for axis in buffer.layout.axes)
    if format.is_float and tensor.role != "code":
        return format.encode(np.linspace(0.005, 0.015, 64)).astype(np.uint8)
    one = np.arange(1 << format.bits, dtype=np.uint8)
    if format.is_float:
        one = one[np.abs(format.decode(one)) <= LARGE]  # NaN is not
    if not packed or format.bits == 8:
        return one
    if len(one) < 1 << format.bits:
        raise Error(f"random codes of {format}, some of which are no numbers, can't be drawn a byte at a time")
    return np.arange(256, dtype=np.uint8)


def _features_of_a_row(tensor: Tensor, buffer: Buffer) -> int | None:
    """Output features of one position of the stored tensor's first axis; None: all of them."""
    match tensor.index:
        case (Group("n", size), *_):
            return size
        case (Var("n"), *_):
            pass
        case _:
            return None
    outer, *rest = buffer.layout.dims[0]
    assert buffer.layout.axes[0].digits == (outer.name,), f"{buffer.tensor}{buffer.layout} is not stored by features"
    return math.prod(digit.extent for digit in rest)
