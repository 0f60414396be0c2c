"""`from_pretrained` and `save_pretrained` through qdsl, with the transformers that is installed."""

from __future__ import annotations

import json
import logging
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import AWQ, DOWN, built, quantized
from test_convert import MIXTRAL, same, stored
from test_models import FIXTURES, needs_fixtures
from torch import nn

import qdsl
from qdsl.runtime import load_quantized
from qdsl.runtime.conversion import convert

transformers = pytest.importorskip("transformers", "5.12")

from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402  (an extra)
from transformers.quantizers import auto  # noqa: E402

from qdsl.runtime.transformers import QdslConfig  # noqa: E402

TOKENS = torch.arange(1, 25).reshape(2, 12) * 19 % 512


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return convert(AWQ, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture
def silent(caplog, monkeypatch):
    """Neither Python nor transformers may warn, of missing and unexpected tensors for instance."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        yield
    assert not caplog.records, caplog.text


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


# ---- right -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("kind", ["auto", torch.float32, torch.bfloat16])
def test_another_tools_checkpoint_is_read_as_load_quantized_reads_it(kind):
    model = AutoModelForCausalLM.from_pretrained(AWQ, quantization_config=QdslConfig(), dtype=kind)
    assert model.dtype == (torch.float16 if kind == "auto" else kind) and len(quantized(model)) == 7
    assert all(not m.training and m.dtype == model.dtype for m in quantized(model).values())
    right = load_quantized(built(kind=model.dtype), AWQ)
    assert same(model, right) and torch.equal(logits(model), logits(right))


@pytest.mark.usefixtures("silent")
def test_a_converted_checkpoint_needs_no_configuration(converted):
    model = AutoModelForCausalLM.from_pretrained(converted, torch_dtype=torch.float32)
    right = load_quantized(built(), AWQ)
    assert same(model, right)
    one, two = (m.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, right))
    assert torch.equal(one, two) and one.shape == (2, 18)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("size", ["50GB", "100KB"])
def test_what_is_saved_is_loaded_again(tmp_path, size):
    model = AutoModelForCausalLM.from_pretrained(AWQ, quantization_config=QdslConfig(batch_invariant=True))
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "qdsl", "format": 1}
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == (1 if size == "50GB" else 6)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same(again, model) and torch.equal(logits(again), logits(model))
    assert same(load_quantized(built(kind=model.dtype), tmp_path / "saved"), model)
    assert not any(layer.batch_invariant for layer in quantized(again).values())


@pytest.mark.usefixtures("silent")
def test_a_save_over_a_sharded_one_leaves_an_index_that_counts_no_more(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() and (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert isinstance(model.dequantize().lm_head, torch.nn.Linear), "saving makes its type a word"


def test_saving_writes_what_converting_writes(converted, tmp_path):
    AutoModelForCausalLM.from_pretrained(converted).save_pretrained(tmp_path)
    one, two = stored(tmp_path), stored(converted)
    assert one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


@pytest.mark.usefixtures("silent")
def test_a_float_checkpoint_is_quantized_as_it_is_loaded(tmp_path):
    floats = built(kind=torch.float16)
    del floats.config.quantization_config
    floats.save_pretrained(tmp_path / "floats")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=QdslConfig("awq4", group=64))
    right = load_quantized(built(kind=torch.float16), tmp_path / "floats", scheme="awq4", params={"group": 64})
    assert len(quantized(model)) == 7 and same(model, right)
    model.save_pretrained(tmp_path / "saved")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


@pytest.mark.usefixtures("silent")
def test_experts(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(MIXTRAL, quantization_config=QdslConfig())
    right = load_quantized(built(MIXTRAL, model.dtype), MIXTRAL)
    assert same(model, right) and torch.equal(logits(model), logits(right))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(again, model) and torch.equal(logits(again), logits(model))
    with pytest.raises(qdsl.Error, match="experts stay quantized"):
        model.dequantize()


@pytest.mark.filterwarnings("ignore:.*`lm_head.weight`:UserWarning")
@pytest.mark.parametrize("own", [True, False])
def test_a_model_without_its_head(own, converted):
    options = {} if own else {"quantization_config": QdslConfig()}
    source = converted if own else AWQ
    whole, tokens = AutoModelForCausalLM.from_pretrained(source, **options), torch.arange(5)[None]
    part = AutoModel.from_pretrained(source, **options)
    assert quantized(part).keys() == {name.removeprefix("model.") for name in quantized(whole)}
    assert torch.equal(part(tokens).last_hidden_state, whole.model(tokens).last_hidden_state)


def test_devices(converted):
    pytest.importorskip("accelerate")
    right = AutoModelForCausalLM.from_pretrained(converted)
    for device in ("cpu", "auto", {"": "cpu"}, torch.device("cpu")):
        assert same(AutoModelForCausalLM.from_pretrained(converted, device_map=device), right)


def test_the_floats_of_a_quantized_model(converted):
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    weights = {name: layer.dequantize(torch.float32) for name, layer in quantized(model).items()}
    dense = model.dequantize()
    assert dense is model and not quantized(dense) and not hasattr(dense.config, "quantization_config")
    assert all(type(dense.get_submodule(name)) is nn.Linear for name in weights)
    assert all(torch.equal(dense.get_submodule(name).weight, w) for name, w in weights.items())


@needs_fixtures
@pytest.mark.usefixtures("silent")
def test_the_floats_of_layers_that_are_more_than_a_weight():
    """Sums of codes become weights and a bias in floats; a transform of x can't be one."""
    model = AutoModelForCausalLM.from_pretrained(
        FIXTURES / "ms_w8a8_bf16", quantization_config=QdslConfig(), dtype=torch.float32
    )
    layers, x, y = quantized(model), {}, {}
    for name, layer in layers.items():  # of numbers that codes stand for
        codes = torch.randint(-128, 128, (9, layer.in_features))
        x[name] = (codes - layer.get_buffer("o")) * layer.get_buffer("c")
        y[name] = layer(x[name])
    dense = model.dequantize()
    for name in layers:
        own = dense.get_submodule(name)
        terms = x[name].abs() @ own.weight.abs().T + own.bias.abs()
        assert ((own(x[name]) - y[name]).abs() <= own.in_features * 2.0**-24 * terms).all(), name
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "ms_w4a4_flatquant", quantization_config=QdslConfig())
    with pytest.raises(qdsl.Error, match="it transforms x before quantizing; it stays quantized"):
        model.dequantize()


