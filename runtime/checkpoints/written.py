"""From a scheme and one of its layouts to the configuration that says so: the inverse of the formats' plans.

AutoAWQ              awq4
compressed-tensors   integers, 8-bit floats and microscaling formats, their input as it is or quantized as it comes
fp8 of transformers  8-bit floats in square blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import qdsl
from qdsl.diagnostic import SchemeError
from qdsl.manifest import plain_params
from qdsl.runtime.resolve import resolved
from qdsl.scheme import Scheme


@dataclass(frozen=True)
class Written:
    """How a format's files say that modules are of a scheme, in a layout.

    settings    the `quantization_config` of config.json
    multiples   what n and k of a module must be multiples of, for the format's own readers
    beside      (n, k) -> what a module stores beside the tensors of the layout
    kinds       types of stored tensors, bit by bit those of the layout, where the format spells them otherwise
    """

    settings: Mapping[str, Any]
    multiples: tuple[int, int] = (1, 1)
    beside: Callable[[int, int], Mapping[str, torch.Tensor]] = lambda n, k: {}
    kinds: Mapping[str, torch.dtype] = field(default_factory=dict)


def written(scheme: Scheme, layout: str, skipped: Sequence[str]) -> Written | None:
    """What the files say; None where no format's configuration means this.

    skipped   names of the linears that stay dense
    """
    name, params = scheme.name, plain_params(scheme)
    if params.get("fmt", "e4m3") != "e4m3" or params.get("zero_type", "i8") != "i8":
        return None
    for format in (_awq, _compressed_tensors, _fp8):
        if (found := format(name, params, layout, list(skipped))) is not None:
            return found
    return None


def known_as(scheme: Scheme, layout: str) -> Scheme | None:
    """The shipped scheme that means the same in this layout, whatever the scheme is called and how it quantizes."""
    given = plain_params(scheme)
    for name in sorted(qdsl.shipped(), key=lambda name: name != scheme.name):  # its own name is the likeliest
        own = {key: value for key, value in given.items() if key in resolved(name, {}, None).params}
        try:
            shipped = resolved(name, own, None)
        except SchemeError:
            continue
        if _meaning(shipped, layout) == _meaning(scheme, layout):
            return shipped
    return None


def writable(scheme: Scheme) -> list[str]:
    """The scheme's layouts that have a configuration."""
    same = ((layout, known_as(scheme, layout)) for layout in scheme.layouts)
    return [layout for layout, shipped in same if shipped is not None and written(shipped, layout, ())]


def all_writable() -> Iterator[tuple[str, list[str]]]:
    """(shipped scheme, its layouts that have a configuration), of those that can be made from floats."""
    for name in qdsl.shipped():
        scheme = resolved(name, {}, None)
        if scheme.quantize and (layouts := [layout for layout in scheme.layouts if written(scheme, layout, ())]):
            yield name, layouts


def _meaning(scheme: Scheme, layout: str) -> tuple[Any, ...]:
    """All that decides what stored numbers mean."""
    return scheme.weight, scheme.activations, scheme.compute, scheme.output, scheme.layouts.get(layout)


# ---- AutoAWQ -----------------------------------------------------------------------------------------------------
def _awq(name: str, params: Mapping[str, Any], layout: str, skipped: list[str]) -> Written | None:
    if (name, layout) != ("awq4", "autoawq") or params["scale_type"] == "f32":
        return None
    group = params["group"]
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": -1 if group == "k" else group, "version": "gemm",
        "zero_point": True, "modules_to_not_convert": skipped or None,
    }  # fmt: skip
    return Written(settings, (8, 1 if group == "k" else group))


# ---- fp8 of transformers -----------------------------------------------------------------------------------------
def _fp8(name: str, params: Mapping[str, Any], layout: str, skipped: list[str]) -> Written | None:
    scales = {"fp8_block": "float", "fp8_block_ue8m0": "ue8m0"}
    if name not in scales or layout != "deepseek":
        return None
    settings = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [params["block"]] * 2, "fmt": "e4m3",
        "scale_fmt": scales[name], "modules_to_not_convert": skipped or None,
    }  # fmt: skip
    return Written(settings)


