"""Contenders side by side: the same numbers for all, every output compared with float64, then timed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from peers import BF16, F16, PEERS, Call, Stored, copies, dense, load

from qdsl import cli, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results
from qdsl.runtime import QuantLinear
from qdsl.runtime.bench import Ceilings, copies_of, declared_bytes
from qdsl.runtime.timing import Timed, device_name, how, medians_by_turns, versions
from qdsl.scheme import Scheme

H200 = Ceilings(4.3e12, 890e12, "an H200, measured: bytes read, dense 16-bit operations")
SLOW_S = 0.02  # what takes longer is timed with one copy of the weights: no cache makes a difference to it
NAMES = {F16: "f16", BF16: "bf16"}
SPELLED = {F16: "fp16", BF16: "bf16"}  # in the names of peers
# Relative errors beyond which an output is wrong: of ours, two roundings to its type; peers round as they like.
ALLOWED, ALLOWED_PEER = {F16: 2 * 2.0**-11, BF16: 2 * 2.0**-8}, 2e-2


@dataclass(frozen=True, eq=False)
class Problem:
    """A weight and an input; compared by identity.

    patterns   a scheme's bit patterns of it, by name
    stored     the same for peers; None where it has a form that none of them knows
    weight     [N, K], float64
    x          [most tokens, K], f16 or bf16
    y          x times the exact weight, float64
    answers    other right outputs, by name, for contenders that take another x or give another y
    """

    patterns: Callable[[Scheme], Mapping[str, np.ndarray]]
    stored: Stored | None
    weight: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    answers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """K, N."""
        n, k = self.weight.shape
        return k, n

    def answer(self, name: str) -> torch.Tensor:
        return self.answers[name] if name else self.y


@dataclass(frozen=True)
class Contender:
    """A way to multiply by a problem's weight, `least` to `most` tokens at a time; `ours` if it has to be right.

    answer   which of the problem's outputs is the right one; "" is y
    """

    name: str
    dtype: torch.dtype
    prepare: Callable[[Problem, torch.dtype], Call]
    scheme: Scheme
    most: int | None = None
    least: int = 1
    answer: str = ""

    @property
    def ours(self) -> bool:
        return self.name.partition("_")[0] == "qdsl"

    @property
    def label(self) -> str:
        """Of its column, and for --only."""
        return f"{self.name}_{SPELLED[self.dtype]}" if self.ours else self.name

    def takes(self, m: int) -> bool:
        return self.least <= m <= (self.most or m)

    def __str__(self) -> str:
        return self.label


def qdsl_with(scheme: Scheme) -> Contender:
    """Ours, from prebuilt artifacts on a GPU."""

    def prepare(given: Problem, dtype: torch.dtype) -> Call:
        layers = layers_of(scheme, given, dtype)
        return lambda x, i: layers[i % len(layers)](x)

    return Contender("qdsl", dtype_of(scheme), prepare, scheme)


def dtype_of(scheme: Scheme) -> torch.dtype:
    """The type of its activations."""
    return next(kind for kind, name in NAMES.items() if name == str(scheme.output.dtype))


def layers_of(scheme: Scheme, given: Problem, dtype: torch.dtype) -> list[QuantLinear]:
    """Layers with a problem's weight, as many as no cache holds."""
    (k, n), device = given.shape, given.weight.device
    layer = QuantLinear(scheme, k, n, device=device, dtype=dtype, compile="never" if device.type == "cuda" else "auto")
    return copies_of(layer.set_patterns(given.patterns(layer.scheme)))


def peers_of(scheme: Scheme, dtypes: Sequence[torch.dtype]) -> list[Contender]:
    """Every peer in those of the types that it takes."""

    def prepare(name: str) -> Callable[[Problem, torch.dtype], Call]:
        def prepared(given: Problem, dtype: torch.dtype) -> Call:
            if given.stored is None:
                raise Error("takes no weights of this form")
            return PEERS[name].prepare(given.stored, dtype)

        return prepared

    return [
        Contender(f"{name}_{SPELLED[dtype]}", dtype, prepare(name), scheme, peer.most)
        for name, peer in PEERS.items()
        for dtype in peer.dtypes
        if dtype in dtypes
    ]


