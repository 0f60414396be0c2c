"""Results of a measurement: the one format that `qdsl bench` and everything under benchmarks/ write and read.

    {"meta": {"commit", "device", "date", "versions", "method"},
     "cells": [{"scheme", "dtype", "group", "K", "N", "M", "threads", "contender", "us", "rel_err", "floor_us"}]}

A file is written whole or not at all, and read only if every field is what it should be.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from qdsl.diagnostic import Error
from qdsl.scheme import Scheme


@dataclass(frozen=True)
class Meta:
    """How the cells came about.

    commit     of the sources, with "-dirty" where files differed from it
    device     name of the GPU or the processor
    date       UTC, ISO 8601
    versions   package or driver -> version
    method     how was timed, and what the floor is
    """

    commit: str
    device: str
    date: str
    versions: Mapping[str, str]
    method: str


@dataclass(frozen=True)
class Cell:
    """One contender's time for y [M, N] = x [M, K] times a weight [N, K].

    scheme      the declared scheme and its parameters without `act` and `group`, such as "gptq(bits=3)"
    dtype       the type of the activations the contender took: "f16", "bf16" or "f32"
    group       the scheme's parameter: weights along k that share a scale, "k" for all of them; None without one
    threads     of the CPU; None on a GPU
    contender   "qdsl", or whose kernel it is
    us          median of one call; None where the contender could not run
    rel_err     |y - exact| / |exact| in the 2-norm, against float64; None where it was not looked at
    floor_us    the least time of this product with weights stored as the scheme says, for any contender
    """

    scheme: str
    dtype: str
    group: int | str | None
    K: int
    N: int
    M: int
    threads: int | None
    contender: str
    us: float | None
    rel_err: float | None
    floor_us: float

    @property
    def key(self) -> tuple:
        """What was measured, without what came out."""
        return self.scheme, self.dtype, self.group, self.K, self.N, self.M, self.threads, self.contender


@dataclass(frozen=True)
class Results:
    meta: Meta
    cells: tuple[Cell, ...]

    def to_json(self) -> str:
        cells = ",\n".join(f"  {json.dumps(asdict(cell), allow_nan=False)}" for cell in self.cells)
        return f'{{\n "meta": {json.dumps(asdict(self.meta))},\n "cells": [\n{cells}\n ]\n}}\n'


# ---- what is measured, where -------------------------------------------------------------------------------------
def scheme_label(scheme: Scheme, role: str = "") -> str:
    """The scheme of a cell: its name, the parameters that have no field of their own, and the phase if it has several."""
    given = {name: value for name, value in scheme.params.items() if name not in ("act", "group")}
    given |= {"phase": scheme.phase_of(role)} if scheme.phases else {}
    args = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{scheme.name}({args})" if args else scheme.name


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str:
    """The commit that these sources are at, or "unknown" where they are no git checkout."""
    place = Path(__file__).parent
    tracked = ["ls-files", "--error-unmatch", Path(__file__).name]  # not only inside somebody else's repository
    describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = "unknown"
    for command in (tracked, describe):
        try:
            done = subprocess.run(["git", "-C", place, *command], capture_output=True, text=True, check=False)
        except OSError:
            return "unknown"
        if done.returncode:
            return "unknown"
        found = done.stdout.strip()
    return found


def meta(device: str, method: str, versions: Mapping[str, str], at: str = "") -> Meta:
    """A Meta of now; `at` names the commit where the sources can't."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    known = {"python": platform.python_version(), "qdsl": _version("qdsl"), **versions}
    return Meta(at or commit(), device, date, known, method)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


