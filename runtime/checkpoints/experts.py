"""Experts: from a layer's stack to modules of one expert each, under the names that a checkpoint has for them.

A checkpoint stores each projection of each expert by itself (`experts.3.up_proj.qweight`, or `w1`, `w3` and `w2` for gate,
up and down), or all experts of a layer in one tensor (`experts.gate_up_proj_blocks`).  Formats see neither: each gets
linears, those of one expert, and what they would be stored as.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from qdsl.runtime.checkpoints import Headers, Made, Module, Plan
from qdsl.runtime.resolve import resolved
from qdsl.runtime.state import EXTRA

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

    def projection(self, name: str, stack: str) -> Module:
        """The linear that one expert has under this name."""
        n = {"gate_up_proj": 2 * self.inner, "down_proj": self.hidden}.get(name, self.inner)
        return Module(n, self.inner if name == "down_proj" else self.hidden, self.bias, stack)


@dataclass(frozen=True)
class Projection:
    """One of the projections of a layer's experts.

    one       the linear that each expert has
    modules   that formats see for each expert in turn: the same one for all where a tensor holds all
    """

    name: str
    one: Module
    modules: tuple[str, ...]

    def saved(self, experts: str) -> Projection:
        """As qdsl saves it, in one, under its name in the model."""
        count = len(self.modules)
        return Projection(self.name, replace(self.one, count=count), (f"{experts}.{self.name}",) * count)


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
        """What is stored behind the name of one expert's share; what it would be called, if nothing is."""
        known = self.parts.get(name)
        if known is None:
            return f"{module}_{name.removeprefix(f'{module}.')}"
        return known.source if known.shared else f"{known.source}[e]"


Stacks = Mapping[str, tuple[Experts, StoredExperts]]  # of a model, by name


class Names:
    """The names of a checkpoint's tensors that may belong to experts, found in one pass."""

    def __init__(self, stored: Headers):
        self.stored = stored
        self.one: dict[str, set[str]] = {}  # what experts' names start with -> projections
        self.all: dict[str, list[tuple[str, str, str]]] = {}  # the same -> (projection, what of it, stored name)
        for name in stored:
            if found := _ONE.match(name):
                self.one.setdefault(found[1], set()).add(found[3])
            elif found := _ALL.match(name):
                short = _SHORT.get(found[3], found[3] or "")
                self.all.setdefault(found[1], []).append((_IN_ONE.get(found[2], found[2]), short, name))

    def experts(self, name: str, experts: Experts) -> StoredExperts:
        """How the experts of the model's module `name` are stored."""
        if saved := saved_stacks(name, (*_SEPARATE[0], *_TOGETHER), self.stored):
            names = _PLAIN if not experts.gated else _TOGETHER if _TOGETHER[0] in saved else _SEPARATE[0]
            projections = (Projection(n, experts.projection(n, name), ("",) * experts.count) for n in names)
            return StoredExperts(name, tuple(p.saved(name) for p in projections))
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
                Projection(
                    own, experts.projection(own, base), tuple(f"{base}.{e}.{theirs}" for e in range(experts.count))
                )
                for own, theirs in zip(ours, names, strict=True)
            ),
        )

    def _together(self, base: str, experts: Experts, entries: Iterable[tuple[str, str, str]]) -> StoredExperts:
        names = _TOGETHER if experts.gated else _PLAIN
        parts, problems = {}, []
        for projection, short, full in entries:
            one, shape = experts.projection(projection, base), tuple(self.stored[full].shape)
            shared = self.stored[full].numel() == 1
            if not shared and shape[0] != experts.count:
                problems.append(f"`{full}` is {list(shape)}, and the model has {experts.count} experts")
                continue
            # A parameter of the model lies as the model has it, and so does what is stored for it.
            flat = full.endswith(projection) and experts.transposed and shape[1:] == (one.k, one.n)
            scale = short.startswith("weight_scale") and len(shape) == 3
            if scale and experts.transposed and min(shape[1:]) > 1 and f"{base}.{projection}" in self.stored:
                problems.append(f"`{full}` is {list(shape)}: blocks of weights that lie [e, k, n] are not supported")
                continue
            row = scale and shape[1:] == (1, one.n)
            parts[f"{base}.{projection}.{short}"] = Part(full, shared, flat or row)
        return StoredExperts(
            base,
            tuple(
                Projection(name, experts.projection(name, base), (f"{base}.{name}",) * experts.count) for name in names
            ),
            parts,
            tuple(problems),
        )


def saved_stacks(name: str, projections: Iterable[str], stored: Headers) -> list[str]:
    """Of projections of the experts `name` those that qdsl saved as stacks."""
    return [projection for projection in projections if f"{name}.{projection}.{EXTRA}" in stored]


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
    first = "gate_up_proj" if experts.gated else "up_proj"
    for own, projections in ((first, stored.projections[:-1]), ("down_proj", stored.projections[-1:])):
        for kind in ("weight", "bias") if experts.bias else ("weight",):
            sources = [f"{p.modules[e]}.{kind}" for e in range(experts.count) for p in projections]
            make = functools.partial(_parameter, sources, experts, len(projections), kind)
            found[f"{name}.{own}" + ("_bias" if kind == "bias" else "")] = Made(make(headers), tuple(sources), make)
    return found


