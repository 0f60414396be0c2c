"""Results against the goals: `python benchmarks/goals.py [FILE.json] [--weight-only | --a8 | --cpu] [--readme] [--plot FILE.png]`.

Of `w4a16.py`, a row for every (type, K, N, M): ours, the best peer, the goal, and whether it is met.  A cell in f16 is compared
with the better of a peer's two types, one in bf16 with the peer's own bf16.  Of `weight_only.py` and `a8.py`, a row for every
scheme and shape.  `--readme` puts the table into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qdsl import plot, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results

HERE = Path(__file__).parent
README = HERE / "README.md"
RESULTS = HERE / "results" / "w4a16-h200.json"
BEGIN, END = "<!-- goals: written by goals.py -->", "<!-- end of goals -->"
WEIGHT_ONLY = HERE / "results" / "weight-only-h200.json"
WEIGHT_ONLY_MARKS = "<!-- weight-only: written by goals.py -->", "<!-- end of weight-only -->"
A8 = HERE / "results" / "a8-h200.json"
A8_MARKS = "<!-- a8: written by goals.py -->", "<!-- end of a8 -->"
CPU = HERE / "results" / "cpu.json"
CPU_MARKS = "<!-- cpu: written by goals.py -->", "<!-- end of cpu -->"
WITH = "_with_quantization"  # in the names of contenders that take x in 16 bits
NO_PRODUCT = ("torch_int_mm",)  # without scales: shown nowhere
W4A8_US = {1: 12.0, 64: 15.0, 256: 34.0, 1024: 125.0}  # for 8192x8192, quantization included
FOUR_BIT = ("marlin", "machete", "humming", "tinygemm")
FAST = FOUR_BIT[:3]  # without one of these no goal says much


@dataclass(frozen=True)
class Verdict:
    """One row: our cell, the best of the peers that the goal looks at, and the goal in µs (None: no such goal, or no peer)."""

    cell: Cell
    best: Cell | None
    goal: float | None

    @property
    def word(self) -> str:
        if self.goal is None or self.cell.us is None:
            return "–"
        return "met" if self.cell.us <= self.goal else "missed"

    def __str__(self) -> str:
        c, best, goal = self.cell, "–", "–" if self.goal is None else f"{self.goal:.1f}"
        if self.best is not None:
            best = f"{self.best.us:.1f} {self.best.contender}"
        ours, share = ("–", "–") if c.us is None else (f"{c.us:.1f}", f"{c.floor_us / c.us:.0%}")
        return f"| {c.dtype} | {c.K}×{c.N} | {c.M} | {ours} | {share} | {best} | {goal} | {self.word} |"


def family(cell: Cell) -> str:
    return cell.contender.rpartition("_")[0] or cell.contender


def verdict(cell: Cell, peers: Iterable[Cell]) -> Verdict:
    """Compare a cell of ours with the peers' of the same product."""
    allowed = ("f16", "bf16") if cell.dtype == "f16" else (cell.dtype,)
    timed = [p for p in peers if p.us is not None and p.dtype in allowed]
    four_bit = [p for p in timed if family(p) in FOUR_BIT]
    dense = [p for p in timed if family(p) == "cublas"]
    needed = FAST if cell.M < 1024 else ("machete",)
    if cell.M >= 1024:
        four_bit = [p for p in four_bit if family(p) == "machete"]
    best = min(four_bit + dense, key=lambda p: p.us, default=None)
    complete = bool(dense) and any(family(p) in needed for p in four_bit)
    return Verdict(cell, best, limit(cell.M, best.us, cell.floor_us) if complete else None)


def limit(m: int, best: float, floor: float) -> float | None:
    """The most µs that M tokens may take, beside the best peer's and the floor; None for an M without a goal."""
    if m in (1, 2, 4, 8):
        return max(0.65 * best, 1.15 * floor + 1.5)
    if m == 16:
        return max(0.70 * best, 1.2 * floor + 2)
    factor = {32: 0.75, 64: 0.75, 128: 0.95, 256: 0.95, 1024: 1.0, 4096: 1.0}.get(m)
    return None if factor is None else factor * best


