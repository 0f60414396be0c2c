"""Linears that are one in the model and several in the checkpoint, or the other way round, as rows of one weight.

Formats see the linears that are stored.  What is quantized stays as it is stored: parts of different scales, types or
groups of inputs become layers side by side, and a part of one becomes a layer of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qdsl.runtime.checkpoints import Headers, Made, Module, Plan

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED = {part: whole for whole, parts in PARTS.items() for part in parts}


@dataclass(frozen=True)
class Arrangement:
    """The linears of a model, and those that are stored for them.

    modules   that are stored, by name
    joined    linears of the model that are stored as several: the names of these, in the order of their rows
    rows      linears of the model that are stored in a larger one: its name, and their rows there
    """

    modules: dict[str, Module] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[str, tuple[str, slice]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def stored(self, name: str) -> tuple[str, ...]:
        """The modules that hold the rows of a linear of the model."""
        return self.joined.get(name) or (self.rows[name][0] if name in self.rows else name,)


def arranged(own: Mapping[str, Module], stored: Headers, config: Any) -> Arrangement:
    """`own` are the linears of the model, and `config` its configuration, which knows how many rows are whose."""
    around = {name[:at] for name in stored for at, letter in enumerate(name) if letter == "."}
    found = Arrangement()
    for name, module in own.items():
        parent, dot, last = name.rpartition(".")
        parts = _stored_parts(name, last, around)
        fused = f"{parent}{dot}{FUSED[last]}" if last in FUSED else ""
        if parts:
            sizes = _sizes(last, module, config)
            if sizes is None:
                found.problems.append(
                    f"`{name}` has {module.n} rows and is stored as {', '.join(f'`{p}`' for p in parts)}, and the model's "
                    "configuration does not say how many are whose (num_attention_heads, num_key_value_heads, head_dim)"
                )
                sizes = (module.n,) * len(parts)
            found.joined[name] = parts
            found.modules.update((p, Module(n, module.k, module.bias)) for p, n in zip(parts, sizes, strict=True))
        elif name not in around and fused in around and fused not in own:
            beside = [f"{parent}{dot}{each}" for each in PARTS[FUSED[last]]]
            if missing := [each for each in beside if each not in own]:
                found.problems.append(f"`{fused}` is stored, and the model has no `{missing[0]}` for its rows")
                continue
            start = sum(own[each].n for each in beside[: beside.index(name)])
            found.rows[name] = fused, slice(start, start + module.n)
            found.modules[fused] = Module(sum(own[each].n for each in beside), module.k, module.bias)
        else:
            found.modules[name] = module
    return found


def _stored_parts(name: str, last: str, around: set[str]) -> tuple[str, ...]:
    """The parts of a linear that are stored in its place: beside it as other tools have them, or in it, as qdsl saves it."""
    parent = name.removesuffix(last)
    for start in (f"{name}.", parent if name not in around else None):
        parts = tuple(f"{start}{part}" for part in PARTS.get(last, ()))
        if start is not None and not around.isdisjoint(parts):
            return parts
    return ()


def _sizes(last: str, module: Module, config: Any) -> tuple[int, ...] | None:
    """How many rows each part has."""
    if last == "gate_up_proj":
        return (module.n // 2,) * 2 if module.n % 2 == 0 else None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or (heads and getattr(config, "hidden_size", 0) // heads)
    sizes = (heads * size, keys * size, keys * size) if heads and size else ()
    return sizes if sum(sizes) == module.n else None


def floats(arrangement: Arrangement, plan: Plan, stored: Headers) -> tuple[dict[str, Made], list[str]]:
    """What the model holds of linears that are not quantized, by stored names that it would have, and what forbids that."""
    made: dict[str, Made] = {}
    problems = []
    for name, parts in arrangement.joined.items():
        chosen = [part for part in parts if part in plan.choices]
        if chosen and len(chosen) < len(parts):
            other = next(part for part in parts if part not in chosen)
            lacks = "is not" if f"{other}.weight" in stored else "is in no file"
            problems.append(
                f"`{chosen[0]}` is quantized and `{other}` {lacks}, and the model has them in one, `{name}`"
            )
        for own in () if chosen else ("weight", "bias"):
            sources = tuple(f"{part}.{own}" for part in parts)
            if all(source in stored for source in sources):
                made[f"{name}.{own}"] = _cat(sources, stored)
    for name, (fused, rows) in arrangement.rows.items():
        for own in () if fused in plan.choices else ("weight", "bias"):
            if (source := f"{fused}.{own}") in stored:
                header = stored[source][rows]
                made[f"{name}.{own}"] = Made(header, (source,), lambda t, source=source, rows=rows: t[source][rows])
    return made, problems


def _cat(sources: tuple[str, ...], stored: Headers) -> Made:
    def cat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[source] for source in sources])

    return Made(cat(stored), sources, cat)
