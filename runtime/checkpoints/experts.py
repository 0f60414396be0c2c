"""Experts: from a layer's stack to modules of one expert each, under the names that a checkpoint has for them.

A checkpoint stores each projection of each expert by itself (`experts.3.up_proj.qweight`, or `w1`, `w3` and `w2` for gate,
up and down), or all experts of a layer in one tensor (`experts.gate_up_proj_blocks`).  Formats see neither: each gets
linears, those of one expert, and what they would be stored as.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from qdsl.runtime.checkpoints import Headers, Made, Module, Plan
from qdsl.runtime.resolve import resolved

_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_TOGETHER = ("gate_up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")  # without a gate
_ONE = re.compile(r"^(.+)\.(\d+)\.(gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3)\.")
_ALL = re.compile(r"^(.+)\.(gate_up_proj|up_proj|down_proj|w13|w2)(?:[._]([a-z0-9_]+))?$")
_IN_ONE = {"w13": "gate_up_proj", "w2": "down_proj"}
_SHORT = {None: "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv"}
_EXPERT = re.compile(r"(\.experts)\.\d+\.")
_BLOCKS = ("mlp", "block_sparse_moe")  # of one layer, in a model and in files for older ones


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    count, hidden, inner   how many, the features of a token, and those between the projections
    bias          whether projections have one
    gated         whether there is a gate beside the projection up
    interleaved   whether rows of gate and up alternate, where both are one projection
    transposed    whether the model's parameters are [e, k, n]
    routed        whether they are called with the experts of each token, or with tokens that are sorted by expert
    """

    count: int
    hidden: int
    inner: int
    bias: bool
    gated: bool
    interleaved: bool
    transposed: bool
    routed: bool

    def projection(self, name: str) -> Module:
        """The linear that one expert has under this name."""
        n = {"gate_up_proj": 2 * self.inner, "down_proj": self.hidden}.get(name, self.inner)
        return Module(n, self.inner if name == "down_proj" else self.hidden, self.bias)


@dataclass(frozen=True)
class Projection:
    """One of the projections of a layer's experts.

    modules   that formats see for it: one for each expert, or one for all where a tensor holds all
    """

    name: str
    one: Module
    modules: tuple[str, ...]

    def module(self, e: int) -> str:
        return self.modules[e if len(self.modules) > 1 else 0]


@dataclass(frozen=True)
class Part:
    """What one expert has of a stored tensor that holds all: the whole of it where it is `shared`."""

    source: str
    shared: bool
    transposed: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the expert's share as it is stored."""
        return tensor.T if self.transposed else tensor


