"""Which kernel serves m tokens of an [n, k] weight: a table of measured or modelled choices, as data in an artifact.

A table has a row for every shape that was measured; another shape takes the row of the nearest. A row says up to how
many tokens which variant is the fastest, and the same for a layer that must keep to one order of summation, so that
the bits of a row of y do not depend on how many rows there are. Variants are names here; what they need of k is told by
the set of names that are `legal`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdsl.manifest import Variant

Limits = tuple[tuple[int | None, str], ...]  # (m_max, variant) by rising m_max; the last m_max is None: any number


@dataclass(frozen=True)
class Key:
    """What makes main loops differ in speed: the types of the multiplier and of what is loaded, the group, whether codes are
    looked up in a table of so many entries, and whether x is brought into another order before."""

    compute: str
    scale: str | None
    zero: str | None
    group: int | None  # None: all of k is one group
    code: str = "u4"
    offset: str | None = None
    entries: int = 0
    ordered: bool = False

    def __str__(self) -> str:
        roles = (("scale", self.scale), ("zero", self.zero), ("offset", self.offset))
        loaded = [f"{name} {kind}" for name, kind in roles if kind]
        return ", ".join(
            [
                f"{self.code} in {self.compute}{f', a table of {self.entries}' if self.entries else ''}",
                *loaded,
                "one group" if self.group is None else f"groups of {self.group}",
                *(["x ordered"] if self.ordered else []),
            ]
        )


@dataclass(frozen=True)
class Row:
    """The choice for an [n, k] weight.

    free    the fastest variants
    fixed   the fastest that sum in one order
    """

    n: int
    k: int
    free: Limits
    fixed: Limits

    def __post_init__(self):
        if not (type(self.n) is int and type(self.k) is int and self.n > 0 and self.k > 0):
            raise ValueError(f"a table's row is for n = {self.n!r}, k = {self.k!r}")
        for limits in (self.free, self.fixed):
            ends = [end for end, _ in limits]
            rising = all(type(end) is int and end > start for start, end in zip([0, *ends], ends[:-1], strict=False))
            if not (ends and ends[-1] is None and rising and all(isinstance(name, str) for _, name in limits)):
                raise ValueError(f"limits of a table rise, and the last is none: {limits}")

    @property
    def choices(self) -> str:
        return shown(self.free) + ("" if self.free == self.fixed else f"; one order: {shown(self.fixed)}")

    def __str__(self) -> str:
        return f"K {self.k}, N {self.n}: {self.choices}"


@dataclass(frozen=True)
class Table:
    """The choice on one architecture.

    source   who says so: "measured on …", "model"
    rows     shape by shape
    spare    the choice among variants right for every k, where a row's variant is not right for this k; also the choice
             for every shape where there are no rows
    key      what the kernels are, where tables of several kinds are kept together
    """

    source: str
    spare: Row
    rows: tuple[Row, ...] = ()
    key: Key | None = None

    def nearest(self, n: int, k: int) -> Row:
        """The row of the nearest shape, by |log2 n - log2 n'| + |log2 k - log2 k'|; of equals, the larger."""

        def distance(row: Row) -> tuple:
            ratio = Fraction(max(n, row.n), min(n, row.n)) * Fraction(max(k, row.k), min(k, row.k))
            return ratio, -row.n * row.k, -row.n

        return min(self.rows, key=distance, default=self.spare)

    def limits(self, n: int, k: int, legal: Collection[str]) -> Limits:
        """The fastest variants for a shape. A row's variant that is not legal gives way to the spare one."""
        row = self.nearest(n, k)
        return merged((end, _first_legal(end, row.free, self.spare.free, legal)) for end in _ends(row, self.spare))

    def limits_of_one_order(self, n: int, k: int, legal: Collection[str]) -> Limits:
        """The same from one order: if a single variant is not legal, another order serves all m."""
        row = self.nearest(n, k)
        return row.fixed if all(name in legal for _, name in row.fixed) else self.spare.fixed

    def problems(self, variants: Sequence[Variant]) -> list[str]:
        """Why these variants can't be chosen by this table: each line one reason."""
        known, found = {v.name: v for v in variants}, []
        for row in (self.spare, *self.rows):
            names = {name for _, name in (*row.free, *row.fixed)}
            if absent := names - known.keys():
                found.append(f"no variant {', '.join(sorted(absent))}, of which it says: {row}")
            elif None in (orders := {known[name].order if known[name].order != "" else name for _, name in row.fixed}):
                found.append(f"an order that changes with m is said to be one: {row}")
            elif len(orders) > 1:
                found.append(f"one order is said to be several: {row}")
            elif row is self.spare and any(known[name].k_multiple > 1 for name in names):
                found.append(f"not right for every k: {row}")
        return found

    def lines(self) -> list[str]:
        """The source, then every choice with the shapes that have it; the spare one where it is a choice of its own."""
        head = self.source if self.key is None else f"{self.source}: {self.key}"
        if not self.rows:
            return [head, f"  any K and N: {self.spare.choices}"]
        shapes: dict[str, list[str]] = {}
        for row in self.rows:
            shapes.setdefault(row.choices, []).append(f"{row.k}x{row.n}")
        if self.spare.choices not in shapes:
            shapes[self.spare.choices] = ["where K is none that those kernels take"]
        return [f"{head}; K x N:", *(f"  {', '.join(found)}: {choices}" for choices, found in shapes.items())]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @staticmethod
    def from_data(data: Any) -> Table:
        """The table back from what `asdict` and JSON made of it; raises ValueError, TypeError or KeyError."""

        def limits(pairs: Any) -> Limits:
            return tuple((end, name) for end, name in pairs)

        def row(r: Mapping) -> Row:
            return Row(r["n"], r["k"], limits(r["free"]), limits(r["fixed"]))

        key = None if data["key"] is None else Key(**data["key"])
        return Table(data["source"], row(data["spare"]), tuple(map(row, data["rows"])), key)


