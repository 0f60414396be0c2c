"""The methods "fp8" and "fbgemm_fp8" of transformers: 8-bit floats with a scale per tensor, row or square block.

`weight_scale_inv` multiplies, despite its name, as `weight_scale` does.  Only GPTQModel, which writes "fp8" as well,
means the reciprocal, and says so (`weight_scale_semantics`); its activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qdsl.runtime import repack
from qdsl.runtime.checkpoints import Choice, Headers, Made, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import FP8, has_bias, is_float, kv_scales, listed, parts
from qdsl.runtime.checkpoints.settings import names

_PARTS = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "bias")


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    _check(config, found)
    if found.problems:
        return found
    found.skipped |= kv_scales(stored, found)
    skipped = names(config, "ignored_layers", "modules_to_not_convert")
    bound = config.get("activation_scale_ub")
    if bound is not None:
        found.notices.append(
            f"activation_scale_ub = {bound} is not applied: tokens beyond it keep a scale of their own and do not saturate"
        )
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        weight = stored.get(f"{name}.weight")
        quantized = (weight is not None and not is_float(weight)) or any("scale" in part for part in tensors.values())
        if quantized:
            _choose(name, module, tensors, stored, config, found)
            if listed(name, skipped):
                found.contradictions.append(
                    f"`{name}` is on the list of modules not converted, but is stored quantized"
                )
        elif weight is not None and skipped and not listed(name, skipped) and name.rpartition(".")[2] != "lm_head":
            found.contradictions.append(f"`{name}` is not on the list of modules not converted, but is stored dense")
    return found


def _check(config: Mapping[str, Any], found: Plan) -> None:
    """What the configuration can't be goes to the plan's problems."""
    scheme, block = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        found.problems.append(f"fp8 with activation_scheme `{scheme}` is not supported (supported: static, dynamic)")
    if block is not None:
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
            found.problems.append(f"fp8 with weight_block_size = {block}: two positive numbers, rows and columns")
        elif block[0] != block[1]:
            found.problems.append(f"fp8 with weight_block_size = {block}: no scheme has blocks that are not square")
        elif scheme == "static":
            found.problems.append("fp8 with weight_block_size and static activations: no scheme has both")
    if config.get("store_dtype"):
        found.problems.append(f"fp8 with store_dtype `{config['store_dtype']}` is not supported")
    semantics = config.get("weight_scale_semantics")
    if semantics not in (None, "inverse"):
        found.problems.append(f"fp8 with weight_scale_semantics `{semantics}` is not supported (supported: inverse)")
    if config.get("scale_fmt") not in (None, "float", "ue8m0"):
        found.problems.append(f"fp8 with scale_fmt `{config['scale_fmt']}` is not supported (supported: float, ue8m0)")


def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, config: Mapping[str, Any], found: Plan
) -> None:
    weight = stored.get(f"{name}.weight")
    if weight is not None and weight.dtype not in FP8:
        found.problems.append(
            f"`{name}.weight` is {weight.dtype}, fp8 stores 8-bit floats; its scale is {_scale(tensors)}"
        )
        return
    scale = _scale(tensors)
    if scale not in ("weight_scale", "weight_scale_inv"):
        found.problems.append(f"`{name}` has {scale}; it needs `{name}.weight_scale` or `{name}.weight_scale_inv`")
        return
    header, block = stored[f"{name}.{scale}"], (config.get("weight_block_size") or [None])[0]
    of_x = "as it is" if _reciprocal(config) else config.get("activation_scheme", "dynamic")
    chosen = _scheme(name, module, scale, header, block, of_x, config, found)
    if chosen is None:
        found.problems.append(
            f"`{name}.{scale}` is {list(header.shape)}, weight_block_size {config.get('weight_block_size')}, input {of_x}: "
            "no scheme is known for this"
        )
        return
    scheme, params, layout, made, granularity = chosen
    if weight is not None and FP8[weight.dtype] != "e4m3":
        params = {**params, "fmt": FP8[weight.dtype]}
    why = f"weight per {granularity}, input {of_x}; {scale} {'divides' if _reciprocal(config) else 'multiplies'}"
    bias = has_bias(name, module, stored, found)
    found.choices[name] = Choice(scheme, params, layout, bias, tensors, made=made, why=why)


def _scale(tensors: Mapping[str, str]) -> str:
    return " and ".join(part for part in tensors.values() if part.startswith("weight_scale")) or "no scale"


def _reciprocal(config: Mapping[str, Any]) -> bool:
    return config.get("weight_scale_semantics") == "inverse"


def _scheme(
    name: str, module: Module, scale: str, header: torch.Tensor, block: int | None, of_x: str,
    config: Mapping[str, Any], found: Plan,
) -> tuple[str, dict[str, Any], str, dict[str, Made], str] | None:  # fmt: skip
    """(scheme, parameters, layout, tensors to make, what has a scale), told by the shape of the scales."""
    n, k = module.n, module.k
    if block is not None:
        size, places = {"block": block}, (-(-n // block), -(-k // block))
        if tuple(header.shape) != places:
            return None
        if of_x == "as it is":
            return "fp8a16_block", size, "gptqmodel", {}, f"block of {block}"
        if config.get("scale_fmt") == "ue8m0" or header.dtype == getattr(torch, "float8_e8m0fnu", None):
            if scale != "weight_scale_inv":
                return None
            made = {} if header.element_size() == 1 else {scale: _powers(name, scale, places)}
            return "fp8_block_ue8m0", size, "deepseek", made, f"block of {block}"
        return (
            "fp8_block",
            size,
            "deepseek" if scale == "weight_scale_inv" else "compressed_tensors",
            {},
            f"block of {block}",
        )
    rows = header.numel() == n and tuple(header.shape) in ((n,), (n, 1))
    if header.numel() != 1 and not rows:
        return None
    whole = header.numel() == 1
    layout = "compressed_tensors" if whole or header.dim() == 2 else "modelopt"
    if scale == "weight_scale_inv":
        if not _reciprocal(config):
            return None
        made = {"weight_scale": _inverse(scale, header)}
        return f"fp8a16_{'tensor' if whole else 'channel'}", {}, layout, made, "tensor" if whole else "row"
    if _reciprocal(config):
        return None
    schemes = {
        ("static", True): "fp8_static",
        ("dynamic", True): "fp8_tensor_dynamic",
        ("dynamic", False): "fp8_dynamic",
    }
    scheme = schemes.get((of_x, whole))
    return (scheme, {}, layout, {}, "tensor" if whole else "row") if scheme else None


def _inverse(scale: str, header: torch.Tensor) -> Made:
    return Made(
        torch.empty(header.shape, dtype=torch.float32, device="meta"), (scale,), lambda own: 1 / own[scale].float()
    )


def _powers(name: str, scale: str, places: tuple[int, ...]) -> Made:
    """Exponents of scales that are stored as floats, each of them a power of two."""

    def make(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        words = repack.bits_of(own[scale].float())
        exponents = words >> 23
        wrong = ((words & 0x7FFFFF) != 0) | (exponents == 0) | (exponents >= 255)
        if wrong.any():
            raise ValueError(
                f"`{name}.{scale}` holds {own[scale].float()[torch.from_numpy(wrong)][0].item():g}, and scale_fmt `ue8m0` "
                "means powers of two"
            )
        return repack.tensor_of(exponents.astype("uint8"), torch.uint8)

    return Made(torch.empty(places, dtype=torch.uint8, device="meta"), (scale,), make)
