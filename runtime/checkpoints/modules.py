"""What all formats ask of a module and of the tensors stored for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qdsl.runtime import repack
from qdsl.runtime.checkpoints import Headers, Module, Plan
from qdsl.runtime.checkpoints.fused import FUSED
from qdsl.runtime.resolve import resolved

FLOATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# As vLLM knows them; the scale of a projection's output is that of the cache it is written to.
_CACHE = re.compile(
    r"(^|\.)((self_attn|attn|attention|k_proj|v_proj|qkv_proj)\.((k|v|q|kv)_(scale|zero_point)|output_scale)"
    r"|(q|k|v)_proj\.output_scale|self_attn\.prob_output_scale|(k|v)_cache\.scale)$"
)


def spellings(name: str) -> tuple[str, ...]:
    """The names by which a configuration may mean a module: its own, and that of the fused one it is part of."""
    parent, dot, last = name.rpartition(".")
    return (name, f"{parent}{dot}{FUSED[last]}") if last in FUSED else (name,)


def listed(name: str, entries: Iterable[str]) -> bool:
    """Whether a list of modules to leave out names a module: itself, one that it is in, or its last components."""
    dotted = [f".{spelling}." for spelling in spellings(name)]
    return any(f".{entry}." in spelling for entry in entries for spelling in dotted)


def closest_names(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not among the known ones."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" (nearest: {', '.join(f'`{match}`' for match in near)})" if near else ""


def parts(name: str, known: Iterable[str], stored: Headers) -> dict[str, str]:
    """Of a module's possible tensors those that are stored: full name -> name within the module."""
    return {f"{name}.{part}": part for part in known if f"{name}.{part}" in stored}


def is_float(tensor: torch.Tensor | None) -> bool:
    """Whether a stored weight is one that torch computes with as it is."""
    return tensor is not None and tensor.dtype in (*FLOATS, torch.float64)


def float_type(tensor: torch.Tensor | None) -> dict[str, str]:
    """The parameter `scale_type` for scales of this type; a type that no scheme has is left for the layout to refuse."""
    return {"scale_type": FLOATS[tensor.dtype]} if tensor is not None and tensor.dtype in FLOATS else {}


def groups_of(group: int, k: int) -> tuple[int | str, int]:
    """(the parameter `group`, the number of groups); -1 and all of k are one group, and one kernel."""
    return ("k", 1) if group == -1 or group >= k else (group, -(-k // group))


def has_bias(name: str, module: Module, stored: Headers, found: Plan) -> bool:
    """Whether the bias is stored; what the model says otherwise goes to the plan's problems."""
    bias = f"{name}.bias" in stored
    if module.bias and not bias:
        found.problems.append(f"`{name}.bias` is in no file, and the model needs it")
    if bias and not module.bias:
        found.problems.append(f"`{name}.bias` has no place in the model, whose `{name}` has no bias")
    return bias


def stacks(modules: Mapping[str, Module], found: Plan) -> list[dict[str, Module]]:
    """Of every projection of every stack of experts the modules that were chosen a scheme for."""
    alike: dict[tuple[str, str], dict[str, Module]] = {}
    for name, module in modules.items():
        if module.stack and name in found.choices:
            alike.setdefault((module.stack, name.rpartition(".")[2]), {})[name] = module
    return list(alike.values())


def index_alike(modules: Mapping[str, Module], found: Plan, index: str) -> None:
    """Where groups of some experts are out of order, the others name theirs, too: a stack has one scheme.

    index   the stored name of the tensor that names groups
    """
    for stack in stacks(modules, found):
        ordered = [name for name in stack if not found.choices[name].scheme.endswith("_actorder")]
        for name in ordered if len(ordered) < len(stack) else ():
            old, k = found.choices[name], stack[name].k
            scheme, group = f"{old.scheme}_actorder", old.params["group"]
            if old.layout in resolved(scheme, old.params, None).layouts:
                given = {**old.given, index: torch.arange(k, dtype=torch.int32) // (k if group == "k" else int(group))}
                why = f"{old.why}, and those of other experts are not"
                found.choices[name] = replace(old, scheme=scheme, given=given, why=why)


def kv_scales(stored: Headers, found: Plan) -> set[str]:
    """Scales of a quantized key-value cache, which no linear has a use for; the user is told of them."""
    names = {name for name in stored if _CACHE.search(name)}
    if names:
        found.notices.append(
            f"{len(names)} scales of a quantized key-value cache, such as `{min(names)}`, are not used: the cache keeps "
            "the type of the model"
        )
    return names


def fits(
    scheme: str, params: Mapping[str, Any], layout: str, tensor: str, stored: Mapping[str, torch.Tensor], n: int, k: int
) -> bool:
    """Whether what is stored (by names within the module) has the shape and type from which a layout reads a tensor."""
    loaded = resolved(scheme, params, None)
    sizes, wanted = {"e": 1, "m": 1, "n": n, "k": k}, {tensor: loaded.tensor(tensor)}
    return not repack.mismatches(loaded, loaded.layouts[layout], stored, "", sizes, wanted)


def decoded(
    scheme: str, params: Mapping[str, Any], layout: str, tensor: str, stored: Mapping[str, torch.Tensor], n: int, k: int
) -> np.ndarray:
    """Bit patterns of one tensor as a layout reads it from what is stored, which fits."""
    loaded = resolved(scheme, params, None)
    storage, sizes = loaded.layouts[layout], {"e": 1, "m": 1, "n": n, "k": k}
    binding = next(b for b in storage.bindings if b.tensor == tensor)
    return repack.read(loaded, storage, binding, stored, "", sizes)


def decoded_table(scheme: str, tensor: str) -> torch.Tensor:
    """The entries of a table that a scheme declares, in float64."""
    values = resolved(scheme, {}, None).tensor(tensor).value
    return torch.tensor(values, dtype=torch.float64)
