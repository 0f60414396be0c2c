"""The goals of cpu.py, and the table of its results: `python benchmarks/goals.py --cpu`.

A product of ours may take some part of the time of the best peer of its class, no longer than one of more rows of x, and hardly
longer than torch's in bf16; but nothing below 1.08 times its floor is asked.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpu_problem import CLASSES, DENSE, LIMIT, OURS

import qdsl
from qdsl import results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results
from qdsl.runtime.bench import declared_bytes
from qdsl.scheme import Scheme

FLOOR = 1.08  # times the floor: no less is asked
DENSE_PART = 1.03  # of torch's product in bf16
READ_PART = 0.75  # of the bandwidth, by W4A16 with one row of bf16
VNNI_PART = 0.85  # of the peak of vpdpbusd, by W4A8 with 64 rows and more
ERROR = 1e-4  # with x in float32
SAME = 1.05  # medians within so much of each other are the same
ALSO = {"w4a16_bf16": ("nf4",), "w8a16": ("fp8",)}  # whose peers of the same x and as many bits count, too


def part(group: str, m: int) -> float:
    """What a class may take of its best peer's time."""
    if group == "w4a16_bf16":
        return 0.80 if m <= 64 else 0.95
    if group == "w4a16_f32":
        return 0.45 if m <= 16 else 0.60
    return 1.00 if group == "w8a8" else 0.90


@functools.cache
def _schemes() -> dict[str, tuple[str, Scheme]]:
    """Classes and schemes, by the labels of cells."""
    every = [(group, qdsl.load(own.scheme, **own.params)) for group, about in CLASSES.items() for own in about.ours]
    return {results.scheme_label(scheme): (group, scheme) for group, scheme in every}


def class_of(cell: Cell) -> str:
    """Raises Error for a cell that is none of cpu.py's."""
    if cell.scheme not in _schemes():
        raise Error(f"{cell.scheme}: no scheme of cpu.py, which measures {', '.join(_schemes())}; is this its file?")
    return _schemes()[cell.scheme][0]


@dataclass(frozen=True)
class Row:
    """A cell of ours and what is asked of it.

    best    the peer of its class that takes least; None where there is none
    goals   µs that it may take, by who asks: "peer", "dense", "next" (more rows of x), "read" and "vnni"
    """

    cell: Cell
    best: Cell | None
    goals: Mapping[str, float]

    @property
    def missed(self) -> tuple[str, ...]:
        """Who asks for more; "error" is a relative error beyond its goal."""
        found = [name for name, us in self.goals.items() if self.cell.us > us]
        if class_of(self.cell) == "w4a16_f32" and (self.cell.rel_err is None or self.cell.rel_err > ERROR):
            found.append("error")
        return tuple(found)

    def __str__(self) -> str:
        us = f"**{self.cell.us:.0f}**" if self.missed else f"{self.cell.us:.0f}"
        if not self.goals:
            return us
        peer = "no peer" if self.best is None else f"{self.best.us:.0f} {self.best.contender}"
        who = f" {', '.join(self.missed)}" if self.missed else ""
        return f"{us} ({peer}; {min(self.goals.values()):.0f}{who})"


@dataclass
class _Place:
    """All cells of one (K, N, M, threads), by class."""

    peers: dict[str, list[Cell]]
    dense: dict[str, Cell]
    limits: dict[tuple[str, str], float]  # by scheme and limit


def rows(found: Results) -> list[Row]:
    """Every timed cell of ours, in the order of the file."""
    places: dict[tuple, _Place] = defaultdict(lambda: _Place(defaultdict(list), {}, {}))
    ours: dict[tuple, dict[int, Cell]] = defaultdict(dict)
    for c in found.cells:
        place = places[c.K, c.N, c.M, c.threads]
        if c.us is None:
            continue
        if c.contender.startswith(LIMIT):
            place.limits[c.scheme, c.contender.removeprefix(LIMIT)] = c.us
        elif c.contender == DENSE:
            place.dense[class_of(c)] = c
        elif c.contender == OURS:
            ours[c.scheme, c.K, c.N, c.threads][c.M] = c
        else:
            place.peers[class_of(c)].append(c)
    return [
        _row(c, places[c.K, c.N, c.M, c.threads], ours[c.scheme, c.K, c.N, c.threads])
        for c in found.cells
        if c.contender == OURS and c.us is not None
    ]


def _row(cell: Cell, place: _Place, line: Mapping[int, Cell]) -> Row:
    group = class_of(cell)
    peers = [*place.peers[group], *(p for g in ALSO.get(group, ()) for p in place.peers[g] if p.dtype == cell.dtype)]
    best = min(peers, key=lambda p: p.us, default=None)
    goals: dict[str, float] = {}
    if best is not None:
        goals["peer"] = part(group, cell.M) * best.us
    if group in place.dense:
        goals["dense"] = DENSE_PART * place.dense[group].us
    if larger := [m for m in line if m > cell.M]:
        goals["next"] = SAME * line[min(larger)].us
    if group == "w4a16_bf16" and cell.M == 1 and (cell.scheme, "read") in place.limits:
        goals["read"] = place.limits[cell.scheme, "read"] / READ_PART
    if group == "w4a8" and cell.M >= 64 and (cell.scheme, "i8") in place.limits:
        goals["vnni"] = place.limits[cell.scheme, "i8"] / VNNI_PART
    return Row(cell, best, {name: max(us, FLOOR * cell.floor_us) for name, us in goals.items()})


