"""auto-round: the tensors of GPTQ or of AWQ under settings of its own, which `extra_config` changes for single modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qdsl.runtime.checkpoints import Headers, Module, Plan, Read, awq, gptq
from qdsl.runtime.checkpoints.modules import spellings
from qdsl.runtime.checkpoints.settings import pattern, table

_PACKINGS = {"auto_gptq": gptq.plan, "gptq": gptq.plan, "auto_awq": awq.plan, "awq": awq.plan}
_DENSE = 16  # from so many bits on a module is not quantized


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    packing = str(config.get("packing_format") or "auto_round:auto_gptq").lower().rpartition(":")[2]
    if packing not in _PACKINGS:
        found.problems.append(f"auto-round with packing_format `{packing}` is not supported ({', '.join(_PACKINGS)})")
    if config.get("act_bits") not in (None, 16, 32) or config.get("data_type", "int") != "int":
        kinds = f"data_type {config.get('data_type', 'int')}, act_bits {config.get('act_bits')}"
        found.problems.append(f"auto-round with {kinds}: only integer weights with x as it is are supported")
    extra = _extra(config)
    if found.problems:
        return found
    for name, module in modules.items():
        own = {**config, **_override(name, extra)}
        if isinstance(own.get("bits"), int) and own["bits"] >= _DENSE:
            if f"{name}.qweight" not in stored:
                continue
            found.contradictions.append(f"`{name}` is not to be quantized by extra_config, but is stored quantized")
            own["bits"] = config.get("bits")
        settings = {
            "bits": own.get("bits"), "group_size": own.get("group_size"), "sym": own.get("sym", True),
            "zero_point": True, "desc_act": False,
        }  # fmt: skip
        part = _PACKINGS[packing](settings, {name: module}, stored, read)
        found.choices |= part.choices
        found.notices += part.notices
        found.contradictions += part.contradictions
        found.problems += [problem for problem in part.problems if problem not in found.problems]
    return found


def _extra(config: Mapping[str, Any]) -> dict[str, tuple[re.Pattern[str], Mapping[str, Any]]]:
    """Key -> (it as a pattern that may lie anywhere in a name, what it changes)."""
    extra: dict[str, tuple[re.Pattern[str], Mapping[str, Any]]] = {}
    for key in table(config, "extra_config"):
        extra[key] = pattern(key, f"extra_config[{key!r}]"), table(table(config, "extra_config"), key)
    return extra


def _override(name: str, extra: Mapping[str, tuple[re.Pattern[str], Mapping[str, Any]]]) -> Mapping[str, Any]:
    """What is changed for a module: under its own name, or else by the first pattern that is found in it."""
    for spelling in spellings(name):
        if spelling in extra:
            return extra[spelling][1]
    return next((changes for matcher, changes in extra.values() if matcher.search(name)), {})
