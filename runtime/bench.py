"""How fast a scheme's kernels are on this machine, beside torch's dense product: `qdsl bench`.

    scheme, (K, N), M --random weights, rotated past the caches--> calls --checked against float64--> timed --> Row

The floor of a product is the larger of its declared bytes at the device's bandwidth and its operations at the device's
rate; both are measured here, as everything is by `qdsl.runtime.timing.median_us`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

import qdsl
from qdsl import reference, results
from qdsl.artifact import Artifact
from qdsl.diagnostic import Error
from qdsl.expr import Expr
from qdsl.manifest import Manifest
from qdsl.results import Cell, Results
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.repack import format_of, torch_dtype
from qdsl.runtime.resolve import check_layer
from qdsl.runtime.timing import device_name, how, last_level_cache, median_us, place, rotation, threads, versions
from qdsl.scheme import Scheme, Var
from qdsl.transform import free_sizes

COPIES = 256  # of a weight at most: more of a small one would only take time to make
PRODUCTS = 1 << 34  # beyond as many, a sample of y's rows is compared with float64
WEIGHTS = 1 << 32  # of a layer at most: no model has one as large


# ---- the floor ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ceilings:
    """What a device can do: bytes and operations per second, and where the two numbers are from."""

    bandwidth: float
    operations: float
    source: str

    def floor_us(self, moved: int, operations: int) -> float:
        return max(moved / self.bandwidth, operations / self.operations) * 1e6

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.4g} GB/s and {self.operations / 1e12:.4g} TFLOP/s ({self.source})"


def ceilings(
    scheme: Scheme, device: torch.device, bandwidth: float | None = None, operations: float | None = None
) -> Ceilings:
    """What the device can do for a scheme's product; a number that is None is measured now."""
    given, sources = "given", []
    if bandwidth is None:
        bandwidth, measured = _bandwidth(device)
        sources.append(measured)
    else:
        sources.append(given)
    if operations is None:
        operations, measured = _operations(scheme, device)
        sources.append(measured)
    else:
        sources.append(given)
    return Ceilings(bandwidth, operations, given if sources == [given, given] else ", ".join(sources))


def _bandwidth(device: torch.device) -> tuple[float, str]:
    """Bytes per second of the better of a large copy, read and written, and a large sum, read."""
    size = 1 << 30 if device.type == "cuda" else max(256 << 20, 4 * last_level_cache())
    try:
        source, target = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
    except RuntimeError:
        raise Error(f"no room for two tensors of {size >> 20} MiB; give the ceiling with --bandwidth") from None
    copied = 2e6 * size / median_us(lambda _: target.copy_(source), 1, device)
    summed = 1e6 * size / median_us(lambda _: source.sum(), 1, device)
    return max(copied, summed), f"{'a copy' if copied > summed else 'a sum'} of {size >> 20} MiB"


def _operations(scheme: Scheme, device: torch.device) -> tuple[float, str]:
    """Operations per second of a large product of the scheme's compute type, or else of its activations' type."""
    size = 8192 if device.type == "cuda" else 2048
    for call, kind in _products(scheme, device, size):
        try:
            us = median_us(lambda _, call=call: call(), 1, device)
        except (RuntimeError, NotImplementedError):
            continue  # this device or this torch does not multiply them
        return 2e6 * size**3 / us, f"{size}x{size}x{size} in {kind}"
    raise Error(f"{scheme.bound}: torch multiplies none of its types here; give the ceiling with --flops")


