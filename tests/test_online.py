"""Float checkpoints that load_quantized quantizes by a scheme."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qdsl
from logits import shares_of_bounds
from qdsl.runtime import QuantLinear, load_quantized
from qdsl.runtime.quantization import quantize

transformers = pytest.importorskip("transformers")

AWQ = Path(__file__).parent / "data" / "awq_g128"
LAYERS = 7


def built(directory, **changes):
    config = transformers.AutoConfig.from_pretrained(directory)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are in no checkpoint
    return model.eval()


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """A Llama of one layer in bfloat16, with biases and widths that blocks of 128 do not divide."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=96, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    directory = tmp_path_factory.mktemp("floats")
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
def writable(floats, tmp_path):
    return Path(shutil.copytree(floats, tmp_path / "checkpoint"))


def quantized(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def refused(directory, *messages, model=None, **options):
    """load_quantized fails with all these messages and leaves the model as it was."""
    model = model or built(directory)
    before = list(model.modules())
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(model, directory, **options)
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    assert list(model.modules()) == before and all(p.is_meta for p in model.parameters())


# ---- right -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["awq4", "w8a8_dynamic", "fp8_block", "fp8a16_tensor", "mxfp4"])
def test_every_linear_is_quantized_from_the_stored_numbers(floats, scheme):
    model, stored = load_quantized(built(floats), floats, scheme=scheme), load_file(floats / "model.safetensors")
    assert len(quantized(model)) == LAYERS
    for name, layer in quantized(model).items():
        weight = stored[f"{name}.weight"]
        patterns = qdsl.reference.quantize(layer.scheme, weight.double().numpy())
        exact = qdsl.reference.decode_weight(layer.scheme, patterns, *weight.shape)
        assert np.array_equal(layer.dequantize().numpy(), exact), name
        if f"{name}.bias" in stored:
            assert torch.equal(layer.bias, stored[f"{name}.bias"])
    assert type(model.lm_head) is nn.Linear
    for name in ("lm_head", "model.embed_tokens", "model.norm"):
        assert torch.equal(model.get_submodule(name).weight, stored[f"{name}.weight"].float())


def test_scales_of_fp8_are_the_largest_magnitude_over_448(floats):
    model, stored = load_quantized(built(floats), floats, scheme="fp8_block"), load_file(floats / "model.safetensors")
    w = stored["model.layers.0.mlp.up_proj.weight"].float()
    expected = torch.stack(
        [torch.stack([part.abs().max() / 448 for part in rows.split(128, 1)]) for rows in w.split(128)]
    )
    assert torch.equal(model.model.layers[0].mlp.up_proj.s, expected)


def test_the_logits_are_near_those_of_the_floats(floats):
    dense = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    model = load_quantized(built(floats), floats, scheme="w8a8_dynamic")
    tokens = torch.arange(24).reshape(2, 12) * 19 % 96
    with torch.inference_mode():
        found, expected = model(tokens).logits, dense(tokens).logits
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()


WRONG = {  # what a layer, or one in its place, computes
    "a scale off by 1/64": lambda layers: {"v_proj": lambda x: layers["v_proj"](x) * (1 + 1 / 64)},
    "two layers swapped": lambda layers: {"gate_proj": layers["up_proj"], "up_proj": layers["gate_proj"]},
    "rows of a layer in another order": lambda layers: {"o_proj": lambda x: layers["o_proj"](x).flip(-1)},
}


@pytest.mark.parametrize("scheme", ["awq4", "w8a8_dynamic"])
def test_the_logits_are_those_of_the_dequantized_model_within_a_derived_bound(floats, scheme, monkeypatch):
    model, tokens = load_quantized(built(floats), floats, scheme=scheme), torch.arange(4)[None] * 19 % 96
    layers = {name.rpartition(".")[2]: layer for name, layer in quantized(model).items()}
    shares = shares_of_bounds(model, tokens)
    assert all(share <= 1 for share in shares.values()), shares
    kernels = {name: layer.forward for name, layer in layers.items()}
    for what, wrong in WRONG.items():
        with monkeypatch.context() as patch:
            for name, forward in wrong(kernels).items():
                patch.setattr(layers[name], "forward", forward)
            assert max(shares_of_bounds(model, tokens).values()) > 2, what


def test_parameters_and_modules_to_skip(floats):
    model = load_quantized(
        built(floats), floats, scheme="gptq_sym", params={"bits": 8, "group": 32}, skip=["down_proj", "lm_head"]
    )
    assert len(quantized(model)) == LAYERS - 1 and type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert model.model.layers[0].mlp.up_proj.scheme.bound == "gptq_sym(bits=8, group=32, act=f32, scale_type=f16)"


def test_a_tied_head_is_quantized_when_it_is_not_skipped(writable):
    tensors = load_file(writable / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, writable / "model.safetensors")
    model = built(writable, tie_word_embeddings=True)
    model = load_quantized(model, writable, scheme="w8a8_dynamic", skip=())
    assert len(quantized(model)) == LAYERS + 1
    embeddings = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, embeddings.float())
    expected = QuantLinear("w8a8_dynamic", 96, 96, dtype=torch.float32).quantize(embeddings)
    assert torch.equal(model.lm_head.dequantize(), expected.dequantize())


