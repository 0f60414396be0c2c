"""Compiled kernels against the float64 reference: `qdsl verify`.

Every case fills the output with NaN first, so an element that no kernel wrote shows, and compares with the bound that
`qdsl.reference.linear` derives.  The cases read back what random data with a loose tolerance would miss: one-hot rows
return single weights, small integers leave no rounding to hide in, zero rows leave the bias alone, and a row of NaN
must not reach its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

import qdsl
from qdsl import reference
from qdsl.artifact import Artifact
from qdsl.diagnostic import Error
from qdsl.runtime.artifact import find_artifact, fitting_arch
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.repack import torch_dtype
from qdsl.scheme import Scheme, Tensor
from qdsl.transform import free_sizes

CASES = ("random", "one-hot", "integers", "zero", "NaN row")
# n, k: below, at and beyond tiles, groups and words; odd sizes; ragged last groups
SIZES = ((1, 8), (7, 40), (16, 64), (33, 136), (48, 192), (64, 320), (24, 1344))
LARGER = ((64, 512), (128, 1024), (256, 2048), (512, 4096))  # for schemes that require those above away
MOST = 192  # inputs of the size that is run with all of these numbers of tokens
TOKENS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 129, 256, 323)


@dataclass(frozen=True)
class Failure:
    """The worst element of a failed case, with what went into it."""

    case: str
    m: int
    n: int
    k: int
    at: tuple[int, int]
    expected: float
    found: float
    bound: float
    codes: str

    def __str__(self) -> str:
        return (
            f"  {self.case}, m = {self.m}, n = {self.n}, k = {self.k}: y[{self.at[0]}, {self.at[1]}] is {self.found:.8g}, "
            f"should be {self.expected:.8g} within {self.bound:.2g}\n    {self.codes}"
        )


@dataclass
class Report:
    scheme: str
    target: str
    cases: int = 0
    worst: float = 0.0  # largest error over its bound
    phases: tuple[str, ...] = ()  # that were run, each through every case
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "WRONG"
        phases = f" of {' and '.join(self.phases)}" if self.phases else ""
        line = f"{self.scheme} on {self.target}: {verdict}, {self.cases} cases{phases}, "
        line += f"worst error {self.worst:.2f} of its bound"
        if self.failures:
            shown = max(self.failures, key=lambda f: abs(f.found - f.expected) / f.bound if f.bound else np.inf)
            line += f", {len(self.failures)} failed; the worst:\n{shown}"
        return line

    def as_json(self) -> dict:
        return {"scheme": self.scheme, "target": self.target, "passed": self.passed, "cases": self.cases, "phases": list(self.phases),
                "worst": self.worst, "failures": [str(f) for f in self.failures[:20]]}  # fmt: skip


def verify(scheme: Scheme, kind: str = "cpu", arch: str | None = None, *, seed: int = 0) -> Report:
    """Run every case over awkward shapes on the CPU or the current GPU; raises only what keeps a kernel from running.

    arch   of this machine or below, such as "x86-64-v3"; by default what `QuantLinear` takes
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise Error(
            "verifying CUDA kernels needs a CUDA GPU, and torch sees none; `--target cpu` checks the same scheme here"
        )
    device = torch.device(kind)
    artifact = qdsl.compile(scheme, kind, (arch,)) if arch else find_artifact(scheme, device)
    used = fitting_arch(tuple(artifact.manifest.libraries), device)
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    report = Report(scheme.bound, f"{name} {used}", phases=scheme.phases)
    sizes = _allowed(scheme, artifact, SIZES) or _allowed(scheme, artifact, LARGER)
    if not sizes:
        tried = ", ".join(f"{k}x{n}" for n, k in (*SIZES, *LARGER))
        raise Error(
            f"{scheme.bound}: it takes none of the sizes that are verified, KxN = {tried}; see its `require` lines"
        )
    most = MOST if any(k == MOST for _, k in sizes) else sizes[0][1]
    shapes = [
        (phase, m, n, k)
        for phase in scheme.phases or ("",)
        for n, k in sizes
        for m in (_tokens(scheme, phase, n, k, device, artifact) if k == most else (1, 5))
    ]
    for at, (phase, m, n, k) in enumerate(shapes):
        if sys.stderr.isatty():
            print(f"\r\033[K{scheme.bound}: {at + 1} of {len(shapes)} shapes", end="", file=sys.stderr, flush=True)
        rng = np.random.default_rng((seed, m, n, k))
        patterns = reference.random_patterns(scheme, rng, n, k)
        layer = _layer(scheme, phase, n, k, device, artifact)
        layer.set_patterns(patterns)
        for case in CASES:
            _run(report, scheme, layer, patterns, case, rng, m, n, k)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return report