# ---- compressed-tensors ------------------------------------------------------------------------------------------
def _args(bits: int, kind: str, strategy: str, dynamic: bool = False, **others: Any) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs."""
    usual = {
        "actorder": None, "block_structure": None, "group_size": None, "observer": None, "observer_kwargs": {},
        "scale_dtype": None, "symmetric": True, "zp_dtype": None,
    }  # fmt: skip
    return {**usual, "num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, **others}


_INT8 = _args(8, "int", "token", True)  # of activations
_FP8 = _args(8, "float", "token", True)
_BYTES = {"scale_dtype": "torch.uint8"}


def _groups(bits: int, kind: str, group: int | str, **others: Any) -> dict[str, Any]:
    if group == "k":
        return _args(bits, kind, "channel", **others)
    return _args(bits, kind, "group", group_size=group, **others)


def _block(size: int) -> dict[str, Any]:
    return _args(8, "float", "block", block_structure=[size, size])


def _mx(bits: int, dynamic: bool = False) -> dict[str, Any]:
    return _args(bits, "float", "group", dynamic, group_size=32, **_BYTES)


# scheme -> (layout -> format), and from its parameters the arguments of weights and of activations
_Make = Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any] | None]]
_PLAIN = {"compressed_tensors": "int-quantized"}
_FLOAT = {"compressed_tensors": "float-quantized"}
_ASYMMETRIC = {"symmetric": False, "zp_dtype": "torch.int8"}
_COMPRESSED: dict[str, tuple[Mapping[str, str], _Make]] = {
    "w8a16": (_PLAIN, lambda p: (_args(8, "int", "channel"), None)),
    "w8a16_group": (_PLAIN, lambda p: (_groups(8, "int", p["group"]), None)),
    "w8a16_asym": (_PLAIN, lambda p: (_groups(8, "int", p["group"], **_ASYMMETRIC), None)),
    "w8a8_dynamic": (_PLAIN, lambda p: (_args(8, "int", "channel"), _INT8)),
    "w8a8_dynamic_asym": (_PLAIN, lambda p: (_args(8, "int", "channel"), {**_INT8, "symmetric": False})),
    "w4a8_dynamic": (_PLAIN, lambda p: (_args(4, "int", "channel"), _INT8)),
    "w4a8_fp8": (
        {"int_quantized": "int-quantized", "pack_quantized": "pack-quantized"},
        lambda p: (_groups(4, "int", p["group"]), _FP8),
    ),
    "gptq": ({"pack_quantized": "pack-quantized"}, lambda p: (_groups(p["bits"], "int", p["group"], **_ASYMMETRIC), None)),
    "gptq_sym": ({"pack_quantized": "pack-quantized"}, lambda p: (_groups(p["bits"], "int", p["group"]), None)),
    "fp8a16_tensor": (_FLOAT, lambda p: (_args(8, "float", "tensor"), None)),
    "fp8a16_channel": (_FLOAT, lambda p: (_args(8, "float", "channel"), None)),
    "fp8a16_block": (_FLOAT, lambda p: (_block(p["block"]), None)),
    "fp8_tensor_dynamic": (_FLOAT, lambda p: (_args(8, "float", "tensor"), _FP8)),
    "fp8_dynamic": (_FLOAT, lambda p: (_args(8, "float", "channel"), _FP8)),
    "fp8_block": (
        _FLOAT,
        lambda p: (_block(p["block"]), _args(8, "float", "group", True, group_size=p["block"])),
    ),
    "mxfp4": ({"compressed_tensors": "mxfp4-pack-quantized"}, lambda p: (_mx(4), None)),
    "mxfp8": ({"compressed_tensors": "mxfp8-quantized"}, lambda p: (_mx(8), None)),
    "mxfp8a8": ({"compressed_tensors": "mxfp8-quantized"}, lambda p: (_mx(8), _mx(8, True))),
    "nvfp4a16": (
        {"compressed_tensors": "nvfp4-pack-quantized"},
        lambda p: (_args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), None),
    ),
}  # fmt: skip


def _compressed_tensors(name: str, params: Mapping[str, Any], layout: str, skipped: list[str]) -> Written | None:
    formats, make = _COMPRESSED.get(name, ({}, None))
    if layout not in formats or make is None or params.get("scale_type") == "e8m0":
        return None
    weights, inputs = make(params)
    group = {"format": formats[layout], "targets": ["Linear"], "weights": weights, "input_activations": inputs,
             "output_activations": None}  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "format": formats[layout], "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": skipped, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip
    multiples = 1, weights["group_size"] or 1
    if formats[layout] == "pack-quantized":
        return Written(settings, multiples, _weight_shape)
    kinds = {"weight_scale": torch.uint8} if weights["scale_dtype"] == _BYTES["scale_dtype"] else {}
    return Written(settings, multiples, kinds=kinds)


def _weight_shape(n: int, k: int) -> dict[str, torch.Tensor]:
    return {"weight_shape": torch.tensor([n, k], dtype=torch.int64)}
