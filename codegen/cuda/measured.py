"""Measured tables of choices: `tables/ARCH.json`, as `qdsl tune --out` writes it, to the table of one kind of kernel."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from importlib import resources

from qdsl.choice import Key, Table, tables_from_json
from qdsl.dtype import dtype


@functools.cache
def tables(arch: str) -> tuple[Table, ...]:
    """All that was measured on an architecture."""
    file = resources.files(__package__) / "tables" / f"{arch}.json"
    return tables_from_json(file.read_text(encoding="utf-8")) if file.is_file() else ()


def table(arch: str, key: Key) -> Table | None:
    """The table of these kernels, or else of the most similar with codes as wide that were measured; None without one."""
    alike = [t for t in tables(arch) if dtype(t.key.code).bits == dtype(key.code).bits]
    found = min(alike, key=lambda t: _difference(t.key, key), default=None)
    if found is None or found.key == key:
        return found
    return replace(found, source=f"{found.source} with {found.key}", key=key)


def _difference(a: Key, b: Key) -> tuple:
    """How unlike two kinds of kernels are: first whether a kernel runs before them that orders x, then the width of the
    multiplier's type, then the type, then how weights are decoded, then the group."""
    groups = [math.log2(key.group or 1 << 20) for key in (a, b)]
    kinds = [dtype(key.code).kind for key in (a, b)]
    return (
        a.ordered != b.ordered,
        dtype(a.compute).bits != dtype(b.compute).bits,
        a.compute != b.compute,
        kinds[0] != kinds[1],
        (a.scale != b.scale) + (a.zero != b.zero) + (a.offset != b.offset) + (bool(a.entries) != bool(b.entries)),
        abs(groups[0] - groups[1]),
    )