def verdicts(found: Results) -> list[Verdict]:
    """Ours in the order f16, bf16, then by shape and M; beside all that multiply by weights of the same scheme and group.

    A peer has its scales in its own type, so the scheme's parameters may differ.
    """
    ours = [cell for cell in found.cells if cell.contender == "qdsl"]
    order = sorted(ours, key=lambda c: (c.dtype != "f16", c.K * c.N, c.K, c.M))
    same: dict[tuple, list[Cell]] = {}
    for cell in found.cells:
        if cell.contender != "qdsl":
            same.setdefault(_product(cell), []).append(cell)
    return [verdict(c, same.get(_product(c), ())) for c in order]


def _product(cell: Cell) -> tuple:
    return cell.scheme.partition("(")[0], cell.group, cell.K, cell.N, cell.M


def table(found: Results) -> str:
    """Markdown: what was measured where, how many goals are met, who was absent, and the rows."""
    rows, meta = verdicts(found), found.meta
    counted = [row for row in rows if row.word != "–"]
    met = sum(row.word == "met" for row in counted)
    absent = {cell.contender for cell in found.cells} - {c.contender for c in found.cells if c.us is not None}
    absent |= {*FOUR_BIT, "cublas"} - {family(cell) for cell in found.cells}
    missing = f" Absent: {', '.join(sorted(absent))}." if absent else ""
    versions = ", ".join(f"{name} {version}" for name, version in meta.versions.items())
    return "\n".join(
        [
            f"{meta.device}, {meta.date[:10]}, commit {meta.commit}, {versions}. {meta.method[0].upper()}{meta.method[1:]}.",
            "",
            f"**{met} of {len(counted)} goals met.**{missing} Times in µs; share is of the floor.",
            "",
            "| type | K×N | M | qdsl | share | best peer | goal | |",
            "|---|---|---|---|---|---|---|---|",
            *map(str, rows),
        ]
    )


# ---- schemes of weights alone ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Beside:
    """A cell of ours, that of awq4 (the first scheme), and those of the peers, for the same product."""

    cell: Cell
    first: Cell
    peers: tuple[Cell, ...]

    @property
    def goal(self) -> float | None:
        """The most µs: few tokens take what the bytes make of awq4's time, and less than Humming; many no more than any peer."""
        if self.cell.M <= 16:
            humming = [0.85 * p.us for p in self.peers if family(p) == "humming"]
            return min([1.15 * self.cell.floor_us / self.first.floor_us * self.first.us + 1.5, *humming])
        return min((p.us for p in self.peers), default=None) if self.cell.M >= 256 else None

    @property
    def word(self) -> str:
        return "–" if self.goal is None else "met" if self.cell.us <= self.goal else "missed"

    def __str__(self) -> str:
        quantized = [p for p in self.peers if family(p) != "cublas"]
        beside = [
            min(some, key=lambda p: p.us) for some in (quantized, [p for p in self.peers if p not in quantized]) if some
        ]
        names = ", ".join(f"{p.us:.1f} {family(p)}" for p in beside)
        mark = {"missed": "**", "met": "", "–": ""}[self.word]
        return f"{mark}{self.cell.us:.1f}{mark}{f' ({names})' if names else ''}"


def besides(found: Results) -> list[Beside]:
    """Every timed cell of ours, by scheme and shape as in the file."""
    timed = [c for c in found.cells if c.us is not None]
    ours = [c for c in timed if c.contender == "qdsl"]
    first = {(c.K, c.N, c.M): c for c in ours if c.scheme == ours[0].scheme and c.group == ours[0].group}
    peers: dict[tuple, list[Cell]] = {}
    for c in timed:
        if c.contender != "qdsl":
            peers.setdefault((c.scheme, c.group, c.K, c.N, c.M), []).append(c)
    return [Beside(c, first[c.K, c.N, c.M], tuple(peers.get((c.scheme, c.group, c.K, c.N, c.M), ()))) for c in ours]