def only(name: str) -> Table:
    """The table of a single variant that is right for everything."""
    return Table("one variant", Row(1, 1, ((None, name),), ((None, name),)))


def at(limits: Limits, m: int | None) -> str:
    """The variant for m tokens (None: for more than any limit)."""
    return next(name for end, name in limits if end is None or (m is not None and m <= end))


def merged(entries: Any) -> Limits:
    """Limits with neighbours of the same name made one."""
    found: list[tuple[int | None, str]] = []
    for end, name in entries:
        if found and found[-1][1] == name:
            found.pop()
        found.append((end, name))
    return tuple(found)


def shown(limits: Limits) -> str:
    parts = [f"{name} to {end}" for end, name in limits if end is not None]
    return (
        ", ".join([f"{parts[0].replace(' to ', ' to m = ')}", *parts[1:], f"then {limits[-1][1]}"])
        if parts
        else limits[-1][1]
    )


def _ends(*rows: Row) -> list[int | None]:
    return [*sorted({end for row in rows for end, _ in row.free if end is not None}), None]


def _first_legal(m: int | None, wanted: Limits, spare: Limits, legal: Collection[str]) -> str:
    name = at(wanted, m)
    return name if name in legal else at(spare, m)


# ---- from times to tables ----------------------------------------------------------------------------------------
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)  # the m to time
LIKE = 1.01  # times that differ by no more than this factor count as equal

Times = Mapping[int, Mapping[str, float]]  # m -> variant -> time


def fastest(times: Times) -> Limits:
    """The fastest variant for every m, where an m that was not timed counts as the next larger one that was.

    So an m between two timed ones never takes longer than the larger of them. Among equals, the neighbour's.
    """
    found: list[tuple[int | None, str]] = []
    for m in sorted(times, reverse=True):
        best = min(times[m], key=times[m].__getitem__)
        if found and times[m].get(found[0][1], math.inf) <= LIKE * times[m][best]:
            continue
        found.insert(0, (m if found else None, best))
    return tuple(found)


def of_one_order(times: Times, variants: Sequence[Variant]) -> Times:
    """The times of the variants of one order: of the one that costs the least at the m where it costs the most."""

    def costs(names: Collection[str]) -> tuple[float, float]:
        ratios = []
        for at_m in times.values():
            own = min((time for name, time in at_m.items() if name in names), default=math.inf)
            ratios.append(own / min(at_m.values()))
        return max(ratios), sum(ratios)

    orders: dict[str, set[str]] = {}
    for v in variants:
        if v.order is not None:
            orders.setdefault(v.order or v.name, set()).add(v.name)
    return _only(times, min(orders.values(), key=costs))


def table_of(
    source: str, key: Key | None, times: Mapping[tuple[int, int], Times], variants: Sequence[Variant],
    choose: Callable[[Times], Limits] = fastest,
) -> Table:  # fmt: skip
    """The table of what was timed, by (n, k). The spare choice is that of the shape nearest to 4096x4096."""
    rows = [Row(n, k, choose(t), choose(of_one_order(t, variants))) for (n, k), t in sorted(times.items())]
    middle = Table("", rows[0], tuple(rows)).nearest(4096, 4096)
    plain = [v for v in variants if v.k_multiple == 1]
    spared = _only(times[middle.n, middle.k], {v.name for v in plain})
    spare = Row(middle.n, middle.k, choose(spared), choose(of_one_order(spared, plain)))
    return Table(source, spare, tuple(rows), key)


def _only(times: Times, names: Collection[str]) -> Times:
    """The times of some; without those m for which none of them was timed, since it had fallen far behind the others."""
    found = {m: {name: time for name, time in at_m.items() if name in names} for m, at_m in times.items()}
    return {m: at_m for m, at_m in found.items() if at_m}


# ---- files -------------------------------------------------------------------------------------------------------
def tables_to_json(tables: Sequence[Table]) -> str:
    """The file that keeps the tables of an architecture, a row a line."""
    parts = []
    for table in tables:
        head = {"key": asdict(table.key) if table.key else None, "source": table.source, "spare": asdict(table.spare)}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        rows = ",\n".join(f"   {json.dumps(asdict(row))}" for row in table.rows)
        parts.append("\n".join([" {", *lines, f'  "rows": [\n{rows}\n  ]\n }}']))
    return "[\n" + ",\n".join(parts) + "\n]\n"


def tables_from_json(text: str) -> tuple[Table, ...]:
    return tuple(map(Table.from_data, json.loads(text)))