def dense_of(scheme: Scheme, dtype: torch.dtype) -> Contender:
    """The dense product with the dequantized weight."""
    return Contender(f"cublas_{SPELLED[dtype]}", dtype, lambda given, kind: dense(given.weight, kind), scheme)


def chosen(found: Sequence[Contender], only: str | None) -> list[Contender]:
    """Those named, by label or without the type; raises Error for a name that nobody has."""
    if only is None:
        return list(found)
    wanted = [name.strip() for name in only.split(",")]
    labels = [c.label for c in found]
    for name in wanted:
        if name not in labels and name not in {label.rpartition("_")[0] for label in labels}:
            raise Error(f"--only: no contender {name!r}; there are {', '.join(labels)}")
    return [c for c in found if c.label in wanted or c.label.rpartition("_")[0] in wanted]


def missing_pack(found: Iterable[Contender], pack: Path | None) -> str:
    """Loads the operators that some of the contenders need, and says why that failed, if it did."""
    if any(PEERS[family].needs_pack for c in found if (family := c.name.rpartition("_")[0]) in PEERS):
        try:
            load(pack)
        except (Error, OSError, RuntimeError) as problem:
            return str(problem)
    return ""


def prepared(found: Iterable[Contender], given: Problem, missing: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of those that can be had, and why the others can't.  `missing` is why the pack of peers can't, if so."""
    calls, absent = {}, {}
    for contender in found:
        family = contender.name.rpartition("_")[0]
        if missing and family in PEERS and PEERS[family].needs_pack:
            absent[contender.label] = missing
            continue
        try:
            calls[contender.label] = contender.prepare(given, contender.dtype)
        except Exception as problem:  # whatever a foreign library raises
            if contender.ours:
                raise
            absent[contender.label] = _reason(problem)
            _context_is_alive(contender, given.x.device)
    return calls, absent


def _reason(problem: BaseException) -> str:
    text = str(problem).strip().splitlines()
    kind = "" if isinstance(problem, Error) else f"{type(problem).__name__}: "
    return f"{kind}{text[0][:120]}" if text else type(problem).__name__


# ---- measuring ---------------------------------------------------------------------------------------------------
def ready(contender: Contender, call: Call, given: Problem, m: int) -> tuple[Timed, float]:
    """A call to be timed, and its relative error; raises Error for a wrong output, and whatever the call raises."""
    k, n = given.shape
    x, exact = given.x[:m].to(contender.dtype), given.answer(contender.answer)[:m]
    error = ((call(x, 0).double() - exact).norm() / exact.norm()).item()
    allowed = ALLOWED[contender.dtype] if contender.ours else ALLOWED_PEER
    if not error <= allowed:
        raise Error(f"wrong output: relative error {error:.1e}, allowed is {allowed:.1e}")
    slow = _seconds(lambda: call(x, 0), x.device) > SLOW_S
    count = 1 if slow else copies(k, n, contender.scheme.code.dtype.bits)
    return Timed(lambda i: call(x, i), count, x.device), error


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of wall clock, once."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    found: Sequence[Contender], given: Problem, tokens: Sequence[int], missing: str, ceilings: Ceilings
) -> tuple[list[Cell], dict[str, str]]:
    """The cells of one shape, printed line by line, and who could not run, why."""
    k, n = given.shape
    calls, absent = prepared(found, given, missing)
    cells, width = [], {c.label: max(14, len(c.label) + 2) for c in found}
    head = "".join(f"{c.label:>{width[c.label]}}" for c in found)
    print(f"\nK {k}, N {n}, us\n{'M':>5} {'floor':>9}{head}", flush=True)
    for m in tokens:
        timed: dict[str, Timed] = {}
        errors: dict[str, float] = {}
        for contender in found:
            label = contender.label
            if label in calls and contender.takes(m):
                try:
                    timed[label], errors[label] = ready(contender, calls[label], given, m)
                except Exception as problem:  # whatever a foreign library raises
                    absent.setdefault(label, f"from M = {m} on: {_reason(problem)}")
                    del calls[label]
                    _context_is_alive(contender, given.x.device)
        times, line = dict(zip(timed, medians_by_turns(list(timed.values())))), []
        for contender in found:
            floor = ceilings.floor_us(declared_bytes(contender.scheme, m, n, k), 2 * m * n * k)
            us, error = times.get(contender.label), errors.get(contender.label)
            line.append(f"{f'{us:.2f}' if us else '–':>{width[contender.label]}}")
            label, group = results.scheme_label(contender.scheme), contender.scheme.params.get("group")
            dtype = NAMES[contender.dtype]
            cells.append(Cell(label, dtype, group, k, n, m, None, contender.name, us, error, floor))
        print(f"{m:5} {floor:9.2f}" + "".join(line), flush=True)
    for label, reason in absent.items():
        print(f"  {label} absent: {reason}")
    for contender in found:
        if contender.most and max(tokens) > contender.most:
            print(f"  {contender.label} is not run beyond M = {contender.most}")
        if contender.least > min(tokens):
            print(f"  {contender.label} is not run below M = {contender.least}")
    return cells, absent


def _context_is_alive(contender: Contender, device: torch.device) -> None:
    """Raises Error if what a contender did makes every later call of this process fail."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        raise Error(f"{contender}: {_reason(problem)}; nothing runs after that, leave it out with --only") from None


# ---- runs --------------------------------------------------------------------------------------------------------
class Run:
    """One run: its cells, in the file as soon as a shape is done."""

    def __init__(self, args: argparse.Namespace, device: torch.device, ceilings: Ceilings = H200):
        self.args, self.device, self.ceilings = args, device, ceilings
        method = f"{how(device)}; contenders by turns; floor at {ceilings}"
        self.meta = results.meta(device_name(device), method, versions(device), args.commit)
        self.known = Results(self.meta, ())
        if args.out and args.append and args.out.exists():  # runs that disagree are refused before any time is spent
            self.known = results.joined(results.read(args.out), self.meta, ())
        self.cells: list[Cell] = []
        self.failed = False
        print(f"{self.meta.device}, {self.meta.commit}, {', '.join(f'{k} {v}' for k, v in self.meta.versions.items())}")

    def shape(self, found: Sequence[Contender], given: Problem, missing: str) -> None:
        cells, absent = measure(found, given, self.args.tokens, missing, self.ceilings)
        self.cells += cells
        self.failed |= any(c.label in absent for c in found if c.ours)
        if self.args.out:
            self.known = results.joined(self.known, self.meta, cells)
            results.write(self.args.out, self.known)
        del given
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser, shapes: Sequence[tuple[int, int]]) -> None:
    """What every run takes."""
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="holds vllm_C.so and the like; humming comes from PYTHONPATH"
    )
    parser.add_argument("--shapes", type=cli.shapes, default=shapes, metavar="KxN,…")
    parser.add_argument("--tokens", type=cli.tokens, metavar="M,…")
    parser.add_argument("--only", metavar="NAME,…", help="contenders: qdsl, qdsl_bf16, cublas, marlin_fp16, …")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the cells here, shape by shape")
    parser.add_argument("--append", action="store_true", help="keep the cells that --out holds, if the run was alike")
    parser.add_argument("--commit", default="", help="of the sources, where they are no git checkout")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if any(k % 128 or n % 64 for k, n in args.shapes):
        parser.error("--shapes: the contenders take K that are multiples of 128 and N that are multiples of 64")
    if args.out and not args.commit and results.commit() == "unknown":
        parser.error("these sources are no git checkout; say with --commit what they are")


def main(args: argparse.Namespace, work: Callable[[Run], None], ceilings: Ceilings = H200) -> int:
    """The exit status of a run of some work, with what went wrong on stderr."""
    try:
        if args.out:
            results.writable(args.out)
        if not torch.cuda.is_available():
            raise Error("this needs a CUDA GPU, and torch sees none; `qdsl bench` measures on a CPU")
        run = Run(args, torch.device("cuda"), ceilings)
        work(run)
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if run.failed:
        print("error: qdsl did not run, or gave a wrong output; see above", file=sys.stderr)
    return int(run.failed)