@dataclass(frozen=True)
class StoredExperts:
    """How a checkpoint stores the experts of a layer.

    base          what their names start with there
    projections   empty where the model's own parameters are stored, as they are
    parts         of tensors that hold all experts: by the name that one expert's share is given
    """

    base: str
    projections: tuple[Projection, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def source(self, name: str, module: str) -> str:
        """The stored name behind that of one expert's share; what it would be, for a share of nothing."""
        known = self.parts.get(name)
        return f"{module}_{name.removeprefix(f'{module}.')}" if known is None else known.source


Stacks = Mapping[str, tuple[Experts, StoredExperts]]  # of a model, by name


class Names:
    """The names of a checkpoint's tensors that may belong to experts, found in one pass."""

    def __init__(self, stored: Headers):
        self.stored = stored
        self.one: dict[str, set[str]] = {}  # what experts' names start with -> projections
        self.all: dict[str, list[tuple[str, str, str]]] = {}  # the same -> (projection, what of it, stored name)
        self.bases: set[str] = set()
        for name in stored:
            if found := _ONE.match(name):
                self.one.setdefault(found[1], set()).add(found[3])
            elif found := _ALL.match(name):
                short = _SHORT.get(found[3], found[3] or "")
                self.all.setdefault(found[1], []).append((_IN_ONE.get(found[2], found[2]), short, name))

    def experts(self, name: str, experts: Experts) -> StoredExperts:
        """How the experts of the model's module `name` are stored."""
        base = next((b for b in spellings(name) if b in self.one or b in self.all), name)
        if base in self.one:
            return self._separate(base, experts)
        own = {"gate_up_proj" if experts.gated else "up_proj", "down_proj"}
        entries = [entry for entry in self.all.get(base, ()) if entry[0] in own]
        floats = all(self.stored[full].dtype in _FLOATS for _, _, full in entries)
        return StoredExperts(base) if floats else self._together(base, experts, entries)

    def beside(self, name: str) -> str | None:
        """A stored tensor of the experts of `name` that no parameter of the model can hold."""
        for base in spellings(name):
            if base in self.one:
                return next(stored for stored in self.stored if stored.startswith(f"{base}."))
            for _, _, full in self.all.get(base, ()):
                if self.stored[full].dtype not in _FLOATS:
                    return full
        return None

    def _separate(self, base: str, experts: Experts) -> StoredExperts:
        has = self.one[base]
        known = (*_SEPARATE, _TOGETHER) if experts.gated else (_PLAIN,)
        names = max(known, key=lambda names: len(has & set(names)))
        ours = names if names == _TOGETHER else _SEPARATE[0] if experts.gated else _PLAIN
        return StoredExperts(
            base,
            tuple(
                Projection(own, experts.projection(own), tuple(f"{base}.{e}.{theirs}" for e in range(experts.count)))
                for own, theirs in zip(ours, names, strict=True)
            ),
        )

    def _together(self, base: str, experts: Experts, entries: Iterable[tuple[str, str, str]]) -> StoredExperts:
        names = _TOGETHER if experts.gated else _PLAIN
        parts, problems = {}, []
        for projection, short, full in entries:
            one, shape = experts.projection(projection), tuple(self.stored[full].shape)
            shared = self.stored[full].numel() == 1
            if not shared and shape[0] != experts.count:
                problems.append(f"`{full}` is {list(shape)}; of {experts.count} experts it holds {experts.count} parts")
                continue
            # A parameter of the model lies as the model has it, and so does what is stored for it.
            flat = full.endswith(projection) and experts.transposed and shape[1:] == (one.k, one.n)
            row = short.startswith("weight_scale") and shape[1:] == (1, one.n)
            parts[f"{base}.{projection}.{short}"] = Part(full, shared, flat or row)
        return StoredExperts(
            base,
            tuple(Projection(name, experts.projection(name), (f"{base}.{name}",)) for name in names),
            parts,
            tuple(problems),
        )


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def spellings(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may have for a part of a block of experts: the model's, and that of older models."""
    parts = name.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i] in _BLOCKS), None)
    if at is None:
        return (name,)
    return tuple(".".join([*parts[:at], block, *parts[at + 1 :]]) for block in (parts[at], *_BLOCKS))


def floats(name: str, experts: Experts, stored: StoredExperts, headers: Headers) -> dict[str, Made]:
    """The model's parameters, by name, where every projection of every expert is stored as floats by itself."""
    found: dict[str, Made] = {}
    wide = tuple(p for p in stored.projections if p.name != "down_proj")
    for kind in ("weight", "bias") if experts.bias else ("weight",):
        for own, projections in (
            ("gate_up_proj" if experts.gated else "up_proj", wide),
            ("down_proj", stored.projections[-1:]),
        ):
            sources = [f"{p.module(e)}.{kind}" for e in range(experts.count) for p in projections]
            first = headers[sources[0]]
            made = _stacked([headers[source] for source in sources], experts, len(projections), kind)
            found[f"{name}.{own}" + ("_bias" if kind == "bias" else "")] = Made(
                torch.empty(made.shape, dtype=first.dtype, device="meta"), tuple(sources),
                lambda own, sources=tuple(sources), kind=kind, count=len(projections): _stacked(
                    [own[source] for source in sources], experts, count, kind
                ),
            )  # fmt: skip
    return found