def table(found: Results) -> str:
    """Markdown: what was measured where, how many cells meet their goals, who was absent, and a row for each line of M."""
    shown, meta = rows(found), found.meta
    counted = [row for row in shown if row.goals]
    tokens = sorted({row.cell.M for row in shown})
    lines: dict[tuple, dict[int, Row]] = defaultdict(dict)
    for row in shown:
        c = row.cell
        lines[c.scheme, c.dtype, c.group, f"{c.K}×{c.N}", c.threads][c.M] = row
    reasons = Counter(name for row in counted for name in row.missed)
    timed = {c.contender for c in found.cells if c.us is not None}
    absent = sorted({c.contender for c in found.cells} - timed)
    absent += [
        f"{name} ({version.removeprefix('absent: ')})"
        for name, version in meta.versions.items()
        if version.startswith("absent")
    ]
    present = ", ".join(
        f"{name} {version}" for name, version in meta.versions.items() if not version.startswith("absent")
    )
    text = [
        f"{meta.device}, {meta.date[:10]}, commit {meta.commit}, {present}. {meta.method[0].upper()}{meta.method[1:]}.",
        "",
        f"**{sum(not row.missed for row in counted)} of {len(counted)} cells meet their goals.**"
        + (f" Not met: {', '.join(f'{name} {count}' for name, count in reasons.most_common())}." if reasons else "")
        + (f" Absent: {', '.join(absent)}." if absent else "")
        + " Times in µs: ours (the best peer; what is asked, and by whom if that is missed).",
        "",
        f"| scheme | x | K×N | threads | {' | '.join(f'M = {m}' for m in tokens)} |",
        f"|---|---|---|---|{'---|' * len(tokens)}",
    ]
    for (scheme, dtype, group, shape, threads), cells in lines.items():
        own = ", ".join([scheme, *([f"group {group}"] if group else [])])
        line = " | ".join(str(cells.get(m, "–")) for m in tokens)
        text.append(f"| {own} | {dtype} | {shape} | {threads} | {line} |")
    return "\n".join([*text, "", *_limits(found)])


PER_CYCLE = {
    "f32": 64,
    "i8": 256,
}  # operations of a core's two vector ports of 512 bits; limits.c finds the clock by them
BUSY = ("vectors", "loads", "stores", "tiles")


def missed_by_count(found: Results, counts: Sequence[Mapping]) -> str:
    """Markdown: what a missed cell takes, and what its bytes and instructions take at least, by counts.py.

    counts   of `counts.py --out`: least cycles for 1024 weights, counted with this K or another
    """
    known = {(c["scheme"], c["M"]): c["cycles"] for c in counts}
    limits = {
        (c.scheme, c.K, c.N, c.M, c.threads, c.contender.removeprefix(LIMIT)): c.us
        for c in found.cells
        if c.us is not None and c.contender.startswith(LIMIT)
    }
    text = [
        "Missed cells: µs that they take, that are asked, and that their parts take at least: declared bytes at the bandwidth "
        "of reading, and instructions by what they keep busy (counts.py; two threads halve them; –: not counted).",
        "",
        f"| scheme | x | K×N | threads | M | µs | asked | bytes | {' | '.join(BUSY)} |",
        f"|---|---|---|---|---|---|---|---|{'---|' * len(BUSY)}",
    ]
    for row in rows(found):
        c = row.cell
        if not row.missed:
            continue
        taken = known.get((c.scheme, c.M))
        place = c.scheme, c.K, c.N, c.M, c.threads
        unit = next(unit for unit in PER_CYCLE if (*place, unit) in limits)
        operations = 2 * c.M * c.N * c.K * CLASSES[class_of(c)].units[unit]
        cycle = limits[*place, unit] * PER_CYCLE[unit] / operations  # µs, of all threads together
        busy = [f"{taken[name] * c.K * c.N / 1024 * cycle:.0f}" if taken else "–" for name in BUSY]
        numbers = [f"{c.us:.0f}", f"{min(row.goals.values()):.0f}", f"{limits[*place, 'read']:.0f}", *busy]
        text.append(f"| {c.scheme} | {c.dtype} | {c.K}×{c.N} | {c.threads} | {c.M} | {' | '.join(numbers)} |")
    return "\n".join(text)


def _limits(found: Results) -> list[str]:
    """What the machine could do in this run, from the times of limits: a line for every number of threads."""
    rates: dict[int | None, dict[str, str]] = defaultdict(dict)
    for c in found.cells:
        if c.us is None or not c.contender.startswith(LIMIT):
            continue
        name, scheme = c.contender.removeprefix(LIMIT), _schemes()[c.scheme][1]
        if name == "read":
            rates[c.threads][name] = f"{declared_bytes(scheme, c.M, c.N, c.K) / c.us * 1e-3:.3g} GB/s"
        else:
            taken = CLASSES[class_of(c)].units[name]
            rates[c.threads][name] = f"{2e-6 * c.M * c.N * c.K * taken / c.us:.3g} Top/s"
    return [
        f"{threads} thread{'s' * (threads != 1)}: {', '.join(f'{name} {rate}' for name, rate in units.items())}."
        for threads, units in sorted(rates.items())
    ]
