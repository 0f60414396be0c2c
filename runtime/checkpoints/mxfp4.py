"""The method "mxfp4" of transformers, which is gpt-oss': experts in blocks of 32 with a power of two each.

All experts of a layer lie in one tensor: `gate_up_proj_blocks` [e, n, k / 32, 16] of bytes, `_scales` and `_bias`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import has_bias, listed, parts
from qdsl.runtime.checkpoints.settings import names

_PARTS = ("blocks", "scales", "bias")


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    skipped = names(config, "modules_to_not_convert")
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        if not tensors.keys() - {f"{name}.bias"}:
            continue
        if listed(name, skipped):
            found.contradictions.append(f"`{name}` is on the list of modules not converted, but is stored quantized")
        if module.k % 32:
            found.problems.append(f"`{name}` is mxfp4 with k = {module.k}, no multiple of its blocks of 32")
            continue
        bias = has_bias(name, module, stored, found)
        found.choices[name] = Choice("mxfp4", {}, "gpt_oss", bias, tensors, why="blocks of 32 with a power of two each")
    return found
