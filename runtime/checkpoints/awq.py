"""AWQ, as AutoAWQ and tools after it write it: 4-bit codes, a zero point and a scale per group along K.

The shapes of a module's tensors prove its layout: "gemm" packs along N (qweight [K, N/8]), "gemv" along K
(qweight [N, K/8]) with groups padded to whole words.  Every other layout is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import float_type, groups_of, has_bias, parts
from qdsl.runtime.checkpoints.settings import names

_LAYOUTS = {"gemm": "autoawq", "exllama": "autoawq", "ipex": "autoawq", "gemv": "autoawq_gemv"}
_PARTS = ("qweight", "qzeros", "scales", "bias")
_EIGHTS = -0x77777778  # eight nibbles of 8: the zero point of a file that stores none


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    group = _settings(config, found)
    if found.problems:
        return found
    skipped = names(config, "modules_to_not_convert")
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        quantized = any(part != "bias" for part in tensors.values())
        listed = any(entry in name for entry in skipped)
        if quantized and f"{name}.weight" in stored:
            found.problems.append(
                f"`{name}` is stored both quantized ({', '.join(tensors.values())}) and dense (weight)"
            )
        elif quantized and f"{name}.qweight" not in stored:
            found.problems.append(f"`{name}.qweight` is missing, though `{min(tensors)}` is there")
        elif quantized:
            _choose(name, module, tensors, stored, config, group, found)
            if listed:
                found.contradictions.append(
                    f"`{name}` is on the list of modules not converted, but is stored quantized"
                )
        elif f"{name}.weight" in stored and not listed and skipped and not _is_head(name, config):
            found.contradictions.append(f"`{name}` is not on the list of modules not converted, but is stored dense")
    return found


def _is_head(name: str, config: Mapping[str, Any]) -> bool:
    return name.rpartition(".")[2] == "lm_head" and not config.get("lm_head", False)


def _settings(config: Mapping[str, Any], found: Plan) -> int:
    """The group size; what this format can't be goes to the plan's problems."""
    bits = config.get("w_bit", config.get("bits"))
    group = config.get("q_group_size", config.get("group_size"))
    version = str(config.get("version") or "gemm").lower()
    if bits != 4:
        found.problems.append(f"AWQ with bits = {bits}: only 4-bit AWQ has a known layout")
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        found.problems.append(f"AWQ with group_size = {group}: a positive number, or -1 for one group over K")
        group = -1
    if version not in _LAYOUTS:
        found.problems.append(f"AWQ version `{version}` is not supported (supported: {', '.join(_LAYOUTS)})")
    return group


def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, config: Mapping[str, Any],
    group: int, found: Plan,
) -> None:  # fmt: skip
    """Decide one module's layout by its shapes, and add it to the plan."""
    n, k = module.n, module.k
    size, groups = groups_of(group, k)
    layout = _layout(name, n, k, groups, stored, config)
    if layout is None:
        found.problems.append(
            f"`{name}.qweight` is {list(stored[f'{name}.qweight'].shape)}; for n = {n}, k = {k} AWQ's layouts are [{k}, {-(-n // 8)}] (gemm) and [{n}, {-(-k // 8)}] (gemv)"
        )
        return
    labelled = _LAYOUTS[str(config.get("version") or "gemm").lower()]
    if layout != labelled:
        found.notices.append(f"`{name}` is labelled {labelled}, but its shapes are those of {layout}, which is used")
    params = {"group": size, **float_type(stored.get(f"{name}.scales"))}
    leading: dict[str, tuple[int, ...]] = {}
    if layout == "autoawq_gemv":  # [N, 8·ZW] scales and [N, ZW] zeros, of which the first groups mean something
        wanted = {"scales": (n, groups), "qzeros": (n, -(-groups // 8))}
        for part, shape in wanted.items():
            tensor = stored.get(f"{name}.{part}")
            if (
                tensor is not None
                and tensor.dim() == 2
                and all(have >= need for have, need in zip(tensor.shape, shape))
            ):
                leading[part] = shape
    given = {}
    if not config.get("zero_point", True) and f"{name}.qzeros" not in stored:
        shape = (groups, -(-n // 8)) if layout == "autoawq" else (n, -(-groups // 8))
        given["qzeros"] = torch.full(shape, _EIGHTS, dtype=torch.int32)
    bias = has_bias(name, module, stored, found)
    why = f"4 bits, group_size {group}; qweight has the shape of {'gemm' if layout == 'autoawq' else 'gemv'}"
    found.choices[name] = Choice("awq4", params, layout, bias, tensors, leading, given, why=why)


def _layout(name: str, n: int, k: int, groups: int, stored: Headers, config: Mapping[str, Any]) -> str | None:
    """The layout whose shape qweight has; where both have it (n = k), the one whose scales fit."""
    codes, scales = stored[f"{name}.qweight"], stored.get(f"{name}.scales")
    shape = tuple(codes.shape)
    fits = []
    if shape == (k, -(-n // 8)):
        fits.append("autoawq")
    if shape == (n, -(-k // 8)):
        fits.append("autoawq_gemv")
    if len(fits) == 2 and scales is not None and scales.dim() == 2:
        by_scales = [layout for layout in fits if _scales_fit(layout, tuple(scales.shape), n, groups)]
        fits = by_scales if len(by_scales) == 1 else [_LAYOUTS[str(config.get("version") or "gemm").lower()]]
    return fits[0] if fits else None


def _scales_fit(layout: str, shape: tuple[int, ...], n: int, groups: int) -> bool:
    return shape == (groups, n) if layout == "autoawq" else shape[0] == n and shape[1] >= groups