# ---- files -------------------------------------------------------------------------------------------------------
def check(data: Any) -> list[str]:
    """Everything that keeps JSON data from being results; empty when it is."""
    if not isinstance(data, dict) or data.keys() != {"meta", "cells"} or not isinstance(data["cells"], list):
        return ['not {"meta": {…}, "cells": […]}']
    found = _field_problems("meta", data["meta"], Meta)
    if not found:
        texts = {name: value for name, value in data["meta"].items() if name != "versions"}
        found += [f"meta: `{name}` is {value!r}, not a text" for name, value in texts.items() if not _is_text(value)]
        if not (isinstance(data["meta"]["versions"], dict) and all(map(_is_text, data["meta"]["versions"].values()))):
            found.append("meta: `versions` is no object of texts")
    seen: set[tuple] = set()
    for at, cell in enumerate(data["cells"]):
        problems = _field_problems(f"cell {at}", cell, Cell)
        if not problems:
            problems = [f"cell {at}: `{name}` is {cell[name]!r}, not {wanted}" for name, wanted in _wrong_values(cell)]
        if not problems and (key := Cell(**cell).key) in seen:
            problems = [f"cell {at}: a second one of {key}"]
        elif not problems:
            seen.add(key)
        found += problems
    return found


def _field_problems(place: str, data: Any, kind: type) -> list[str]:
    if not isinstance(data, dict):
        return [f"{place}: not an object"]
    wanted = [f.name for f in fields(kind)]
    missing = [f"{place}: no `{name}`" for name in wanted if name not in data]
    return missing + [f"{place}: unknown `{name}`" for name in data if name not in wanted]


def _wrong_values(cell: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, what it should be) of the fields that are something else."""
    size = "a positive whole number"
    rules = {
        **{name: (_is_text(cell[name]), "a text") for name in ("scheme", "dtype", "contender")},
        **{name: (_is_size(cell[name]), size) for name in ("K", "N", "M")},
        "group": (cell["group"] in (None, "k") or _is_size(cell["group"]), f'{size}, "k" or null'),
        "threads": (cell["threads"] is None or _is_size(cell["threads"]), f"{size} or null"),
        "us": (cell["us"] is None or (_is_number(cell["us"]) and cell["us"] > 0), "a positive number or null"),
        "rel_err": (
            cell["rel_err"] is None or (_is_number(cell["rel_err"]) and cell["rel_err"] >= 0),
            "a number or null",
        ),
        "floor_us": (_is_number(cell["floor_us"]) and cell["floor_us"] > 0, "a positive number"),
    }
    return [(name, wanted) for name, (right, wanted) in rules.items() if not right]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def parse(text: str, place: str = "<text>") -> Results:
    """Results back from their text; raises Error with what is wrong with it."""
    try:
        data = json.loads(text)
    except ValueError as problem:
        raise Error(f"{place}: not JSON ({problem}); measure again") from None
    if problems := check(data):
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        listed = "\n  ".join(problems[:10])
        raise Error(f"{place}: not results of qdsl; measure again, or mend\n  {listed}{more}")
    return Results(Meta(**data["meta"]), tuple(Cell(**cell) for cell in data["cells"]))


def read(path: Path) -> Results:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise Error(f"{path}: not a readable text file ({problem})") from None
    return parse(text, str(path))


def write(path: Path, results: Results) -> None:
    """Write a file whole or not at all."""
    text = results.to_json()
    assert not check(json.loads(text)), f"what is written can be read: {check(json.loads(text))[:3]}"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def writable(path: Path) -> None:
    """Raises Error if a file can't be written there, before hours are spent on what it should hold."""
    if path.is_dir():
        raise Error(f"{path}: is a directory; name a file in it")
    if not path.parent.is_dir():
        raise Error(f"{path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Error(f"{path}: may not be written; choose another place")


# ---- several runs ------------------------------------------------------------------------------------------------
def disagreement(old: Meta, new: Meta) -> str:
    """Why cells of two runs must not stand in one file; empty when they may."""
    for name in ("commit", "device", "versions", "method"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            return f"{name} was {before!r} and is {now!r}"
    return ""


def joined(old: Results, new: Meta, cells: Iterable[Cell]) -> Results:
    """Results with more cells, which replace those of the same key; raises Error when the runs do not agree."""
    if reason := disagreement(old.meta, new):
        raise Error(f"results of different runs can't be joined: {reason}; write another file")
    known = {cell.key: cell for cell in old.cells}
    known |= {cell.key: cell for cell in cells}
    return replace(old, meta=new, cells=tuple(known.values()))