@needs_fixtures
@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "name",
    ["gptq_v1_sym_g64_descact", "ct_nvfp4a16", "ct_int8_w8a8_static_asym", "fp8_block128_ue8m0", "bnb_nf4_dq", "mo_fp8",
     "ms_w8a8_bf16", "gptq_moe_qwen3moe_g64"],
)  # fmt: skip
def test_every_format(name, tmp_path):
    directory = FIXTURES / name
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=QdslConfig())
    assert same(model, load_quantized(built(directory, model.dtype), directory))
    model.save_pretrained(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


# ---- heads -------------------------------------------------------------------------------------------------------
@pytest.fixture
def tied(tmp_path):
    """A checkpoint whose model ties the head to the embeddings: (directory, tensors, save)."""
    directory, tensors = tmp_path / "tied", load_file(AWQ / "model.safetensors")
    directory.mkdir()
    config = json.loads((AWQ / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    del tensors["lm_head.weight"]

    def save():
        save_file(tensors, directory / "model.safetensors")
        return directory

    return directory, tensors, save


@pytest.mark.usefixtures("silent")
def test_a_tied_head_stays_tied(tied, tmp_path):
    directory, _, save = tied
    model = AutoModelForCausalLM.from_pretrained(save(), quantization_config=QdslConfig())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(model, load_quantized(built(directory, torch.float16), directory))
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same(again, model) and again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.usefixtures("silent")
def test_a_quantized_head_is_not_tied(tied, tmp_path):
    directory, tensors, save = tied
    tensors["lm_head.qweight"] = torch.randint(-(2**31), 2**31 - 1, (256, 64), dtype=torch.int32)
    tensors["lm_head.qzeros"] = torch.zeros(2, 64, dtype=torch.int32)
    tensors["lm_head.scales"] = torch.ones(2, 512, dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(save(), quantization_config=QdslConfig())
    assert "lm_head" in quantized(model)
    model.tie_weights(recompute_mapping=False)
    assert same(model, load_quantized(built(directory, torch.float16), directory))
    model.save_pretrained(tmp_path / "saved")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


# ---- wrong -------------------------------------------------------------------------------------------------------
def test_without_qdsl_nothing_is_loaded(converted, monkeypatch):
    """As in a process that has not imported the module: an error, and no model of random weights."""
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "qdsl")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "qdsl")
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(converted)


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(tmp_path):
    shutil.copy(AWQ / "config.json", tmp_path)
    tensors = load_file(AWQ / "model.safetensors")
    del tensors[f"{DOWN}.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(qdsl.CheckpointError, match=rf"model\.safetensors: .*{DOWN}\.scales` is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QdslConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "dtype is torch.float64: activations are float16, bfloat16 or float32"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "quantized layers can't be offloaded"),
    ],
)
def test_what_is_not_done_is_refused(converted, options, message):
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(converted, **options)


def test_configurations():
    with pytest.raises(ValueError, match="format is 1 in what this version of qdsl reads"):
        auto.AutoQuantizationConfig.from_dict({"quant_method": "qdsl", "format": 2})
    with pytest.raises(TypeError, match="QdslConfig has no `group`; a scheme's parameters need a scheme"):
        QdslConfig(group=64)
    with pytest.raises(qdsl.Error, match="awq5: no such scheme; did you mean `awq4`"):
        QdslConfig("awq5")
    with pytest.raises(qdsl.Error, match="`awq4` has no parameter `grp`"):
        QdslConfig("awq4", grp=64)
    with pytest.raises(qdsl.CheckpointError, match="params says how to quantize a float checkpoint"):
        QdslConfig(params={"group": 64})
    assert QdslConfig("awq4", {"group": 64}, scale_type="bf16").params == {"group": 64, "scale_type": "bf16"}
    with pytest.raises(qdsl.CheckpointError, match="awq"):
        AutoModelForCausalLM.from_pretrained(AWQ, quantization_config=QdslConfig("awq4"))
