"""4-bit weights, 16-bit activations on one GPU: qdsl beside its peers, in one process and with the same numbers.

    python benchmarks/w4a16.py --peers DIR --out FILE.json [--append] [--shapes KxN,…] [--tokens M,…] [--only NAME,…]
    python benchmarks/w4a16.py --sweep          # qdsl alone at many M: where is it slower than with more tokens?
    python benchmarks/w4a16.py --granularity    # other groups and the symmetric scheme, beside groups of 128

qdsl comes from prebuilt artifacts (QDSL_ARTIFACTS).  All contenders get the same codes, scales, zero points and x, and
every output is compared with float64 before it is timed (`qdsl.runtime.timing.median_us`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from peers import BF16, F16, PEERS, Call, Prepare, copies, load, weight

import qdsl
from qdsl import cli, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results
from qdsl.runtime import QuantLinear
from qdsl.runtime.bench import Ceilings, copies_of, declared_bytes
from qdsl.runtime.repack import bits_of, torch_dtype
from qdsl.runtime.timing import device_name, how, median_us, versions
from qdsl.scheme import Scheme

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))  # K, N
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SWEEP = (*range(1, 66), *(p + d for p in (128, 256, 512, 1024, 2048) for d in (-1, 0, 1)), 4095, 4096)
H200 = Ceilings(4.3e12, 890e12, "an H200, measured: bytes read, dense 16-bit operations")
CLIFF = 1.05  # times the next larger M
GRANULARITY = 1.10  # times what the bytes would make of the time with groups of 128
NAMES = {F16: "f16", BF16: "bf16"}
SPELLED = {F16: "fp16", BF16: "bf16"}  # in the names of peers
# Relative errors beyond which an output is wrong: of ours, two roundings to its type; peers round as they like.
ALLOWED, ALLOWED_PEER = {F16: 2 * 2.0**-11, BF16: 2 * 2.0**-8}, 2e-2


@dataclass(frozen=True)
class Contender:
    """A way to multiply by a problem's weight; `most` tokens at a time, `ours` if it has to be right."""

    name: str
    dtype: torch.dtype
    prepare: Prepare
    scheme: Scheme
    most: int | None = None

    @property
    def ours(self) -> bool:
        return self.name == "qdsl"

    @property
    def label(self) -> str:
        """Of its column, and for --only."""
        return f"qdsl_{SPELLED[self.dtype]}" if self.ours else self.name

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Problem:
    """A weight of codes q [K, N], scales s and zero points z [G, N], with values that f16 and bf16 both hold; x likewise."""

    q: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor
    x: torch.Tensor  # [most tokens, K], f16
    y: torch.Tensor  # x times the exact weight, float64

    @property
    def shape(self) -> tuple[int, int]:
        k, n = self.q.shape
        return k, n


def random_problem(k: int, n: int, groups: int, zero: int | None, most: int, device: torch.device) -> Problem:
    """Random numbers for a shape; `zero` is the zero point of every group, or None for random ones."""
    generator = torch.Generator(device).manual_seed(k * 31 + n)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    q = (random(k, n) * 16).to(torch.uint8)
    s = (random(groups, n) * 0.01 + 0.005).bfloat16().float()
    z = (random(groups, n) * 16).to(torch.uint8)
    if zero is not None:
        z.fill_(zero)
    x = torch.randn(most, k, device=device, generator=generator).bfloat16()
    x = torch.where(x.abs() < 2**-14, torch.zeros_like(x), x).to(F16)  # smaller ones would round in f16
    return Problem(q, s, z, x, x.double() @ weight(q, s, z))