def _allowed(scheme: Scheme, artifact: Artifact, sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that the scheme requires, and whose sums can't overflow, with all parts of the weight's features."""
    parts = scheme.output.half[1] if scheme.output.half else 1  # features of the weight for one of y
    limit = artifact.manifest.max_k
    return [
        (n * parts, k)
        for n, k in sizes
        if scheme.violated(n * parts, k) is None and free_sizes(scheme, k) is not None and (limit is None or k <= limit)
    ]


def _tokens(scheme: Scheme, phase: str, n: int, k: int, device: torch.device, artifact: Artifact) -> tuple[int, ...]:
    """Numbers of tokens: below, at and beyond every tile."""
    several = len(_layer(scheme, phase, n, k, device, artifact).kernel.variants(k)) > 1
    return TOKENS if several else (1, 2, 3, 9, 83)


def _layer(scheme: Scheme, phase: str, n: int, k: int, device: torch.device, artifact: Artifact) -> QuantLinear:
    bias = any(t.role == "bias" for t in scheme.output.tensors)
    return QuantLinear(scheme, k, n, bias=bias, device=device, artifact=artifact, phase=phase)


def _run(report: Report, scheme: Scheme, layer: QuantLinear, patterns, case: str, rng, m: int, n: int, k: int) -> None:
    """One case through every kernel of the artifact, whichever the layer would choose."""
    x = scheme.output.dtype.round(_input(case, rng, m, k))
    added = {t.name: t.dtype.encode(rng.standard_normal((m, n))) for t in scheme.output.tensors if t.role == "residual"}
    given, manifest = {**patterns, **added}, layer.manifest
    expected = reference.linear(scheme, x, given, n, phase=layer.phase, precision=manifest.precision)
    tokens = torch.from_numpy(x).to(layer.dtype).to(layer.device)
    residual = next((_as_tensor(scheme.tensor(name), bits, layer.device) for name, bits in added.items()), None)
    variants = layer.kernel.variants(k)
    for name in variants:
        y = torch.full((m, layer.width), float("nan"), dtype=layer.dtype, device=layer.device)
        layer.run_into(tokens, y, variant=name, residual=residual)
        label = ", ".join([*filter(None, [layer.phase]), case, *([name] if len(variants) > 1 else [])])
        _compare(report, scheme, patterns, label, k, y.double().cpu().numpy(), expected)


def _as_tensor(declared: Tensor, bits: np.ndarray, device: torch.device) -> torch.Tensor:
    kind = torch_dtype(declared.dtype)
    assert kind is not None, "kernels add residuals of 16 or 32 bits"
    return torch.from_numpy(declared.dtype.decode(bits)).to(kind).to(device)


def _compare(
    report: Report, scheme: Scheme, patterns, case: str, k: int, found: np.ndarray, expected: reference.Result
) -> None:
    m, n = found.shape
    report.cases += 1
    error = np.abs(found - expected.y)
    with np.errstate(invalid="ignore"):
        ratio = np.where(np.isnan(expected.y) | (found == expected.y), 0.0, error / expected.bound)
    overflow = np.isinf(found) & (np.sign(found) * expected.y + expected.bound >= scheme.output.dtype.max)
    ratio = np.where(overflow, 0.0, np.where(np.isnan(ratio), np.inf, ratio))
    report.worst = max(report.worst, float(ratio.max(initial=0.0)))
    if (ratio > 1).any():
        row, column = np.unravel_index(int(ratio.argmax()), ratio.shape)
        report.failures.append(
            Failure(case, m, n, k, (int(row), int(column)), float(expected.y[row, column]), float(found[row, column]),
                    float(expected.bound[row, column]), _codes(scheme, patterns, int(column)))
        )  # fmt: skip


def _input(case: str, rng: np.random.Generator, m: int, k: int) -> np.ndarray:
    if case == "one-hot":
        return np.eye(k)[rng.integers(0, k, m)]
    if case == "integers":
        return rng.integers(-4, 5, (m, k)).astype(float)
    if case == "zero":
        return np.zeros((m, k))
    x = rng.standard_normal((m, k))
    if case == "NaN row" and m > 1:
        x[m // 2] = np.nan
    return x


def _codes(scheme: Scheme, patterns, column: int) -> str:
    """The first elements of every weight tensor's row for one output feature (with parts, of the first)."""
    parts = []
    for t in scheme.weight.loaded:
        row = patterns[t.name]
        row = row[min(column, len(row) - 1)] if t.index and str(t.index[0]) == "n" else row
        values = t.dtype.decode(np.ravel(row)[:8])
        parts.append(f"{t.name} = {', '.join(f'{v:g}' for v in values)}{', …' if np.size(row) > 8 else ''}")
    return "; ".join(parts)
