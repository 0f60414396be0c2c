"""What an artifact says about itself: `manifest.json` and the dataclasses it stands for.

The manifest holds the declaration itself (the canonical text and the parameters), so whoever opens an artifact reads
the same scheme the compiler read; beside it stand the kernel layouts, the variants of each architecture with the table
that chooses among them, and a digest of every file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from qdsl.choice import Limits, Table, at
from qdsl.dtype import DType
from qdsl.layout import Axis, Digit, Lane, Layout, Run
from qdsl.order import Order
from qdsl.precision import Precision
from qdsl.scheme import Scheme

FORMAT = 6


ELEMENTS = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """One weight, activation or output tensor as kernels take it.

    dtype    element type of the buffer, in numpy's spelling ("uint32", "float16", "bfloat16", …); packed words and
             formats of at most 8 bits are unsigned integers
    layout   from the tensor's logical bit patterns to those elements
    order    of the inputs, which the patterns are brought into before; None: their own
    parts    of the features, which lie beside each other in blocks of 16 (`qdsl.order.interleaved`)
    """

    tensor: str
    dtype: str
    layout: Layout
    order: Order | None = None
    parts: int = 1

    def __str__(self) -> str:
        about = [
            self.dtype,
            *(["ordered"] if self.order else []),
            *(["parts beside each other"] if self.parts > 1 else []),
        ]
        return f"{self.tensor}{self.layout} ({', '.join(about)})"


@dataclass(frozen=True)
class Step:
    """One call: a function of the library and the tensors it takes, by name (`x`, `y`, or declared)."""

    function: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """The calls of one kernel: right for every m and n, and for every k that is a multiple of `k_multiple`.

    order   names the order in which a row's products are summed: variants of equal order give equal bits, and the bits
            of a row do not depend on the other rows, nor on how many there are; None: they do, the order changes with m
    """

    name: str
    steps: tuple[Step, ...]
    k_multiple: int = 1
    order: str | None = ""

    def __str__(self) -> str:
        about = ["orders that change with m" if self.order is None else self.order or "an order of its own"]
        if self.k_multiple > 1:
            about.append(f"k a multiple of {self.k_multiple}")
        calls = "; ".join(f"{s.function}({', '.join(s.args)})" for s in self.steps)
        return f"{self.name} ({', '.join(about)}): {calls}"


@dataclass(frozen=True)
class Manifest:
    scheme: str
    text: str
    params: Mapping[str, int | str]
    kind: str  # "cpu" or "cuda"
    libraries: Mapping[str, str]  # architecture -> file
    buffers: Mapping[str, tuple[Buffer, ...]]  # architecture -> how its kernels take tensors
    variants: Mapping[
        str, Mapping[str, tuple[Variant, ...]]
    ]  # architecture -> phase ("" where there is one) -> kernels
    tables: Mapping[str, Mapping[str, Table]]  # architecture -> phase -> which of them serves what
    precision: Precision  # of all kernels
    max_k: int | None  # inputs beyond which an integer sum could overflow
    notes: tuple[str, ...]
    toolchain: Mapping[str, str]
    digests: Mapping[str, str]  # file -> sha256
    digest: str  # of everything that went into the compilation

    def order(self, arch: str) -> Order | None:
        """The order of inputs that the kernels take."""
        return next((b.order for b in self.buffers[arch] if b.order), None)

    def variant(self, arch: str, name: str, phase: str = "") -> Variant:
        return next(v for v in self.variants[arch][phase] if v.name == name)

    def choose(self, arch: str, m: int, n: int, k: int, phase: str = "") -> Variant:
        """The variant that serves m tokens of an [n, k] weight."""
        return self.variant(arch, at(self.limits(arch, n, k, phase), m), phase)

    def limits(self, arch: str, n: int, k: int, phase: str = "") -> Limits:
        """Up to how many tokens which variant serves an [n, k] weight."""
        return self.tables[arch][phase].limits(n, k, self.legal(arch, k, phase))

    def limits_of_one_order(self, arch: str, n: int, k: int, phase: str = "") -> Limits:
        """The same where the bits of a row must not depend on how many rows there are."""
        return self.tables[arch][phase].limits_of_one_order(n, k, self.legal(arch, k, phase))

    def legal(self, arch: str, k: int, phase: str = "") -> set[str]:
        """The variants that are right for k inputs."""
        return {v.name for v in self.variants[arch][phase] if k % v.k_multiple == 0}

    def to_json(self) -> str:
        data = asdict(self)
        for arch, buffers in self.buffers.items():
            for entry, buffer in zip(data["buffers"][arch], buffers, strict=True):
                entry["line"] = f"{buffer.tensor}{buffer.layout}"
        return json.dumps({"format": FORMAT, **data}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest back from its text; raises ValueError, TypeError or KeyError when it is not one of this format."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format") != FORMAT:
            raise ValueError(f"not a manifest of format {FORMAT}")
        for name in ("params", "libraries", "buffers", "toolchain", "digests"):
            if not isinstance(data[name], dict):
                raise TypeError(f"`{name}` is not an object")
        for name in ("variants", "tables"):
            if not isinstance(data[name], dict) or not all(isinstance(by, dict) for by in data[name].values()):
                raise TypeError(f"`{name}` is not an object of objects")
        data["buffers"] = {arch: tuple(map(buffer_from_json, held)) for arch, held in data["buffers"].items()}
        data["variants"] = {
            arch: {phase: tuple(map(_variant, vs)) for phase, vs in phases.items()}
            for arch, phases in data["variants"].items()
        }
        data["tables"] = {
            arch: {phase: Table.from_data(table) for phase, table in phases.items()}
            for arch, phases in data["tables"].items()
        }
        for arch, phases in data["variants"].items():
            for phase, variants in phases.items():
                if found := data["tables"][arch][phase].problems(variants):
                    raise ValueError(f"the table of {' '.join(filter(None, (arch, phase)))}: {found[0]}")
        data["precision"] = Precision(**data["precision"])
        data["notes"] = tuple(data["notes"])
        return Manifest(**data)


def _variant(v: Mapping) -> Variant:
    steps = tuple(Step(s["function"], tuple(s["args"])) for s in v["steps"])
    return Variant(v["name"], steps, v["k_multiple"], v["order"])


def plain_params(scheme: Scheme) -> dict[str, int | str]:
    """Parameters as JSON holds them: numbers, type names, "k"."""
    return {name: str(v) if isinstance(v, DType) else v for name, v in scheme.params.items()}


def buffer_from_json(data: Mapping) -> Buffer:
    """The buffer back from the object that `asdict` and JSON made of it; raises ValueError where it is none."""
    if data["dtype"] not in ELEMENTS:
        raise ValueError(f"a buffer of {data['dtype']!r}, which is none of {', '.join(ELEMENTS)}")
    order = Order(**data["order"]) if data["order"] else None
    return Buffer(data["tensor"], data["dtype"], layout_from_json(data["layout"]), order, data["parts"])


def layout_from_json(data: Mapping) -> Layout:
    """The layout back from the object that `asdict` and JSON made of it; raises ValueError where its parts disagree."""

    def run(r: Mapping) -> Run:
        lanes = tuple(Lane(lane["name"], tuple(lane["order"]) if lane["order"] else None) for lane in r["lanes"])
        return Run(lanes, tuple(r["bits"]) if r["bits"] else None, r["pad"])

    dims = tuple(tuple(Digit(d["name"], d["extent"]) for d in dim) for dim in data["dims"])
    axes = tuple(Axis(tuple(a["digits"]), tuple(map(run, a["runs"]))) for a in data["axes"])
    known = {digit.name for dim in dims for digit in dim}
    used = {name for a in axes for name in (*a.digits, *(lane.name for r in a.runs for lane in r.lanes))}
    if used != known:
        raise ValueError(f"a layout of the digits {', '.join(sorted(known))} places {', '.join(sorted(used))}")
    return Layout(dims, axes, data["bits"], data["word"], tuple(data["places"]))