def _products(scheme: Scheme, device: torch.device, size: int) -> Iterator[tuple[Callable[[], object], str]]:
    compute = scheme.compute.operand.name
    if compute == "i8":
        a = torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device)
        yield lambda: torch._int_mm(a, a.t()), "int8"
    if compute == "e4m3" and device.type == "cuda":
        f, one = torch.randn(size, size, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        yield lambda: torch._scaled_mm(f, f.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), "float8_e4m3fn"
    kind = dense_dtype(scheme, device)
    x = torch.randn(size, size, device=device).to(kind)
    yield lambda: functional.linear(x, x), str(kind).removeprefix("torch.")


def dense_dtype(scheme: Scheme, device: torch.device) -> torch.dtype:
    """The type of torch's dense product: the activations', but float32 for float16 on a CPU."""
    kind = torch_dtype(scheme.output.dtype)
    assert kind is not None, "a layer's activations are of a type that torch has"
    return torch.float32 if device.type == "cpu" and kind == torch.float16 else kind


def declared_bytes(scheme: Scheme, m: int, n: int, k: int) -> int:
    """Bytes of every tensor the scheme declares for a product, optional ones left out, with x and y."""
    sizes = {"e": 1, "m": m, "n": n, "k": k, **(free_sizes(scheme, k) or {})}
    bits = 0
    for t in scheme.tensors:
        if t.loaded and not t.optional:
            bits += math.prod(t.shape(sizes, scheme)) * t.dtype.bits
    width = n // scheme.output.half[1] if scheme.output.half else n
    return math.ceil(bits / 8) + m * (k + width) * scheme.output.dtype.bits // 8


# ---- one measurement ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """What was found for one (K, N, M).

    us, dense_us         of the kernel and of torch's dense product
    error, dense_error   |y - exact| / |exact| of each
    moved                the declared bytes
    """

    k: int
    n: int
    m: int
    us: float
    dense_us: float
    error: float
    dense_error: float
    floor_us: float
    moved: int

    @property
    def gb_s(self) -> float:
        return self.moved / self.us * 1e-3

    @property
    def tflop_s(self) -> float:
        return 2 * self.m * self.n * self.k / self.us * 1e-6

    @property
    def share(self) -> float:
        """Of the roofline: 1 is a kernel at the floor."""
        return self.floor_us / self.us

    def __str__(self) -> str:
        return (
            f"{self.k:6} {self.n:6} {self.m:5} {self.us:10.1f} {self.gb_s:8.1f} {self.tflop_s:9.3f} {self.share:9.0%} "
            f"{self.dense_us:10.1f} {self.error:8.1e}"
        )


HEADER = (
    f"{'K':>6} {'N':>6} {'M':>5} {'us':>10} {'GB/s':>8} {'TFLOP/s':>9} {'roofline':>9} {'torch us':>10} {'error':>8}"
)


class Bench:
    """A scheme on a device, ready to be measured.

    kind         "cpu" or "cuda"; archs as for `qdsl.compile`, by default what `QuantLinear` finds
    shapes       (K, N) of the weights, each with all of `tokens`
    bandwidth    bytes per second; `operations` likewise; None: measured here
    phase        of a scheme that has several; by default the first

    Raises Error, before anything is timed, when the scheme, the shapes or the machine will not do.
    """

    def __init__(
        self, scheme: Scheme, kind: str, archs: Sequence[str], shapes: Sequence[tuple[int, int]], tokens: Sequence[int],
        bandwidth: float | None = None, operations: float | None = None, phase: str = "",
    ):  # fmt: skip
        if kind == "cuda" and not torch.cuda.is_available():
            raise Error(
                "measuring CUDA kernels needs a CUDA GPU, and torch sees none; "
                "`--target cpu` measures the same scheme here"
            )
        self.scheme, self.shapes, self.tokens, self.phase = scheme, tuple(shapes), tuple(tokens), phase
        self.device = torch.device(kind)
        self.bias = any(t.role == "bias" and not t.optional for t in scheme.output.tensors)
        for k, n in self.shapes:
            check_layer(scheme, k, n, self.bias, phase)
            if free_sizes(scheme, k) is None:
                raise Error(f"K {k}: no x of so many features can be transformed as {scheme.bound} says; leave it out")
            if k * n > WEIGHTS:
                raise Error(f"K {k}, N {n}: {k * n} weights are more than any layer has; give a shape of one")
        self.artifact: Artifact | None = qdsl.compile(scheme, kind, archs) if archs else None
        self._layer(*self.shapes[0]).prepare()  # what can't be compiled or loaded shows here
        self.ceilings = ceilings(scheme, self.device, bandwidth, operations)

    def __str__(self) -> str:
        phase = self.scheme.phase_of(self.phase)
        about = f"{self.scheme.bound}{phase and f', phase {phase},'} on {place(self.device)}"
        return f"{about}\nfloor: {self.ceilings}"

    def rows(self) -> Iterator[Row]:
        """Measure; raises Error at the first wrong output."""
        with _bar(self.scheme.bound, len(self.shapes) * len(self.tokens)) as bar:
            for k, n in self.shapes:
                try:
                    for row in self._shape(k, n):
                        bar.update()
                        bar.clear()  # for whoever prints the row
                        yield row
                except (MemoryError, torch.OutOfMemoryError):
                    raise Error(f"K {k}, N {n}: too large for the memory of this machine; leave it out") from None

    def as_results(self, rows: Sequence[Row]) -> Results:
        dense = str(dense_dtype(self.scheme, self.device)).removeprefix("torch.")
        method = f"{how(self.device)}; torch is F.linear in {dense}; floor at {self.ceilings}"
        meta = results.meta(device_name(self.device), method, versions(self.device))
        return Results(meta, tuple(cell for row in rows for cell in self._cells(row)))

    def _cells(self, row: Row) -> tuple[Cell, Cell]:
        scheme, group = results.scheme_label(self.scheme, self.phase), self.scheme.params.get("group")
        where = (group, row.k, row.n, row.m, threads(self.device))
        dense = format_of(dense_dtype(self.scheme, self.device))
        return (
            Cell(scheme, str(self.scheme.output.dtype), *where, "qdsl", row.us, row.error, row.floor_us),
            Cell(scheme, str(dense), *where, "torch", row.dense_us, row.dense_error, row.floor_us),
        )

    def _layer(self, k: int, n: int) -> QuantLinear:
        return QuantLinear(self.scheme, k, n, self.bias, self.device, artifact=self.artifact, phase=self.phase)

    def _shape(self, k: int, n: int) -> Iterator[Row]:
        rng = np.random.default_rng((k, n))
        patterns = reference.random_patterns(self.scheme, rng, n, k)
        patterns = {name: p for name, p in patterns.items() if not self.scheme.tensor(name).optional}
        layers = copies_of(self._layer(k, n).set_patterns(patterns))
        exact = torch.from_numpy(np.array(reference.decode_weight(self.scheme, patterns, n, k)))
        dense = exact.to(self.device, dense_dtype(self.scheme, self.device))
        weights = [dense, *(dense.clone() for _ in range(_more_copies(dense.nbytes, self.device)))]
        x = torch.from_numpy(rng.standard_normal((max(self.tokens), k))).to(layers[0].dtype)

        @functools.cache
        def answer(m: int) -> _Answer:
            rows = _looked_at(self.tokens, n, k) if alone else np.arange(m)
            return _answer(own, x[:m].double().numpy(), rows, patterns, exact, layers[0].manifest)

        own = self.scheme.in_phase(self.phase)
        alone = _rows_stand_alone(own)
        for m in self.tokens:
            given, right = x[:m].to(self.device), answer(max(self.tokens) if alone else m)
            y = torch.full((m, layers[0].width), float("nan"), dtype=given.dtype, device=self.device)
            layers[0].run_into(given, y)
            error = right.error_of(y, f"{self.scheme.bound}: wrong output for K {k}, N {n}, M {m}")
            us = median_us(lambda c, given=given: layers[c](given), len(layers), self.device)
            given = given.to(dense.dtype)
            dense_error = right.dense_error_of(functional.linear(given, dense))
            dense_us = median_us(lambda c, given=given: functional.linear(given, weights[c]), len(weights), self.device)
            moved = declared_bytes(own, m, n, k)
            floor = self.ceilings.floor_us(moved, 2 * m * n * k)
            yield Row(k, n, m, us, dense_us, error, dense_error, floor, moved)


def copies_of(layer: QuantLinear) -> list[QuantLinear]:
    """A layer and as many more of its kind as it takes for none to stay in a cache."""
    size = sum(b.nbytes for b in layer.buffers())
    return [layer, *(copy.deepcopy(layer) for _ in range(_more_copies(size, layer.device)))]


def _more_copies(size: int, device: torch.device) -> int:
    return min(COPIES - 1, rotation(device) // max(size, 1) + 1)


def _bar(what: str, total: int):
    """A bar on stderr, if that is a terminal and the work takes longer than a second."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=what, delay=1, leave=False, disable=None)


# ---- the right answer --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Answer:
    """y in float64 for some rows of x, ascending, with the bound that `qdsl.reference.linear` derives; and x·Wᵀ."""

    scheme: Scheme
    rows: np.ndarray
    y: np.ndarray
    bound: np.ndarray
    dense: np.ndarray

    def error_of(self, y: torch.Tensor, wrong_output: str) -> float:
        """|y - exact| / |exact|; raises Error if an element is further away than a right kernel's can be."""
        found, count = y.double().cpu().numpy(), int((self.rows < len(y)).sum())
        rows, exact, bound = self.rows[:count], self.y[:count], self.bound[:count]
        wrong = np.isnan(found)  # what no kernel wrote, and in every row
        with np.errstate(invalid="ignore"):
            overflow = np.isinf(found[rows]) & (np.abs(exact) + bound >= self.scheme.output.dtype.max)
            wrong[rows] |= ~(np.abs(found[rows] - exact) <= bound) & ~overflow
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            at = np.searchsorted(rows, i)
            should = "was not written"
            if at < count and rows[at] == i and not np.isnan(found[i, j]):
                should = f"is {found[i, j]:.8g}, should be {exact[at, j]:.8g} within {bound[at, j]:.2g}"
            raise Error(f"{wrong_output}: y[{i}, {j}] {should} ({wrong.sum()} are wrong); `qdsl verify` looks closer")
        return _relative(found[rows], exact)

    def dense_error_of(self, y: torch.Tensor) -> float:
        count = int((self.rows < len(y)).sum())
        return _relative(y.double().cpu().numpy()[self.rows[:count]], self.dense[:count])


def _answer(
    scheme: Scheme,
    x: np.ndarray,
    rows: np.ndarray,
    patterns: reference.Patterns,
    weight: torch.Tensor,
    manifest: Manifest,
) -> _Answer:
    found = reference.linear(scheme, x[rows], patterns, len(weight), precision=manifest.precision)
    return _Answer(scheme, rows, found.y, found.bound, x[rows] @ weight.numpy().T)


def _rows_stand_alone(scheme: Scheme) -> bool:
    """Whether a row of y depends on its own row of x alone."""
    computed = [t for a in scheme.activations for t in a.operand.tensors if isinstance(t.value, Expr)]
    return all(Var("m") in t.index for t in computed)


def _looked_at(tokens: Sequence[int], n: int, k: int) -> np.ndarray:
    """The rows of y to compare, ascending: all, or where that is long, the last of each M and some of every part."""
    most, room = max(tokens), max(32, PRODUCTS // (n * k))
    if most <= room:
        return np.arange(most)
    return np.unique([*(m - 1 for m in tokens), *np.linspace(0, most - 1, room, dtype=int)])


def _relative(found: np.ndarray, exact: np.ndarray) -> float:
    """|found - exact| / |exact| in the 2-norm, over what is finite."""
    finite = np.isfinite(found)
    size = float(np.linalg.norm(exact[finite]))
    return float(np.linalg.norm((found - exact)[finite])) / size if size else 0.0