# ---- contenders --------------------------------------------------------------------------------------------------
def prepare_qdsl(scheme: Scheme) -> Prepare:
    """qdsl as a peer: the layout of its kernel, from the same numbers."""

    def prepare(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> Call:
        k, n = q.shape
        layer = QuantLinear(scheme, k, n, device=q.device, dtype=dtype, compile="never" if q.is_cuda else "auto")
        own = {t.role: t for t in layer.scheme.weight.loaded}
        stored = {"code": q, "zero": z, "scale": s.to(torch_dtype(own["scale"].dtype))}
        layer.set_patterns({t.name: bits_of(stored[role].t().contiguous()) for role, t in own.items()})
        layers = copies_of(layer)
        return lambda x, i: layers[i % len(layers)](x)

    return prepare


def contenders(scheme: Callable[[str], Scheme]) -> list[Contender]:
    """qdsl in both types, then every peer in its types."""
    found = [
        Contender("qdsl", dtype, prepare_qdsl(scheme(NAMES[dtype])), scheme(NAMES[dtype])) for dtype in (F16, BF16)
    ]
    for name, peer in PEERS.items():
        for dtype in peer.dtypes:
            declared = scheme(NAMES[dtype])
            found.append(Contender(f"{name}_{SPELLED[dtype]}", dtype, peer.prepare, declared, peer.most))
    return found


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


def prepared(found: Iterable[Contender], given: Problem, missing: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of those that can be had, and why the others can't.  `missing` is why the pack of peers can't, if so."""
    calls, absent = {}, {}
    for contender in found:
        family = contender.name.rpartition("_")[0]
        if missing and family in PEERS and PEERS[family].needs_pack:
            absent[contender.label] = missing
            continue
        try:
            calls[contender.label] = contender.prepare(given.q, given.s, given.z, contender.dtype)
        except Exception as problem:  # whatever a foreign library raises
            if contender.ours:
                raise
            absent[contender.label] = _reason(problem)
            _context_is_alive(contender, given.q.device)
    return calls, absent


def _reason(problem: BaseException) -> str:
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0][:120]}" if text else type(problem).__name__


# ---- measuring ---------------------------------------------------------------------------------------------------
def measured(contender: Contender, call: Call, given: Problem, m: int) -> tuple[float, float]:
    """(µs, relative error); raises Error for a wrong output, and whatever the call raises."""
    k, n = given.shape
    x, exact = given.x[:m].to(contender.dtype), given.y[:m]
    error = ((call(x, 0).double() - exact).norm() / exact.norm()).item()
    allowed = ALLOWED[contender.dtype] if contender.ours else ALLOWED_PEER
    if not error <= allowed:
        raise Error(f"wrong output: relative error {error:.1e}, allowed is {allowed:.1e}")
    return median_us(lambda i: call(x, i), copies(k, n), x.device), error


def measure(
    found: Sequence[Contender], given: Problem, tokens: Sequence[int], missing: str, ceilings: Ceilings
) -> tuple[list[Cell], dict[str, str]]:
    """The cells of one shape, printed line by line, and who could not run, why."""
    k, n = given.shape
    calls, absent = prepared(found, given, missing)
    cells = []
    print(f"\nK {k}, N {n}, us\n{'M':>5} {'floor':>9}" + "".join(f"{c.label:>14}" for c in found), flush=True)
    for m in tokens:
        line = []
        for contender in found:
            floor = ceilings.floor_us(declared_bytes(contender.scheme, m, n, k), 2 * m * n * k)
            us = error = None
            if contender.label in calls and m <= (contender.most or m):
                try:
                    us, error = measured(contender, calls[contender.label], given, m)
                except Exception as problem:  # whatever a foreign library raises
                    absent.setdefault(contender.label, f"from M = {m} on: {_reason(problem)}")
                    del calls[contender.label]
                    _context_is_alive(contender, given.q.device)
            line.append(f"{us:14.2f}" if us else f"{'–':>14}")
            label, group = results.scheme_label(contender.scheme), contender.scheme.params.get("group")
            dtype = NAMES[contender.dtype]
            cells.append(Cell(label, dtype, group, k, n, m, None, contender.name, us, error, floor))
        print(f"{m:5} {floor:9.2f}" + "".join(line), flush=True)
    for label, reason in absent.items():
        print(f"  {label} absent: {reason}")
    for contender in found:
        if contender.most and max(tokens) > contender.most:
            print(f"  {contender.label} is not run beyond M = {contender.most}")
    return cells, absent


def _context_is_alive(contender: Contender, device: torch.device) -> None:
    """Raises Error if what a contender did makes every later call of this process fail."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        raise Error(f"{contender}: {_reason(problem)}; nothing runs after that, leave it out with --only") from None


# ---- what single runs show ---------------------------------------------------------------------------------------
def cliffs(cells: Iterable[Cell]) -> list[str]:
    """Every M that is slower than CLIFF times the next larger one, in words."""
    lines: dict[tuple, dict[int, float]] = {}
    for cell in cells:
        if cell.us is not None:
            lines.setdefault((cell.dtype, cell.group, cell.K, cell.N), {})[cell.M] = cell.us
    found = []
    for (dtype, _, k, n), times in lines.items():
        order = sorted(times)
        for m, after in pairwise(order):
            if times[m] > CLIFF * times[after]:
                ratio = times[m] / times[after]
                found.append(f"{dtype}, K {k}, N {n}: M {m} takes {times[m]:.2f} us, {ratio:.2f} times M {after}")
    return found


def granularity(cells: Sequence[Cell], schemes: Sequence[Scheme]) -> list[str]:
    """A table: time over that of groups of 128, over the same of the bytes; the first scheme is that of groups of 128."""
    by_place = {(results.scheme_label(s), s.params["group"]): s for s in schemes}
    first = results.scheme_label(schemes[0]), schemes[0].params["group"]
    base = {(c.K, c.N, c.M): c for c in cells if (c.scheme, c.group) == first}
    rows = [f"{'scheme':36}{'group':>6}{'K':>7}{'N':>7}{'M':>6}{'us':>10}{'time':>7}{'bytes':>7}{'ratio':>7}"]
    for c in cells:
        beside = base.get((c.K, c.N, c.M))
        if (c.scheme, c.group) == first or c.us is None or beside is None or beside.us is None:
            continue
        time = c.us / beside.us
        moved = declared_bytes(by_place[c.scheme, c.group], c.M, c.N, c.K) / declared_bytes(schemes[0], c.M, c.N, c.K)
        verdict = "" if time / moved <= GRANULARITY else "  missed"
        rows.append(
            f"{c.scheme:36}{c.group:>6}{c.K:7}{c.N:7}{c.M:6}{c.us:10.2f}{time:7.2f}{moved:7.2f}{time / moved:7.2f}{verdict}"
        )
    return rows


# ---- runs --------------------------------------------------------------------------------------------------------
class Run:
    """One run: its cells, in the file as soon as a shape is done."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        method = f"{how(device)}; floor at {H200}"
        self.meta = results.meta(device_name(device), method, versions(device), args.commit)
        self.known = Results(self.meta, ())
        if args.out and args.append and args.out.exists():  # runs that disagree are refused before any time is spent
            self.known = results.joined(results.read(args.out), self.meta, ())
        self.cells: list[Cell] = []
        self.failed = False

    def shape(self, found: Sequence[Contender], given: Problem, missing: str) -> None:
        cells, absent = measure(found, given, self.args.tokens, missing, H200)
        self.cells += cells
        self.failed |= any(c.label in absent for c in found if c.ours)
        if self.args.out:
            self.known = results.joined(self.known, self.meta, cells)
            results.write(self.args.out, self.known)


def side_by_side(run: Run) -> None:
    """qdsl and its peers; with --sweep, qdsl alone."""
    args = run.args
    found = contenders(
        lambda act: qdsl.load("awq4", act=act, scale_type=act)
    )  # scales of that type, as peers have them
    if args.sweep:
        found = [c for c in found if c.ours]
    found, missing = chosen(found, args.only), ""
    if any(PEERS[family].needs_pack for c in found if (family := c.name.rpartition("_")[0]) in PEERS):
        try:
            load(args.peers)
        except (Error, OSError, RuntimeError) as problem:
            missing = str(problem)
    for k, n in args.shapes:
        given = random_problem(k, n, k // 128, None, max(args.tokens), run.device)
        run.shape(found, given, missing)
        del given
        _free(run.device)
    if args.sweep:
        slow = cliffs(run.cells)
        print("\n".join([f"\n{len(slow)} cliffs: M slower than {CLIFF} times the next larger", *slow]))


def granularities(run: Run) -> None:
    """Groups of 128, 32 and 64, one group, and the symmetric scheme; f16."""
    schemes = [*(qdsl.load("awq4", act="f16", group=g) for g in (128, 32, 64, "k")), qdsl.load("gptq_sym", act="f16")]
    for k, n in run.args.shapes:
        for scheme in schemes:
            group, zeros = scheme.params["group"], any(t.role == "zero" for t in scheme.weight.loaded)
            groups = 1 if group == "k" else k // int(group)
            given = random_problem(k, n, groups, None if zeros else 8, max(run.args.tokens), run.device)
            print(f"\n{scheme.bound}", end="")
            run.shape([Contender("qdsl", F16, prepare_qdsl(scheme), scheme)], given, "")
            del given
            _free(run.device)
    print("\n".join(["", *granularity(run.cells, schemes)]))


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sweep", action="store_true", help="qdsl alone at many M; report cliffs")
    mode.add_argument("--granularity", action="store_true", help="qdsl alone with other groups; report time over bytes")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="holds vllm_C.so; humming comes from PYTHONPATH")
    parser.add_argument("--shapes", type=cli.shapes, default=SHAPES, metavar="KxN,…")
    parser.add_argument("--tokens", type=cli.tokens, metavar="M,…")
    parser.add_argument("--only", metavar="NAME,…", help="contenders: qdsl, qdsl_bf16, cublas, marlin_fp16, …")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the cells here, shape by shape")
    parser.add_argument("--append", action="store_true", help="keep the cells that --out holds, if the run was alike")
    parser.add_argument("--commit", default="", help="of the sources, where they are no git checkout")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (SWEEP if args.sweep else TOKENS)
    if any(k % 128 or n % 64 for k, n in args.shapes):
        parser.error("--shapes: the contenders take K that are multiples of 128 and N that are multiples of 64")
    if args.out and not args.commit and results.commit() == "unknown":
        parser.error("these sources are no git checkout; say with --commit what they are")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    try:
        if args.out:
            results.writable(args.out)
        if not torch.cuda.is_available():
            raise Error("this needs a CUDA GPU, and torch sees none; `qdsl bench` measures on a CPU")
        run = Run(args, torch.device("cuda"))
        print(f"{run.meta.device}, {run.meta.commit}, {', '.join(f'{k} {v}' for k, v in run.meta.versions.items())}")
        (granularities if args.granularity else side_by_side)(run)
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if run.failed:
        print("error: qdsl did not run, or gave a wrong output; see above", file=sys.stderr)
    return int(run.failed)


if __name__ == "__main__":
    raise SystemExit(main())
