"""NVIDIA's ModelOpt: an algorithm for the model, or one for each layer; every scale multiplies."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import closest_names, has_bias, is_float, kv_scales, parts, spellings
from qdsl.runtime.checkpoints.settings import names, table

_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")
_ALGORITHMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "FP8": ("fp8_static", {}, "compressed_tensors"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_dynamic", {}, "modelopt"),
    "FP8_PB_WO": ("fp8a16_block", {"block": 128}, "modelopt"),
    "NVFP4": ("nvfp4", {}, "modelopt"),
    "W4A16_NVFP4": ("nvfp4a16", {}, "modelopt"),
    "MXFP8": ("mxfp8a8", {}, "compressed_tensors"),
}
_GROUPS = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    settings = table(config, "quantization") or config
    overall = str(settings.get("quant_algo") or "").upper()
    mixed = overall == "MIXED_PRECISION"
    layers = {name: table(table(settings, "quantized_layers"), name) for name in table(settings, "quantized_layers")}
    if mixed and not layers:
        found.problems.append("ModelOpt with quant_algo `MIXED_PRECISION`, but without `quantized_layers`")
    for algorithm in {str(entry.get("quant_algo")).upper() for entry in layers.values()} if mixed else {overall}:
        if algorithm not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            found.problems.append(f"ModelOpt with quant_algo `{algorithm}` is not supported (supported: {known})")
    if found.problems:
        return found
    found.skipped |= kv_scales(stored, found)
    excluded = names(settings, "exclude_modules", "ignore")
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        weight = stored.get(f"{name}.weight")
        quantized = (weight is not None and not is_float(weight)) or any("scale" in part for part in tensors.values())
        entry = next((layers[s] for s in spellings(name) if s in layers), None) if mixed else settings
        out = any(_excludes(pattern, spelling) for pattern in excluded for spelling in spellings(name))
        if not quantized:
            if weight is not None and entry and not out:
                found.contradictions.append(f"`{name}` is not excluded, but is stored dense")
            continue
        if entry is None:
            near = closest_names(name, layers)
            found.problems.append(f"`{name}` is stored quantized, but `quantized_layers` has no such layer{near}")
            continue
        if out:
            found.contradictions.append(f"`{name}` is excluded, but is stored quantized")
        _choose(name, module, tensors, stored, entry, settings, found)
    return found


def _excludes(pattern: str, name: str) -> bool:
    """Wildcards match dots as well; a pattern without any may be a part of a name."""
    return fnmatch.fnmatchcase(name, pattern) or ("*" not in pattern and pattern in name)


def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, entry: Mapping[str, Any],
    settings: Mapping[str, Any], found: Plan,
) -> None:  # fmt: skip
    algorithm = str(entry.get("quant_algo")).upper()
    scheme, params, layout = _ALGORITHMS[algorithm]
    group, fixed = entry.get("group_size", settings.get("group_size")), _GROUPS.get(algorithm)
    if fixed and group not in (None, fixed):
        found.problems.append(f"`{name}` is {algorithm} with group_size = {group}, which has groups of {fixed}")
        return
    if fixed and module.k % fixed:
        found.problems.append(f"`{name}` is {algorithm} with k = {module.k}, no multiple of its group of {fixed}")
        return
    unread = ()
    if scheme == "nvfp4a16" or algorithm == "FP8_PB_WO":  # x stays as it is, whatever was calibrated
        unread = (f"{name}.input_scale",)
    kept = {full: part for full, part in tensors.items() if full not in unread}
    bias = has_bias(name, module, stored, found)
    found.choices[name] = Choice(scheme, params, layout, bias, kept, unread=unread, why=f"quant_algo {algorithm}")
