"""4-bit weights, 16-bit activations on one GPU: qdsl beside its peers, in one process and with the same numbers.

    python benchmarks/w4a16.py --peers DIR --out FILE.json [--append] [--shapes KxN,…] [--tokens M,…] [--only NAME,…]
    python benchmarks/w4a16.py --sweep          # qdsl alone at many M: where is it slower than with more tokens?
    python benchmarks/w4a16.py --granularity    # other groups and the symmetric scheme, beside groups of 128

qdsl comes from prebuilt artifacts (QDSL_ARTIFACTS).  All contenders get the same codes, scales, zero points and x, and
every output is compared with float64 before it is timed (`qdsl.runtime.timing.median_us`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import beside
import numpy as np
import torch
from beside import NAMES, Contender, Problem, Run
from peers import BF16, F16, Stored

import qdsl
from qdsl import results
from qdsl.dtype import dtype
from qdsl.results import Cell
from qdsl.runtime.bench import declared_bytes
from qdsl.runtime.repack import bits_of, torch_dtype
from qdsl.scheme import Scheme

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))  # K, N
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SWEEP = (*range(1, 66), *(p + d for p in (128, 256, 512, 1024, 2048) for d in (-1, 0, 1)), 4095, 4096)
CLIFF = 1.05  # times the next larger M
GRANULARITY = 1.10  # times what the bytes would make of the time with groups of 128


def random_problem(k: int, n: int, groups: int, zero: int | None, most: int, device: torch.device) -> Problem:
    """Random numbers for a shape, that f16 and bf16 both hold; `zero` is the zero point of all, or None for random ones."""
    generator = torch.Generator(device).manual_seed(k * 31 + n)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    q = (random(n, k) * 16).to(torch.uint8)
    s = (random(groups, n) * 0.01 + 0.005).bfloat16().float()
    z = (random(groups, n) * 16).to(torch.uint8).float()
    stored = Stored(dtype("u4"), q, s, dtype("bf16"), z if zero is None else None, constant=float(zero or 0))
    x = torch.randn(most, k, device=device, generator=generator).bfloat16()
    x = torch.where(x.abs() < 2**-14, torch.zeros_like(x), x).to(F16)  # smaller ones would round in f16

    def patterns(scheme: Scheme) -> Mapping[str, np.ndarray]:
        own = {t.role: t for t in scheme.weight.loaded}
        given = {"code": q, "zero": z.to(torch.uint8).t(), "scale": s.to(torch_dtype(own["scale"].dtype)).t()}
        return {t.name: bits_of(given[role].contiguous()) for role, t in own.items()}

    return Problem(patterns, stored, stored.weight, x, x.double() @ stored.weight.t())


def contenders(scheme: Callable[[str], Scheme]) -> list[Contender]:
    """qdsl in both types, then every peer in its types."""
    ours = [beside.qdsl_with(scheme(NAMES[kind])) for kind in (F16, BF16)]
    dense = [beside.dense_of(scheme(NAMES[kind]), kind) for kind in (BF16, F16)]
    theirs = [c for kind in (BF16, F16) for c in beside.peers_of(scheme(NAMES[kind]), (kind,))]
    return [*ours, *dense, *sorted(theirs, key=lambda c: c.name)]


# ---- what single runs show ---------------------------------------------------------------------------------------
def cliffs(cells: Iterable[Cell]) -> list[str]:
    """Every M that is slower than CLIFF times the next larger one, in words."""
    lines: dict[tuple, dict[int, float]] = {}
    for cell in cells:
        if cell.us is not None:
            lines.setdefault((cell.dtype, cell.group, cell.K, cell.N), {})[cell.M] = cell.us
    found = []
    for (kind, _, k, n), times in lines.items():
        order = sorted(times)
        for m, after in pairwise(order):
            if times[m] > CLIFF * times[after]:
                ratio = times[m] / times[after]
                found.append(f"{kind}, K {k}, N {n}: M {m} takes {times[m]:.2f} us, {ratio:.2f} times M {after}")
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
def side_by_side(run: Run) -> None:
    """qdsl and its peers; with --sweep, qdsl alone."""
    args = run.args
    found = contenders(
        lambda act: qdsl.load("awq4", act=act, scale_type=act)
    )  # scales of that type, as peers have them
    if args.sweep:
        found = [c for c in found if c.ours]
    found = beside.chosen(found, args.only)
    missing = beside.missing_pack(found, args.peers)
    for k, n in args.shapes:
        run.shape(found, random_problem(k, n, k // 128, None, max(args.tokens), run.device), missing)
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
            print(f"\n{scheme.bound}", end="")
            given = random_problem(k, n, groups, None if zeros else 8, max(run.args.tokens), run.device)
            run.shape([beside.qdsl_with(scheme)], given, "")
    print("\n".join(["", *granularity(run.cells, schemes)]))


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sweep", action="store_true", help="qdsl alone at many M; report cliffs")
    mode.add_argument("--granularity", action="store_true", help="qdsl alone with other groups; report time over bytes")
    beside.add_arguments(parser, SHAPES)
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (SWEEP if args.sweep else TOKENS)
    beside.check_arguments(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    return beside.main(args, granularities if args.granularity else side_by_side)


if __name__ == "__main__":
    raise SystemExit(main())
