"""Weights read from checkpoints are, bit for bit, what the tools that wrote these checkpoints make of them.

`data/formats` holds a slice of one layer of each format; its README says where they come from.  $QDSL_FIXTURES may name
a folder of whole checkpoints in addition: `NAME/*.safetensors`, with the tool's own decoded weights in
`NAME/reference_dequant.safetensors`.  A name in `READINGS` says how its file is read, and a format is read in every way
that its schemes offer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import qdsl
from qdsl import reference
from qdsl.dtype import F32
from qdsl.runtime import QuantLinear, repack
from qdsl.scheme import Scheme

DATA = Path(__file__).parent / "data"
SLICES = {path.stem: path for path in sorted((DATA / "formats").glob("*.safetensors"))}
FIXTURES = Path(os.environ["QDSL_FIXTURES"]) if os.environ.get("QDSL_FIXTURES") else None
NONE = pytest.param("", marks=pytest.mark.skip(reason="QDSL_FIXTURES names no folder of checkpoints"))


@dataclass(frozen=True)
class Reading:
    """One way to read a checkpoint: a scheme, its parameters and a layout, for modules whose names match."""

    scheme: str
    layout: str
    params: Mapping[str, Any] = field(default_factory=dict)
    modules: str = ""

    def __str__(self) -> str:
        return "-".join([self.scheme, self.layout, *(f"{v}" for v in self.params.values())])


def read(scheme: str, layout: str, modules: str = "", **params: Any) -> Reading:
    return Reading(scheme, layout, params, modules)


def gptq(layout: str, **params: Any) -> list[Reading]:
    """With the stored zeros and, as these are the middle code, without; the groups lie in order."""
    return [
        read("gptq", layout, **params),
        read("gptq_actorder", layout, **params),
        read("gptq_sym", "gptq", **params),
        read("gptq_sym_actorder", "gptq", **params),
    ]


READINGS: dict[str, list[Reading]] = {
    # AutoAWQ
    "awq_g128": [read("awq4", "autoawq")],
    "awq_g32": [read("awq4", "autoawq", group=32)],
    "awq_gemv_g128": [read("awq4", "autoawq_gemv")],
    "awq_moe_mixtral_g64": [read("awq4", "autoawq", group=64)],
    # GPTQModel.  It shifts whole words of zeros, save for odd widths.
    "gptq_moe_qwen3moe_g64": gptq("gptqmodel_v1", group=64),
    "gptq_p_5bit_g128": [read("gptq", "gptq_planar", bits=5), read("gptq_actorder", "gptq_planar", bits=5)],
    "gptq_v1_asym_3bit_g64": [
        read("gptq", "gptq_v1", bits=3, group=64),
        read("gptq_actorder", "gptq_v1", bits=3, group=64),
    ],
    "gptq_v1_asym_edge_8bit_g64": [read("gptq", "gptqmodel_v1", bits=8, group=64)],
    "gptq_v1_asym_g128": [read("gptq", "gptqmodel_v1"), read("gptq_actorder", "gptqmodel_v1")],
    "gptq_v1_dynamic": [
        *gptq("gptqmodel_v1", modules=r"\.0\."),
        *gptq("gptqmodel_v1", modules=r"\.1\.mlp", bits=8, group=64),
    ],
    "gptq_v1_sym_2bit_g64": gptq("gptqmodel_v1", bits=2, group=64),
    "gptq_v1_sym_3bit_g128": gptq("gptq_v1", bits=3),
    "gptq_v1_sym_8bit_g128": gptq("gptqmodel_v1", bits=8),
    "gptq_v1_sym_g128": gptq("gptqmodel_v1"),
    "gptq_v1_sym_g64_descact": [
        read("gptq_actorder", "gptqmodel_v1", group=64),
        read("gptq_actorder", "gptq_v1", group=64),
        read("gptq_sym_actorder", "gptq", group=64),
    ],
    "gptq_v1_sym_g64_descact_static": gptq("gptqmodel_v1", group=64),
    "gptq_v1_sym_gm1": gptq("gptqmodel_v1", group="k"),
    "gptq_v2_asym_3bit_g64": [read("gptq", "gptq_v2", bits=3, group=64)],
    "gptq_v2_sym_g128": gptq("gptq_v2"),
    # compressed-tensors
    "ct_fp8_block128": [read(name, "compressed_tensors") for name in ("fp8a16_block", "fp8_block")],
    "ct_fp8_dynamic_channel": [read(name, "compressed_tensors") for name in ("fp8a16_channel", "fp8_dynamic")],
    "ct_fp8_static_tensor": [
        read(name, "compressed_tensors") for name in ("fp8a16_tensor", "fp8_static", "fp8_tensor_dynamic")
    ],
    "ct_int4_sym_g64": [read("gptq_sym", "int_quantized", group=64, scale_type="bf16")],
    "ct_int8_asym_g64": [read("w8a16_asym", "compressed_tensors", group=64)],
    "ct_int8_sym_g64": [read("w8a16_group", "compressed_tensors", group=64)],
    "ct_int8_w8a8_dynamic": [read(name, "compressed_tensors") for name in ("w8a16", "w8a8_dynamic")],
    "ct_int8_w8a8_static_asym": [read(name, "compressed_tensors") for name in ("w8a16", "w8a8_static")],
    "ct_mixed_w4_w8": [
        read("w8a16", "compressed_tensors", modules="self_attn"),
        read("gptq_sym", "pack_quantized", modules="mlp", scale_type="bf16"),
    ],
    "ct_mxfp4a16": [read(name, "compressed_tensors") for name in ("mxfp4", "mxfp4a8")],
    "ct_mxfp8a16": [read(name, "compressed_tensors") for name in ("mxfp8", "mxfp8a8")],
    "ct_nvfp4": [read(name, "compressed_tensors") for name in ("nvfp4a16", "nvfp4")],
    "ct_nvfp4a16": [read("nvfp4a16", "compressed_tensors")],
    "ct_w3a16_padded_sym_g64": [read("gptq_sym", "pack_quantized_padded", bits=3, group=64, scale_type="bf16")],
    "ct_w3a16_sym_g128": [read("gptq_sym", "pack_quantized", bits=3, scale_type="bf16")],
    "ct_w4a16_actorder_group_sym_g64_ct0110": [
        read("gptq_sym_actorder", "pack_quantized", group=64, scale_type="bf16"),
    ],
    "ct_w4a16_actorder_weight_g64": [read("gptq_sym", "pack_quantized", group=64)],
    "ct_w4a16_asym_g128": [read("gptq", "pack_quantized")],
    "ct_w4a16_channel": [read("gptq_sym", "pack_quantized", group="k", scale_type="bf16")],
    "ct_w4a16_sym_g128": [read("gptq_sym", "pack_quantized", scale_type="bf16")],
    "ct_w4afp8": [read("gptq_sym", "int_quantized", scale_type="bf16"), read("w4a8_fp8", "int_quantized")],
    "ct_w5a16_padded_sym_g64": [read("gptq_sym", "pack_quantized_padded", bits=5, group=64, scale_type="bf16")],
    "ct_w6a16_padded_sym_g64": [read("gptq_sym", "pack_quantized_padded", bits=6, group=64, scale_type="bf16")],
    "ct_w7a16_padded_sym_g64": [read("gptq_sym", "pack_quantized_padded", bits=7, group=64, scale_type="bf16")],
    "ct_w8a16_asym_g64": [read("gptq", "pack_quantized", bits=8, group=64, scale_type="bf16")],
    "ct_w8a16_sym_g128": [read("gptq_sym", "pack_quantized", bits=8)],
    # the method "fp8" of transformers, and ModelOpt
    "fp8_block128_float": [read(name, "deepseek") for name in ("fp8a16_block", "fp8_block")],
    "fp8_block128_ue8m0": [
        *(read(name, "deepseek", scale_type="e8m0") for name in ("fp8a16_block", "fp8_block")),
        read("fp8_block_ue8m0", "deepseek"),
    ],
    "mo_fp8": [read(name, "compressed_tensors") for name in ("fp8a16_tensor", "fp8_static", "fp8_tensor_dynamic")],
    "mo_fp8_channel": [read(name, "modelopt") for name in ("fp8a16_channel", "fp8_dynamic")],
    "mo_mxfp8": [read(name, "compressed_tensors") for name in ("mxfp8", "mxfp8a8")],
    "mo_nvfp4": [read(name, "modelopt") for name in ("nvfp4a16", "nvfp4")],
    # bitsandbytes, HQQ, GGUF
    "bnb_fp4": [read("bnb_fp4", "bitsandbytes")],
    "bnb_int8": [read("w8a16_group", "bitsandbytes", group="k")],
    "bnb_nf4": [read("nf4", "bitsandbytes")],
    "bnb_nf4_dq": [read("nf4", "bitsandbytes")],
    "gguf_q4_0": [read("q4_0", "gguf")],
    "gguf_q4_1": [read("q4_1", "gguf")],
    "gguf_q8_0": [read("q8_0", "gguf")],
    "hqq_1bit_g64": [read("hqq", "hqq", bits=1)],
    "hqq_2bit_g64": [read("hqq", "hqq", bits=2)],
    "hqq_4bit_g64": [read("hqq", "hqq", bits=4)],
    "hqq_8bit_g64": [read("hqq", "hqq", bits=8)],
    # ModelSlim
    "ms_w4a4_dynamic": [
        read("gptq_sym", "int_quantized", group="k", scale_type="f32"),
        read("w4a4", "modelslim", scale_type="f32"),
    ],
    "ms_w4a4_flatquant": [
        read("gptq_sym", "int_quantized", group="k", scale_type="f32"),
        read("w4a4_flatquant", "modelslim"),
    ],
    "ms_w4a8_dynamic": [read("w4a8_dynamic", "modelslim")],
    "ms_w8a16_asym": [read("w8a16_asym", "modelslim", zero_type="f32")],
    "ms_w8a16_asym_g64": [read("w8a16_asym", "modelslim", group=64, zero_type="f32")],
    "ms_w8a16_sym": [
        read("w8a16", "compressed_tensors"),
        read("w8a16_group", "compressed_tensors", group="k"),
        read("w8a16_asym", "modelslim", zero_type="f32"),
    ],
    "ms_w8a8_dynamic": [read(name, "compressed_tensors") for name in ("w8a16", "w8a8_dynamic")],
    "ms_w8a8_mix": [read("w8a8_mix", "modelslim"), read("w8a8_dynamic", "compressed_tensors")],
}
NOT_WEIGHTS_ALONE = {"ms_w8a8_bf16"}  # the scale of its weight times that of x is stored: see `qdsl.slope`


# ---- what a layout does not say ----------------------------------------------------------------------------------
def groups_trimmed(tensors: dict[str, torch.Tensor], n: int, k: int) -> dict[str, torch.Tensor]:
    """AutoAWQ's "gemv" stores more groups than there are."""
    groups = -(-k // 128)
    zeros, scales = tensors["qzeros"][:, : -(-groups // 8)], tensors["scales"][:, :groups]
    return {**tensors, "qzeros": zeros.contiguous(), "scales": scales.contiguous()}


def absmax_decoded(tensors: dict[str, torch.Tensor], n: int, k: int) -> dict[str, torch.Tensor]:
    """bitsandbytes quantizes the absmax of a weight once more, in runs of 256 that take no notice of rows."""
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    codes, table = tensors["weight.absmax"].long(), tensors["weight.nested_quant_map"]
    factors = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(codes)]
    return {**tensors, "weight.absmax": table[codes] * factors + torch.tensor(state["nested_offset"])}


UNSIGNED_ZERO = {"mo_nvfp4"}  # ModelOpt makes 0 of the code of -0
PREPARED = {"awq_gemv_g128": groups_trimmed, "bnb_nf4_dq": absmax_decoded}


# ---- reading -----------------------------------------------------------------------------------------------------
WROTE = ("ref_input", "ref_flat_input", "ref_output", "float_output")


@dataclass(frozen=True)
class Layer:
    """One module: its tensors by the names within it, the weight that the tool decodes from them, and by name, what else
    the tool wrote of it: inputs, outputs, inputs that were transformed."""

    module: str
    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    wrote: dict[str, torch.Tensor]


def layers(name: str) -> Iterator[Layer]:
    """Every module of a slice or a checkpoint whose decoded weight is known."""
    path = SLICES.get(name)
    if path is not None:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            module = (file.metadata() or {}).get("module", "")
        weight = tensors.pop("reference")
        wrote = {key: tensors.pop(key) for key in WROTE if key in tensors}
        yield Layer(module, tensors, weight, wrote)
        return
    yield from _checkpoint(DATA / name, name)


def _checkpoint(directory: Path, name: str) -> Iterator[Layer]:
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if file.name != "reference_dequant.safetensors":
            stored |= load_file(file)
    # AWQ's two layouts hold the same weights, and only one of them comes with a reference
    known = directory.parent / ("awq_g128" if name == "awq_gemv_g128" else name) / "reference_dequant.safetensors"
    found = load_file(known)
    for key, weight in found.items():
        module, _, last = key.rpartition(".")
        tensors = {part.removeprefix(f"{module}."): t for part, t in stored.items() if part.startswith(f"{module}.")}
        if last == "weight" and not (tensors.keys() <= {"weight", "bias"} and weight.dtype == tensors["weight"].dtype):
            wrote = {name: found[f"{module}.{name}"] for name in WROTE if f"{module}.{name}" in found}
            yield Layer(module, tensors, weight, wrote)


def readings(name: str, layer: Layer) -> list[Reading]:
    return [reading for reading in READINGS[name] if re.search(reading.modules, layer.module)]


def patterns(
    scheme: Scheme, reading: Reading, tensors: Mapping[str, torch.Tensor], n: int, k: int
) -> dict[str, np.ndarray]:
    """Bit patterns of the tensors of the weight, and of the activations, where the file has those; what does not fit the
    layout fails here, as it does when a layer loads."""
    storage, sizes = scheme.layouts[reading.layout], {"e": 1, "m": 1, "n": n, "k": k}
    wanted = {tensor.name: tensor for tensor in scheme.weight.loaded}
    of_x = {tensor.name: tensor for a in scheme.activations for tensor in a.operand.loaded}
    wanted |= {b.tensor: of_x[b.tensor] for b in storage.bindings if b.tensor in of_x and b.source in tensors}
    problems = repack.mismatches(scheme, storage, tensors, "", sizes, wanted)
    assert not problems, "\n".join(map(str, problems))
    bindings = [binding for binding in storage.bindings if binding.tensor in wanted]
    return {b.tensor: repack.read(scheme, storage, b, tensors, "", sizes) for b in bindings}


def check(name: str, layer: Layer) -> None:
    """Every reading of a layer gives the tool's weight, in its type, and the codes are written back as they were."""
    n, k = layer.weight.shape
    tensors = PREPARED[name](layer.tensors, n, k) if name in PREPARED else layer.tensors
    found = readings(name, layer)
    assert found, f"no reading of {name} is for {layer.module}"
    kind = repack.format_of(layer.weight.dtype)
    assert kind is not None, "tools decode to floats that torch computes with"
    for reading in found:
        scheme = qdsl.load(reading.scheme, **reading.params)
        given = patterns(scheme, reading, tensors, n, k)
        exact = reference.decode_weight(scheme, given, n, k)
        exact = exact + 0.0 if name in UNSIGNED_ZERO else exact
        bits, expected = kind.encode(F32.round(exact)), repack.bits_of(layer.weight)  # tools multiply in f32
        wrong = np.argwhere(bits != expected)
        assert not len(wrong), f"{name}, {layer.module}, {reading}: {len(wrong)} differ, first at {wrong[0]}"
        assert written_back(scheme, reading, given, tensors), f"{name}, {layer.module}, {reading}"


def written_back(
    scheme: Scheme, reading: Reading, given: Mapping[str, np.ndarray], tensors: Mapping[str, torch.Tensor]
) -> bool:
    """Whether writing what was read gives the stored codes."""
    storage = scheme.layouts[reading.layout]
    written = repack.write(scheme, storage, given)
    sources = [b.source for b in storage.bindings if scheme.tensor(b.tensor).role == "code"]
    return all(np.array_equal(*(repack.bits_of(t[s]).ravel() for t in (written, tensors))) for s in sources)


@pytest.mark.parametrize("name", ["awq_g128", "awq_gemv_g128", *SLICES])
def test_a_slice_of_every_format(name):
    found = list(layers(name))
    assert found
    for layer in found:
        check(name, layer)


@pytest.mark.parametrize("name", sorted(p.name for p in FIXTURES.iterdir() if p.is_dir()) if FIXTURES else [NONE])
def test_whole_checkpoints(name):
    if name in NOT_WEIGHTS_ALONE:
        pytest.skip("its weight is not stored alone")
    found = list(_checkpoint(FIXTURES / name, name))
    assert found
    for layer in found:
        check(name, layer)


# ---- activations -------------------------------------------------------------------------------------------------
def quantized(name: str, scheme: str, phase: str = "", **params: Any) -> Iterator[tuple]:
    """Every layer of a slice or a checkpoint that the tool ran: (the layer as qdsl loads it, the bit patterns it holds,
    the tool's weight, what else it wrote)."""
    whole = FIXTURES is not None and (FIXTURES / name).is_dir()
    known = [*(layers(name) if name in SLICES else ()), *(_checkpoint(FIXTURES / name, name) if whole else ())]
    ran = [found for found in known if "ref_input" in found.wrote]
    if not ran:
        pytest.skip("QDSL_FIXTURES names no folder with it")
    for found in ran:
        n, k = found.weight.shape
        loaded = qdsl.load(scheme, act="f32", **params)
        bias = any(t.role == "bias" and not t.optional for t in loaded.output.tensors)
        layer = QuantLinear(loaded, k, n, bias, phase=phase).load(found.tensors, layout="modelslim")
        sizes = {"e": 1, "m": 1, "n": n, "k": k}
        bindings = [b for b in loaded.layouts["modelslim"].bindings if b.source in found.tensors]
        held = {
            b.tensor: repack.read(loaded, loaded.layouts["modelslim"], b, found.tensors, "", sizes) for b in bindings
        }
        yield layer, held, found.weight, found.wrote


def apart(found: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    expected = expected.double().numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "scheme", "phase"),
    [
        ("ms_w8a8_bf16", "w8a8_quant_bias", ""),
        ("ms_w8a8_mix", "w8a8_quant_bias", ""),
        ("ms_w8a8_mix", "w8a8_mix", "decode"),
    ],
)
def test_calibrated_integers_are_the_tools_own(name, scheme, phase):
    """ModelSlim's forward of a static layer, by the reference to the last bits of float32, and by a layer to its bound."""
    for layer, held, weight, wrote in quantized(name, scheme, phase):
        x = wrote["ref_input"]
        expected = reference.linear(layer.scheme, x.double().numpy(), held, layer.out_features, phase=phase)
        assert apart(expected.y, wrote["ref_output"]) < 5e-7
        assert (np.abs(layer(x).double().numpy() - expected.y) <= expected.bound).all()
        if scheme == "w8a8_quant_bias":
            assert torch.equal(layer.dequantize(torch.float32), weight)


def test_a_transform_is_the_tools_own():
    for layer, held, _, wrote in quantized("ms_w4a4_flatquant", "w4a4_flatquant"):
        x = wrote["ref_input"].double().numpy()
        values = {name: F32.decode(held[name]) for name in ("left", "right")}
        (transform,) = layer.scheme.activation().transforms
        assert apart(reference.apply_transform(transform, x, values), wrote["ref_flat_input"]) < 1e-6
        expected = reference.linear(layer.scheme, x, held, layer.out_features)
        assert (np.abs(layer(wrote["ref_input"]).double().numpy() - expected.y) <= expected.bound).all()


@pytest.mark.parametrize(
    ("name", "scheme", "params", "off"),
    [
        ("ms_w4a4_dynamic", "w4a4", {"scale_type": "f32"}, 0.35),
        ("ms_w4a4_flatquant", "w4a4_flatquant", {}, 0.25),
        ("ms_w4a8_dynamic", "w4a8_dynamic", {}, 0.2),
        ("ms_w8a8_mix", "w8a8_mix", {}, 0.04),
    ],
)
def test_activations_per_token_come_near_the_float_layer(name, scheme, params, off):
    """No tool's numbers to the bit: its emulation takes scales along the other axis."""
    for layer, held, _, wrote in quantized(name, scheme, **params):
        if "float_output" not in wrote:  # a slice
            continue
        x, right = wrote["ref_input"], wrote["float_output"].double().numpy()
        expected = reference.linear(layer.scheme, x.double().numpy(), held, layer.out_features)
        assert (np.abs(layer(x).double().numpy() - expected.y) <= expected.bound).all()
        assert np.linalg.norm(expected.y - right) < off * np.linalg.norm(right)


def test_codes_that_a_tool_rounds_in_float32_are_inside_the_bound():
    """ModelSlim's per-token int4 forward: one code of a layer lies next to a tie, and is the neighbour there."""
    for layer, held, _, wrote in quantized("ms_w4a4_dynamic", "w4a4", scale_type="f32"):
        expected = reference.linear(layer.scheme, wrote["ref_input"].double().numpy(), held, layer.out_features)
        assert (np.abs(wrote["ref_output"].double().numpy() - expected.y) <= expected.bound).all()


def test_every_slice_says_who_wrote_it():
    for name, path in SLICES.items():
        with safe_open(path, "pt") as file:
            assert re.search(r"\d+\.\d+", file.metadata()["writer"]), name
            assert file.metadata()["reference"], name
    assert sum(path.stat().st_size for path in SLICES.values()) < 450_000


def test_zeros_that_borrow_are_in_the_data():
    """GPTQModel subtracts from whole words: a reader that adds to each field is wrong about a zero above another of 0."""
    (layer,) = layers("gptq_v1_asym_edge_8bit_g64")
    n, k = layer.weight.shape
    scheme = qdsl.load("gptq", bits=8, group=64)
    whole, fields = (
        patterns(scheme, read("gptq", layout), layer.tensors, n, k)["z"] for layout in ("gptqmodel_v1", "gptq_v1")
    )
    assert (whole == 0).any()
    assert (whole != fields).any()


def test_groups_out_of_order_are_in_the_data():
    for name, index in {
        "gptq_v1_sym_g64_descact": "g_idx",
        "ct_w4a16_actorder_group_sym_g64_ct0110": "weight_g_idx",
    }.items():
        (layer,) = layers(name)
        assert (layer.tensors[index].diff() < 0).any(), name