def weight_only_table(found: Results) -> str:
    """Markdown: a row for every scheme and shape, µs of ours and, in brackets, of the best quantized peer and of cuBLAS."""
    rows, meta = besides(found), found.meta
    counted = [row for row in rows if row.word != "–"]
    tokens = sorted({row.cell.M for row in rows})
    by_line: dict[tuple, dict[int, Beside]] = {}
    for row in rows:
        c = row.cell
        by_line.setdefault((c.scheme, c.group, c.dtype, c.K, c.N), {})[c.M] = row
    lines = []
    for (scheme, group, dtype, k, n), cells in by_line.items():
        own = ", ".join([scheme, *([f"group {group}"] if group else [])])
        lines.append(f"| {own} | {dtype} | {k}×{n} | " + " | ".join(str(cells.get(m, "–")) for m in tokens) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in meta.versions.items())
    few = [row for row in counted if row.cell.M <= 16]
    met = sum(row.word == "met" for row in counted)
    return "\n".join(
        [
            f"{meta.device}, {meta.date[:10]}, commit {meta.commit}, {versions}. {meta.method[0].upper()}{meta.method[1:]}.",
            "",
            f"**{met} of {len(counted)} goals met**, {sum(row.word == 'met' for row in few)} of {len(few)} of those for few "
            "tokens. Times in µs, a missed goal bold; in brackets the best quantized peer, where one takes the scheme, and cuBLAS.",
            "",
            f"| scheme | type | K×N | {' | '.join(f'M = {m}' for m in tokens)} |",
            f"|---|---|---|{'---|' * len(tokens)}",
            *lines,
        ]
    )


# ---- 8-bit activations -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Activated:
    """Ours with 8-bit activations: the product alone, all from 16 bits on, and the peers of the same product."""

    cell: Cell
    whole: Cell | None
    peers: tuple[Cell, ...]

    @property
    def best(self) -> Cell | None:
        return min(self.peers, key=lambda p: p.us, default=None)

    @property
    def words(self) -> tuple[str, str]:
        """Of the product, which takes no longer than the best peer, 0.90 of it up to 32 tokens; and of all."""
        goal = None if self.best is None else (0.90 if self.cell.M <= 32 else 1.0) * self.best.us
        return self._word(self.cell, goal), self._word(self.whole, self._whole_goal)

    @property
    def _whole_goal(self) -> float | None:
        c = self.cell
        return W4A8_US.get(c.M) if c.scheme.startswith("w4a8") and (c.K, c.N) == (8192, 8192) else None

    @staticmethod
    def _word(cell: Cell | None, goal: float | None) -> str:
        return "–" if cell is None or goal is None else "met" if cell.us <= goal else "missed"

    def __str__(self) -> str:
        ours = ["–" if c is None else f"{c.us:.1f}" for c in (self.cell, self.whole)]
        alone, whole = (f"**{us}**" if word == "missed" else us for us, word in zip(ours, self.words))
        name = self.best and self.best.contender.replace(WITH, "\\*")
        return f"{alone}{f' ({self.best.us:.1f} {name})' if name else ''}, {whole}"


def activated(found: Results) -> list[Activated]:
    """Every timed product of ours, by scheme and shape as in the file."""
    same: dict[tuple, dict[str, Cell]] = {}
    for c in found.cells:
        if c.us is not None and c.contender not in NO_PRODUCT:
            same.setdefault((c.scheme, c.group, c.dtype, c.K, c.N, c.M), {})[c.contender] = c
    ours = ("qdsl", f"qdsl{WITH}")
    return [
        Activated(cells[ours[0]], cells.get(ours[1]), tuple(c for name, c in cells.items() if name not in ours))
        for cells in same.values()
        if ours[0] in cells
    ]