def test_experts_stay_floats_and_that_is_told(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "floats")
    with pytest.warns(UserWarning, match="weights of experts, such as .* stay as they are"):
        model = load_quantized(built(tmp_path / "floats"), tmp_path / "floats", scheme="w8a8_dynamic")
    assert len(quantized(model)) == 4
    with pytest.raises(qdsl.CheckpointError, match="weights of experts"):
        quantize(tmp_path / "floats", tmp_path / "out", "w8a8_dynamic")
    assert not (tmp_path / "out").exists()


def test_a_band_at_a_time_gives_what_the_whole_gives(monkeypatch):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(300, 200)) * np.exp2(rng.integers(-6, 6, (300, 1)))
    w[7], w[:, 5] = 0, 0
    for name in ("awq4", "fp8_block", "fp8a16_tensor", "nvfp4a16", "gptq_actorder"):
        scheme = qdsl.load(name)
        whole = qdsl.reference.quantize(scheme, w)
        monkeypatch.setattr(qdsl.reference, "_BAND", 1000)
        bands = qdsl.reference.quantize(scheme, w)
        monkeypatch.undo()
        assert whole.keys() == bands.keys() and all(np.array_equal(whole[t], bands[t]) for t in whole), name


# ---- wrong -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("nf4", "no `quantize` block"),
        ("w8a8_static", "no `quantize` block"),
        ("w8a8_mix", "`c`, `o` must be calibrated"),
    ],
)
def test_a_scheme_that_floats_do_not_determine(floats, scheme, message):
    phase = "decode" if qdsl.load(scheme).phases else ""
    refused(floats, scheme, message, scheme=scheme, phase=phase)


def test_a_bias_in_another_unit(floats):
    text = qdsl.load("w8a8_dynamic").text.replace("y = acc + b", "y = (acc + b) * s").replace("w ~ q * s", "w ~ q")
    refused(floats, "`b` is not in the unit of y", scheme=qdsl.parse(text, "mine.q"))


def test_a_quantized_checkpoint_and_a_scheme():
    refused(AWQ, "quantized already, by awq (config.json)", "leave out `scheme`", scheme="fp8_block")


def test_a_float_checkpoint_without_a_scheme(floats):
    refused(floats, "A float one needs `scheme`")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"group": 64}}, "params says how to quantize a float checkpoint, and no scheme is given"),
        ({"skip": ("lm_head",)}, "skip says how to quantize a float checkpoint, and no scheme is given"),
        ({"scheme": "awq4", "settings": {"bits": 4}}, "settings are of quantized checkpoints"),
        ({"scheme": "awq4", "params": {"act": "bf16"}}, "`act` is the layers' dtype"),
        ({"scheme": "awq4", "skip": "lm_head"}, "skip is a list of names, not 'lm_head'; write ['lm_head']"),
        (
            {"scheme": "awq4", "skip": ("up_porj",)},
            "arguments: skip names 'up_porj', which is no linear layer (nearest: `up_proj`",
        ),
        ({"scheme": "awq4", "skip": ("model", "lm_head")}, "there is no linear layer to quantize"),
        ({"scheme": "awq4", "phase": "decode"}, "no layer of it has phases"),
    ],
)
def test_contradictory_wishes(floats, options, message):
    refused(floats, message, **options)


def test_a_layer_whose_size_the_scheme_does_not_take(floats):
    text = qdsl.load("w8a8_dynamic").text + "\nrequire k % 128 == 0\n"
    refused(floats, "model.layers.0.mlp.down_proj", "requires k % 128 == 0", scheme=qdsl.parse(text, "mine.q"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn: it is quantized already"),
        (lambda w: w[:, :-1].contiguous(), "is [160, 95], the model needs [160, 96]"),
        (lambda w: None, "`model.layers.0.mlp.up_proj.weight` is in no file"),
        (lambda w: torch.where(torch.arange(96) == 5, torch.nan, w), "the weight is nan at [0, 5]"),
    ],
)
def test_a_damaged_weight(writable, change, message):
    tensors, name = load_file(writable / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), writable / "model.safetensors")
    refused(writable, message, scheme="w8a8_dynamic")


def test_a_scale_beyond_its_type():
    dense = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        dense.weight[3, 4] = 3e6
    with pytest.raises(qdsl.Error, match=re.escape("`s` at [3, 0] is beyond f16")):
        QuantLinear.from_float(dense, "awq4")
