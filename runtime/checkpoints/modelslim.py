"""ModelSlim, for Ascend NPUs: `quant_model_description.json` gives every tensor of the checkpoint a type.

A layer is of the type of its weight.  What the files hold beside that for the NPU's own kernels (`scale_bias`, and for
layers in two phases the folded `quant_bias` and `deq_scale`) is the same numbers once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import closest_names, has_bias, is_float, kv_scales, parts

_PARTS = (
    "weight", "weight_scale", "weight_offset", "weight_scale_second", "weight_offset_second", "scale_bias",
    "input_scale", "input_offset", "deq_scale", "quant_bias", "left_trans", "right_trans", "clip_ratio", "bias",
)  # fmt: skip


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    found.skipped |= kv_scales(stored, found)
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        weight, kind = stored.get(f"{name}.weight"), config.get(f"{name}.weight")
        if kind is None and module.stack:  # one key for all experts of a layer
            kind = config.get(f"{module.stack}.weight")
        quantized = (weight is not None and not is_float(weight)) or tensors.keys() - {f"{name}.weight", f"{name}.bias"}
        if not quantized:
            if kind not in (None, "FLOAT") and weight is not None:
                found.contradictions.append(f"`{name}` is described as {kind}, but is stored dense")
            continue
        if kind is None:
            near = closest_names(f"{name}.weight", (key for key in config if key.endswith(".weight")))
            found.problems.append(f"`{name}.weight` is stored quantized, and has no type in the description{near}")
        elif not isinstance(kind, str) or kind not in _TYPES:
            what = "is stored quantized" if kind == "FLOAT" else f"is not supported (supported: {', '.join(_TYPES)})"
            found.problems.append(f"`{name}.weight`, described as {kind}, {what}")
        else:
            _choose(name, module, tensors, stored, read, config, kind, found)
    return found


def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, read: Read, config: Mapping[str, Any],
    kind: str, found: Plan,
) -> None:  # fmt: skip
    own = {part: stored[full] for full, part in tensors.items()}

    def numbers(part: str) -> torch.Tensor:
        return read(f"{name}.{part}")

    group = config.get("group_size") or 0
    chosen = _TYPES[kind](module.n, module.k, own, numbers, group if isinstance(group, int) else 0)
    if isinstance(chosen, str):
        found.problems.append(f"`{name}` is {kind}: {chosen.replace('`', f'`{name}.', 1)}")
        return
    scheme, params, layout, unread = chosen
    for part in unread:
        if part.startswith("weight_offset") and part in own and bool((numbers(part) != 0).any()):
            found.problems.append(f"`{name}.{part}` is not 0, and {kind} has no zero points of weights")
    if scheme == "w8a8_quant_bias":
        bias = True  # of integers; it has the float bias in it, which must not be added again
        if "bias" in own and not module.bias:
            found.problems.append(f"`{name}.bias` has no place in the model, whose `{name}` has no bias")
    else:
        bias = has_bias(name, module, stored, found)
    dropped = {f"{name}.{part}" for part in unread}
    kept = {full: part for full, part in tensors.items() if full not in dropped}
    found.choices[name] = Choice(
        scheme, params, layout, bias, kept, unread=tuple(sorted(dropped)), why=f"described as {kind}"
    )


# ---- types -------------------------------------------------------------------------------------------------------
# (scheme, parameters, layout, parts that say nothing more), or what is wrong, the name of the part first.
Chosen = tuple[str, dict[str, Any], str, tuple[str, ...]] | str
Numbers = Callable[[str], torch.Tensor]
Own = Mapping[str, torch.Tensor]


def _missing(part: str) -> str:
    return f"`{part}` is missing"


def _w8a8(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    """deq_scale is a float, or, for f16 models, its bits in an int64; the older writer adds the scale of the weight."""
    scale = own.get("deq_scale")
    layout = "modelslim_f16" if scale is not None and scale.dtype == torch.int64 else "modelslim"
    return "w8a8_quant_bias", {}, layout, ("weight_scale", "weight_offset", "bias")


def _w8a8_mix(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    """Both phases' tensors must be there, whichever is asked for."""
    both = ("weight_scale", "input_scale", "input_offset", "deq_scale", "quant_bias")
    missing = [part for part in both if part not in own]
    if missing:
        return _missing(missing[0])
    return "w8a8_mix", {}, "modelslim", ("weight_offset", "deq_scale", "quant_bias")


def _w8a8_dynamic(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "w8a8_dynamic", {}, "compressed_tensors", ("weight_offset",)


def _w8a16(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    scale, offset = own.get("weight_scale"), own.get("weight_offset")
    grouped = scale is not None and scale.dim() == 2 and scale.shape[1] > 1
    if grouped and group < 1:
        return f"`weight_scale` is {list(scale.shape)}, and the description has no group_size"
    size = group if grouped else "k"
    if offset is None:
        return _missing("weight_offset")
    if bool((numbers("weight_offset") != 0).any()):
        return "w8a16_asym", {"group": size, "zero_type": "f32"}, "modelslim", ()
    if grouped:
        return "w8a16_group", {"group": size}, "compressed_tensors", ("weight_offset",)
    return "w8a16", {}, "compressed_tensors", ("weight_offset",)


def _w4a8(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    """Two rows of codes in a byte; before version "1.0.0" one code, with a second level of scales where there are groups."""
    weight, unread = own.get("weight"), ("weight_offset", "weight_offset_second", "scale_bias")
    if weight is not None and tuple(weight.shape) == (n, k):
        if "weight_scale_second" in own:
            return "w4a8_group", {"group": group or 256}, "modelslim", unread
        return "w4a8_dynamic", {}, "compressed_tensors", unread
    if "scale_bias" not in own:
        return _missing("scale_bias")
    return "w4a8_dynamic", {}, "modelslim", unread


def _w4a4(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "w4a4", {"scale_type": "f32"}, "modelslim", ("weight_offset",)


def _flatquant(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "w4a4_flatquant", {}, "modelslim", ("weight_offset",)


def _fp8(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "fp8_dynamic", {}, "compressed_tensors", ("weight_offset",)


def _mxfp8(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "mxfp8a8", {}, "compressed_tensors", ()


def _mxfp4(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "mxfp4a8", {"fmt": "e2m1"}, "modelslim", ()


def _mxfp4_by_8(n: int, k: int, own: Own, numbers: Numbers, group: int) -> Chosen:
    return "mxfp4a8", {}, "modelslim", ()


_TYPES: dict[str, Callable[[int, int, Own, Numbers, int], Chosen]] = {
    "W8A8": _w8a8, "W8A8_MIX": _w8a8_mix, "W8A8_DYNAMIC": _w8a8_dynamic, "W8A16": _w8a16, "W4A8_DYNAMIC": _w4a8,
    "W4A4_DYNAMIC": _w4a4, "W4A4_FLATQUANT_DYNAMIC": _flatquant, "WFP8AFP8_DYNAMIC": _fp8, "W8A8_MXFP8": _mxfp8,
    "W4A4_MXFP4": _mxfp4, "W4A8_MXFP": _mxfp4_by_8,
}  # fmt: skip
