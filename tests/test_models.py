"""Whole checkpoints as other people's tools wrote them: they load into a model, weights to the bit, or say why not.

$QDSL_FIXTURES names the folder of the checkpoints; each has the tool's own decoded weights in
`reference_dequant.safetensors`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qdsl
from logits import held, quantized, shares_of_bounds
from qdsl import reference
from qdsl.dtype import F32
from qdsl.runtime import QuantLinear, QuantStack, load_quantized, repack

transformers = pytest.importorskip("transformers")

FIXTURES = Path(os.environ["QDSL_FIXTURES"]) if os.environ.get("QDSL_FIXTURES") else None
LOADED = {  # the layers that are quantized, of those of the model; a stack of experts is one
    "awq_g128": 7, "awq_g32": 7, "awq_gemv_g128": 7, "awq_moe_mixtral_g64": 7, "gptq_moe_qwen3moe_g64": 7,
    "gptq_p_5bit_g128": 7, "gptq_v1_asym_3bit_g64": 7, "gptq_v1_asym_edge_8bit_g64": 7, "gptq_v1_asym_g128": 7,
    "gptq_v1_dynamic": 10, "gptq_v1_sym_2bit_g64": 7, "gptq_v1_sym_3bit_g128": 7, "gptq_v1_sym_8bit_g128": 7,
    "gptq_v1_sym_g128": 7, "gptq_v1_sym_g64_descact": 7, "gptq_v1_sym_g64_descact_static": 7, "gptq_v1_sym_gm1": 7,
    "gptq_v2_asym_3bit_g64": 7, "gptq_v2_sym_g128": 7,
    "ct_fp8_block128": 7, "ct_fp8_dynamic_channel": 7, "ct_fp8_static_tensor": 7, "ct_int8_w8a8_dynamic": 7,
    "ct_int8_w8a8_static_asym": 7, "ct_mixed_w4_w8": 10, "ct_mxfp4a16": 7, "ct_mxfp8a16": 7, "ct_nvfp4": 7,
    "ct_nvfp4a16": 7, "ct_w3a16_sym_g128": 7, "ct_w4a16_actorder_group_sym_g64_ct0110": 7,
    "ct_w4a16_actorder_weight_g64": 7, "ct_w4a16_asym_g128": 7, "ct_w4a16_channel": 7, "ct_w4a16_sym_g128": 7,
    "ct_w4afp8": 7, "ct_w8a16_sym_g128": 7,
    "fp8_block128_float": 7, "fp8_block128_ue8m0": 7, "mo_fp8": 7, "bnb_nf4_dq": 7,
    "ms_w4a4_dynamic": 7, "ms_w4a4_flatquant": 7, "ms_w4a8_dynamic": 7, "ms_w8a16_sym": 7, "ms_w8a8_bf16": 7,
    "ms_w8a8_dynamic": 7, "ms_w8a8_mix": 7,
}  # fmt: skip
SAME_AS = {"awq_gemv_g128": "awq_g128"}  # the checkpoint that has its reference
EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
needs_fixtures = pytest.mark.skipif(FIXTURES is None, reason="QDSL_FIXTURES names no folder of checkpoints")


def built(directory, kind=torch.float32):
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()


def layer_of(model, module):
    """The layer that the tool calls so: one of the model, or of a stack that has it."""
    if ".experts." not in module:
        return model.get_submodule(module)
    stack, e, own = re.fullmatch(r"(.*)\.(\d+)\.(\w+)", module.replace("block_sparse_moe", "mlp")).groups()
    return model.get_submodule(f"{stack}.{EXPERTS.get(own, own)}").member(int(e))


@needs_fixtures
@pytest.mark.parametrize("name", LOADED)
def test_a_checkpoint_loads_whole(name):
    directory = FIXTURES / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_quantized(built(directory), directory)
    layers = quantized(model)
    assert len(layers) == LOADED[name] and isinstance(model.lm_head, nn.Linear)
    weights_are_the_tools_own(name, model)
    outputs_are_within_their_bounds(model, layers)
    shares = shares_of_bounds(model, torch.arange(4)[None] * 19 % 512)
    assert all(share <= 1 for share in shares.values()), shares


def weights_are_the_tools_own(name, model):
    """Every weight whose decoded form the tool gave, to the bit; tools multiply in float32 and round that."""
    compared = 0
    for key, expected in load_file(FIXTURES / SAME_AS.get(name, name) / "reference_dequant.safetensors").items():
        module, _, last = key.rpartition(".")
        if last != "weight":
            continue
        layer = layer_of(model, module)
        kind = repack.format_of(expected.dtype)
        if isinstance(layer, QuantLinear):
            found = kind.encode(F32.round(layer.dequantize().numpy()))
        else:
            found = repack.bits_of(layer.weight.detach().to(expected.dtype))
        assert np.array_equal(found, repack.bits_of(expected)), key
        compared += isinstance(layer, QuantLinear)
    assert compared


def outputs_are_within_their_bounds(model, layers):
    """Each layer, on what reaches it in a forward of the model, is within the bound derived from its declaration."""
    seen = {}
    hooks = [  # an expert of a stack is called with its number
        layer.register_forward_hook(lambda layer, given, y, name=name: seen.update({(name, *given[1:]): (given[0], y)}))
        for name, layer in layers.items()
    ]
    with torch.inference_mode():
        logits = model(torch.arange(24).reshape(2, 12) * 19 % 512).logits
    for hook in hooks:
        hook.remove()
    assert torch.isfinite(logits).all() and {name for name, *_ in seen} == layers.keys()
    for (name, *e), found in seen.items():
        layer = layers[name].member(*e) if e else layers[name]
        x, y = (t.reshape(-1, t.shape[-1]).double().numpy() for t in found)
        expected = reference.linear(layer.scheme, x, held(layer), layer.out_features, phase=layer.phase)
        assert (np.abs(y - expected.y) <= expected.bound).all(), name


@needs_fixtures
@pytest.mark.parametrize("name", LOADED)
def test_two_ranks_have_a_checkpoint_together(name):
    directory = FIXTURES / name
    if name == "ms_w4a4_flatquant":
        with pytest.raises(qdsl.CheckpointError, match=r"o_proj: .* transforms x before it is quantized"):
            load_quantized(built(directory), directory, shard=(0, 2))
        return
    plan = None
    if "_moe_" in name:
        with pytest.raises(qdsl.CheckpointError, match=r"mlp\.experts: experts can't be split over ranks"):
            load_quantized(built(directory), directory, shard=(0, 2))
        plan = {f"model.layers.*.self_attn.{each}_proj": "colwise" for each in "qkv"}
        plan["model.layers.*.self_attn.o_proj"] = "rowwise"
    whole = load_quantized(built(directory), directory)
    ranks = [load_quantized(built(directory), directory, shard=(rank, 2), tp_plan=plan) for rank in range(2)]
    for at, layer in quantized(whole).items():
        if isinstance(layer, QuantStack):  # every rank has all experts
            for rank in ranks:
                same = rank.get_submodule(at)
                assert all(torch.equal(layer.member(e).dequantize(), same.member(e).dequantize()) for e in range(4))
            continue
        axis, parts = int(at.endswith(("o_proj", "down_proj"))), [rank.get_submodule(at) for rank in ranks]
        size = (layer.out_features, layer.in_features)[axis] // 2
        own = [part.dequantize().narrow(axis, -size, size) for part in parts]
        assert torch.equal(torch.cat(own, axis), layer.dequantize()), at


@needs_fixtures
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_model_has_a_role(phase):
    directory = FIXTURES / "ms_w8a8_mix"
    model = load_quantized(built(directory), directory, phase=phase)
    layers = quantized(model)
    assert all(layer.phase == phase for layer in layers.values())
    outputs_are_within_their_bounds(model, layers)
    with pytest.raises(qdsl.CheckpointError, match=r"has no phase `decoding` \(it has: prefill, decode\)"):
        load_quantized(built(directory), directory, phase="decoding")
    dense = FIXTURES / "ms_w8a8_dynamic"
    with pytest.raises(qdsl.CheckpointError, match=r"no layer of it has phases"):
        load_quantized(built(dense), dense, phase="decode")


@needs_fixtures
def test_zero_points_under_the_wrong_label_may_be_overruled(tmp_path):
    right, directory = FIXTURES / "gptq_v2_asym_3bit_g64", tmp_path / "checkpoint"
    shutil.copytree(right, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= {"checkpoint_format": "gptq", "format": "gptq"}
    (directory / "config.json").write_text(json.dumps(config))
    model = load_quantized(built(directory), directory, settings={"checkpoint_format": "gptq_v2"})
    weights_are_the_tools_own(right.name, model)
    with pytest.raises(AssertionError):
        weights_are_the_tools_own(right.name, load_quantized(built(directory), directory))


@needs_fixtures
@pytest.mark.parametrize("name", ["gptq_v1_sym_g64_descact", "ct_nvfp4", "ms_w8a8_bf16", "awq_moe_mixtral_g64"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_models_of_16_bits(name, kind):
    directory = FIXTURES / name
    model = load_quantized(built(directory), directory, dtype=kind)
    with torch.inference_mode():
        assert model(torch.arange(5)[None]).logits.dtype == kind
    weights_are_the_tools_own(name, model)
    outputs_are_within_their_bounds(model, quantized(model))