def a8_table(found: Results) -> str:
    """Markdown: a row for every scheme and shape, µs of our product, of the best peer, and of ours with quantization."""
    rows, meta = activated(found), found.meta
    products, wholes = ([row.words[at] for row in rows if row.words[at] != "–"] for at in (0, 1))
    tokens = sorted({row.cell.M for row in rows})
    by_line: dict[tuple, dict[int, Activated]] = {}
    for row in rows:
        c = row.cell
        by_line.setdefault((c.scheme, c.group, c.K, c.N), {})[c.M] = row
    lines = []
    for (scheme, group, k, n), cells in by_line.items():
        own = ", ".join([scheme, *([f"group {group}"] if group else [])])
        lines.append(f"| {own} | {k}×{n} | " + " | ".join(str(cells.get(m, "–")) for m in tokens) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in meta.versions.items())
    timed = {c.contender for c in found.cells if c.us is not None}
    absent = ", ".join(sorted({c.contender for c in found.cells} - timed))
    missing = f" Absent: {absent}." if absent else ""
    return "\n".join(
        [
            f"{meta.device}, {meta.date[:10]}, commit {meta.commit}, {versions}. {meta.method[0].upper()}{meta.method[1:]}.",
            "",
            f"**{products.count('met')} of {len(products)} products meet their goal, {wholes.count('met')} of {len(wholes)} with "
            f"quantization.**{missing} Times in µs, a missed goal bold: our product alone "
            "(the best peer; \\*: with quantization), then ours with quantization.",
            "",
            f"| scheme | K×N | {' | '.join(f'M = {m}' for m in tokens)} |",
            f"|---|---|{'---|' * len(tokens)}",
            *lines,
        ]
    )


# ---- the page ----------------------------------------------------------------------------------------------------
def into_readme(text: str, block: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The page with the block between its two marks; raises Error where they are not."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise Error(
            f"{README.name}: no `{marks[0]}` … `{marks[1]}` to write between; put the two lines where the table goes"
        )
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weight-only", action="store_true", help="the file is one of weight_only.py")
    kind.add_argument("--a8", action="store_true", help="the file is one of a8.py")
    kind.add_argument("--cpu", action="store_true", help="the file is one of cpu.py")
    parser.add_argument(
        "--counts", type=Path, metavar="FILE.json", help="of counts.py: with --cpu, explain what is missed"
    )
    parser.add_argument("--readme", action="store_true", help="write the table into benchmarks/README.md")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw all shapes")
    args = parser.parse_args(argv)
    file, marks, shown = RESULTS, (BEGIN, END), table
    if args.weight_only:
        file, marks, shown = WEIGHT_ONLY, WEIGHT_ONLY_MARKS, weight_only_table
    elif args.a8:
        file, marks, shown = A8, A8_MARKS, a8_table
    elif args.cpu:
        import goals_cpu

        file, marks, shown = CPU, CPU_MARKS, goals_cpu.table
    if args.counts and not args.cpu:
        parser.error("--counts goes with --cpu")
    args.file = args.file or file
    try:
        if args.plot:
            plot.require(args.plot)
        found = results.read(args.file)
        if args.cpu and any(cell.threads is None for cell in found.cells):
            parser.error(f"{args.file}: measured on a GPU; --cpu wants a file that `cpu.py --out` has written")
        block = shown(found)
        if args.counts:
            import counts

            block += "\n\n" + goals_cpu.missed_by_count(found, counts.read(args.counts))
        if args.plot:
            plot.draw(found, args.plot)
        if args.readme:
            picture = args.file.with_suffix(".png")
            if picture.is_file() and picture.is_relative_to(HERE):
                block += f"\n\n![time over M]({picture.relative_to(HERE)})"
            README.write_text(into_readme(README.read_text(), block, marks))
        else:
            print(block)
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