def _stacked(tensors: list[torch.Tensor], experts: Experts, projections: int, kind: str) -> torch.Tensor:
    """One parameter of the model, from its projections of expert after expert."""
    ones = []
    for e in range(experts.count):
        own = tensors[e * projections : (e + 1) * projections]
        both = torch.stack(own, 1).flatten(0, 1) if experts.interleaved else torch.cat(own)
        ones.append(both.T if experts.transposed and kind == "weight" else both)
    return torch.stack(ones)


# ---- what a format made of them ----------------------------------------------------------------------------------
def quantized(stacks: Stacks, plan: Plan, stored: Headers) -> tuple[list[str], list[str]]:
    """(the stacks that are stored quantized, what forbids loading them).  Adds to the plan those that are stored as floats,
    expert by expert."""
    found, problems = [], []
    named = {name for problem in plan.problems for name in re.findall(r"`([^`]+)`", problem)}
    for name, (experts, own) in stacks.items():
        problems += own.problems
        modules = [module for projection in own.projections for module in projection.modules]
        chosen = [module for module in modules if module in plan.choices]
        lacking = [module for module in modules if module not in plan.choices and not _mentioned(module, named)]
        if chosen:
            found.append(name)
            if lacking:
                has = next((other for other in stored if other.startswith(f"{lacking[0]}.")), None)
                how = f"is stored as `{has}`" if has else "is in no file"
                problems.append(
                    f"`{lacking[0]}` {how}, and `{chosen[0]}` is quantized: all experts of a layer are, or none"
                )
            problems += [p for projection in own.projections if (p := _differing(projection.modules, plan))]
        elif modules and len(modules) == len(lacking):
            kinds = ("weight", "bias") if experts.bias else ("weight",)
            missing = [f"{m}.{kind}" for m in modules for kind in kinds if f"{m}.{kind}" not in stored]
            if missing:
                problems.append(f"`{missing[0]}` is in no file, and the model needs it")
            else:
                plan.dense |= floats(name, experts, own, stored)
    return found, problems


def _differing(modules: Iterable[str], plan: Plan) -> str:
    """What is wrong where experts of one projection are stored in different ways; empty where they are not."""
    ways = {
        name: str(resolved(plan.choices[name].scheme, plan.choices[name].params, None).bound)
        + f", layout {plan.choices[name].layout}" + (", with a bias" if plan.choices[name].bias else "")
        for name in modules if name in plan.choices
    }  # fmt: skip
    for other in ways:
        first = next(iter(ways))
        if ways[other] != ways[first]:
            return f"`{other}` is {ways[other]}, and `{first}` is {ways[first]}: experts of one layer must be alike"
    return ""


def _mentioned(module: str, named: Iterable[str]) -> bool:
    return any(other == module or other.startswith(f"{module}.") for other in named)


def refused(plan: Plan, stacks: Stacks, unknown: Mapping[str, str]) -> tuple[str, ...]:
    """Prefixes of the tensors, and of the parameters, of stacks for which the plan's problems say why they can't be read."""
    named = {name for problem in plan.problems for name in re.findall(r"`([^`]+)`", problem)}
    wrong = [
        name for name, (_, stored) in stacks.items() if any(other.startswith(f"{stored.base}.") for other in named)
    ]
    return tuple(f"{spelling}." for name in (*wrong, *unknown) for spelling in spellings(name))


def as_stored(text: str, stacks: Stacks) -> str:
    """A text in which tensors that hold all experts have their own names."""
    for _, stored in stacks.values():
        for projection in stored.projections if stored.parts else ():
            (module,) = projection.modules
            if module in text:
                for name in sorted(set(re.findall(rf"{re.escape(module)}\.[a-z0-9_]+", text)), key=len, reverse=True):
                    text = text.replace(name, stored.source(name, module))
    return text


def together(problems: list[str]) -> list[str]:
    """The problems, of which those that several experts share are told once, of the first."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_EXPERT.sub(r"\1.*.", problem), []).append(problem)
    return [
        same[0] + (f"\n  (and so for {len(same) - 1} more experts)" if len(same) > 1 else "") for same in alike.values()
    ]