def _parameter(
    sources: Sequence[str], experts: Experts, count: int, kind: str, own: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """One parameter of the model, of `count` projections of expert after expert."""
    ones = []
    for e in range(experts.count):
        parts = [own[source] for source in sources[e * count : (e + 1) * count]]
        both = torch.stack(parts, 1).flatten(0, 1) if experts.interleaved else torch.cat(parts)
        ones.append(both.T if experts.transposed and kind == "weight" else both)
    return torch.stack(ones)


# ---- what a format made of them ----------------------------------------------------------------------------------
def quantized(stacks: Stacks, plan: Plan, stored: Headers) -> tuple[dict[str, tuple[Projection, ...]], list[str]]:
    """(the stacks that are stored quantized, what forbids loading them).  Adds to the plan those that are stored as floats,
    expert by expert."""
    found: dict[str, tuple[Projection, ...]] = {}
    problems: list[str] = []
    named = {name for problem in plan.problems for name in re.findall(r"`([^`]+)`", problem)}
    unread = bool(plan.problems) and not plan.choices  # the settings were refused, and no tensor was looked at
    for name, (experts, own) in stacks.items():
        modules = [module for projection in own.projections for module in projection.modules]
        chosen = [module for module in modules if module in plan.choices]
        lacking = [module for module in modules if module not in plan.choices and not _mentioned(module, named)]
        if own.problems:
            problems += own.problems
            for module in chosen:
                plan.choices.pop(module, None)
        elif chosen:
            found[name] = own.projections
            if lacking:
                has = next((other for other in stored if other.startswith(f"{lacking[0]}.")), None)
                how = f"is stored as `{has}`" if has else "is in no file"
                problems.append(
                    f"`{lacking[0]}` {how}, and `{chosen[0]}` is quantized: all experts of a layer are, or none"
                )
            problems += [problem for projection in own.projections if (problem := _differing(projection, plan))]
        elif modules and len(modules) == len(lacking) and not unread:
            if wrong := _misfits(experts, own, stored):
                problems += wrong
            else:
                plan.dense |= floats(name, experts, own, stored)
    return found, problems


def alike(projections: Iterable[Projection], plan: Plan) -> bool:
    """Whether all experts have been chosen a scheme for, and each projection one."""
    return all(
        all(module in plan.choices for module in projection.modules) and not _differing(projection, plan)
        for projection in projections
    )


def _differing(projection: Projection, plan: Plan) -> str:
    """What is wrong where experts are stored in different ways; empty where they are not."""
    first = ""
    for name in projection.modules:
        if (choice := plan.choices.get(name)) is None:
            continue
        bound = resolved(choice.scheme, choice.params, None).bound
        way = f"{bound}, layout {choice.layout}" + ", with a bias" * choice.bias
        if not first:
            first, of = way, name
        elif way != first:
            return f"`{name}` is {way}, and `{of}` is {first}: experts of one layer must be alike"
    return ""


def _misfits(experts: Experts, own: StoredExperts, stored: Headers) -> list[str]:
    """What is wrong with the shapes of experts that are stored as floats."""
    wrong = []
    for projection in own.projections:
        for module in projection.modules:
            for kind in ("weight", "bias") if experts.bias else ("weight",):
                shape, tensor = [projection.one.n, projection.one.k][: 1 + (kind == "weight")], f"{module}.{kind}"
                if tensor not in stored:
                    wrong.append(f"`{tensor}` is in no file, and the model needs it")
                elif list(stored[tensor].shape) != shape:
                    wrong.append(f"`{tensor}` is {list(stored[tensor].shape)}, the model needs {shape}")
    return wrong


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
    """A text in which tensors that hold all experts, and those beside experts, have the names that the files have."""
    for name, (_, stored) in stacks.items():
        if stored.base != name:
            text = text.replace(f"`{name.rpartition('.')[0]}.", f"`{stored.base.rpartition('.')[0]}.")
        for projection in stored.projections if stored.parts else ():
            module = projection.modules[0]
            if module in text:
                shares = set(re.findall(rf"{re.escape(module)}\.[a-z0-9_]+", text))
                for share in sorted(shares, key=len, reverse=True):
                    text = text.replace(share, stored.source(share, module))
    return text


def together(problems: list[str]) -> list[str]:
    """The problems, of which those that several experts share are told once, of the first."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_EXPERT.sub(r"\1.*.", problem), []).append(problem)
    return [
        same[0] + (f"\n  (and so for {len(same) - 1} more experts)" if len(same) > 1 else "") for same in alike.values()
    ]
