"""Linears that are one in the model and several in the checkpoint, or the other way round."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qdsl
from qdsl import reference
from qdsl.cli import main
from qdsl.runtime import QuantFused, QuantLinear, load_quantized, repack
from qdsl.runtime.conversion import convert
from qdsl.runtime.examination import examine
from qdsl.runtime.inspection import inspect

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROWS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "gate_proj": 192, "up_proj": 192}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
TOKENS = torch.arange(24).reshape(2, 12) * 19 % 64


def built(kind):
    """A model whose linears are fused, or one of the same architecture with linears of its own."""
    config = {"phi3": transformers.Phi3Config, "llama": transformers.LlamaConfig}[kind](**SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def stored_linears(model, scheme, layout, seed=0, scales=None, **params):
    """The tensors of a checkpoint of a model's linears, of random numbers."""
    found, rng = {}, np.random.default_rng(seed)
    loaded = qdsl.load(scheme, **params)
    for name, m in model.named_modules():
        if isinstance(m, nn.Linear) and name != "lm_head":
            patterns = reference.random_patterns(loaded, rng, m.out_features, m.in_features)
            if scales:
                patterns["s"] = loaded.tensor("s").dtype.encode(np.array(scales.get(name.rpartition(".")[2], 0.05)))
            found |= repack.write(
                loaded, loaded.layouts[layout], {t: p for t, p in patterns.items() if t != "b"}, f"{name}."
            )
    return found


def saved(directory, kind, settings, tensors):
    """A checkpoint that says it is of one model, with the linears of the other."""
    model, directory = built(kind), directory / "checkpoint"
    directory.mkdir()
    own = {n: t.detach() for n, t in model.state_dict().items() if "proj" not in n}
    save_file({**own, **{n: t.contiguous() for n, t in tensors.items()}}, directory / "model.safetensors")
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__]} | ({"quantization_config": settings} if settings else {})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def split(tmp_path):
    """Of a fused model, stored part by part; the fp8 scales of parts differ by 100."""
    scales = {"q_proj": 1.0, "k_proj": 0.01, "v_proj": 0.1, "gate_proj": 0.02, "up_proj": 0.2}
    tensors = stored_linears(built("llama"), "fp8_tensor_dynamic", "compressed_tensors", scales=scales)
    return saved(tmp_path, "phi3", FP8, tensors)


@pytest.fixture
def joined(tmp_path):
    """Of a model of separate linears, stored fused."""
    return saved(tmp_path, "llama", AWQ, stored_linears(built("phi3"), "awq4", "autoawq", group=32))


# ---- one in the model --------------------------------------------------------------------------------------------
def test_parts_of_a_fused_linear_keep_their_scales(split):
    model, stored = load_quantized(built("phi3"), split), load_file(split / "model.safetensors")
    for name, parts in ((f"{ATTENTION}.qkv_proj", "qkv"), (f"{MLP}.gate_up_proj", ("gate", "up"))):
        fused = model.get_submodule(name)
        assert isinstance(fused, QuantFused) and fused.out_features == sum(ROWS[f"{p}_proj"] for p in parts)
        x, apart = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)), []
        for part in parts:
            own = QuantLinear("fp8_tensor_dynamic", 128, ROWS[f"{part}_proj"], dtype=torch.float32)
            apart.append(own.load(stored, f"{name.rpartition('.')[0]}.{part}_proj.", "compressed_tensors"))
        assert len({float(own.s) for own in apart}) == len(parts)
        assert torch.equal(fused(x), torch.cat([own(x) for own in apart], -1))
        assert torch.equal(fused.dequantize(), torch.cat([own.dequantize() for own in apart]))
    assert torch.isfinite(model(TOKENS).logits).all()


def test_a_fused_linear_is_shown_saved_and_converted(split, tmp_path, capsys):
    assert main(["inspect", str(split)]) == 0
    text = capsys.readouterr().out
    assert f"{ATTENTION}.qkv_proj.k_proj" in text and f"{MLP}.gate_up_proj.up_proj" in text
    model = load_quantized(built("phi3"), split)
    expected = model(TOKENS).logits
    convert(split, tmp_path / "converted")
    assert torch.equal(load_quantized(built("phi3"), tmp_path / "converted")(TOKENS).logits, expected)
    pytest.importorskip("qdsl.runtime.transformers")
    from qdsl.runtime.transformers import QdslConfig

    read = transformers.AutoModelForCausalLM.from_pretrained(
        split, quantization_config=QdslConfig(), dtype=torch.float32
    )
    assert torch.equal(read(TOKENS).logits, expected)
    read.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, expected)


# ---- several in the model ----------------------------------------------------------------------------------------
def test_rows_of_a_fused_weight_are_layers(joined, tmp_path):
    model, stored = load_quantized(built("llama"), joined), load_file(joined / "model.safetensors")
    for name, parts in ((f"{ATTENTION}.qkv_proj", "qkv"), (f"{MLP}.gate_up_proj", ("gate", "up"))):
        rows = sum(ROWS[f"{part}_proj"] for part in parts)
        whole = QuantLinear("awq4", 128, rows, dtype=torch.float32, group=32).load(stored, f"{name}.", "autoawq")
        own = [model.get_submodule(f"{name.rpartition('.')[0]}.{part}_proj") for part in parts]
        assert torch.equal(torch.cat([layer.dequantize() for layer in own]), whole.dequantize())
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
        assert torch.equal(torch.cat([layer(x) for layer in own], -1), whole(x))
    convert(joined, tmp_path / "converted")
    other = load_quantized(built("llama"), tmp_path / "converted")
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    found = inspect(joined)
    assert sum(bool(row.scheme) for row in found.modules) == 7 and not found.problems


def test_rows_that_begin_inside_of_a_block_are_refused(tmp_path):
    """Blocks of 48 rows: q has 128, so that k begins in the third of them; blocks of 64 are all of one part."""
    for block in (48, 64):
        tensors = stored_linears(built("phi3"), "fp8_block", "deepseek", block=block)
        (tmp_path / str(block)).mkdir()
        directory = saved(tmp_path / str(block), "llama", FP8 | {"weight_block_size": [block, block]}, tensors)
        if block == 64:
            assert isinstance(load_quantized(built("llama"), directory).get_submodule(f"{MLP}.up_proj"), QuantLinear)
            continue
        with pytest.raises(
            qdsl.CheckpointError, match=r"k_proj` is stored in `.*its rows begin at 128, inside of a block"
        ):
            load_quantized(built("llama"), directory)


# ---- floats ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("of", "into"), [("llama", "phi3"), ("phi3", "llama")])
def test_floats_are_put_together_and_apart(of, into, tmp_path):
    """All linears as floats, and quantized on the way: the logits are those of the model whose checkpoint it is."""
    own = built(of)
    tensors = {n: t.detach().clone() for n, t in own.state_dict().items() if "proj" in n}
    directory = saved(tmp_path, into, AWQ, tensors)
    model = load_quantized(built(into), directory)  # the configuration says awq, and nothing is quantized
    other = load_quantized(own, saved_floats(directory, of, tmp_path), scheme="w8a8_dynamic")
    plain = built(of)
    plain.load_state_dict({**plain.state_dict(), **tensors, **not_linear(model)})
    torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, rtol=1e-5, atol=1e-5)
    quantized = load_quantized(built(into), saved_floats(directory, into, tmp_path), scheme="w8a8_dynamic")
    torch.testing.assert_close(quantized(TOKENS).logits, other(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert sum(isinstance(m, QuantLinear) for m in quantized.modules()) == 7


def not_linear(model):
    return {n: t for n, t in model.state_dict().items() if "proj" not in n}


def saved_floats(directory, kind, tmp_path):
    """The same files without settings, for a model of a kind."""
    target = tmp_path / f"floats of {kind}"
    target.mkdir()
    (target / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    (target / "config.json").write_text(built(kind).config.to_json_string())
    return target


# ---- wrong -------------------------------------------------------------------------------------------------------
def changed(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def refused(model, directory, *messages, **options):
    before = [type(m) for m in model.modules()]
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(model, directory, **options)
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    assert [type(m) for m in model.modules()] == before


def test_parts_that_do_not_go_together_are_refused(split):
    def dense(tensors):
        tensors[f"{ATTENTION}.k_proj.weight"] = torch.zeros(64, 128)
        del tensors[f"{ATTENTION}.k_proj.weight_scale"]

    changed(split, dense)
    name = f"`{ATTENTION}.q_proj` is quantized and `{ATTENTION}.k_proj` is not, and the model has them in one"
    refused(built("phi3"), split, name)
    changed(split, lambda tensors: tensors.pop(f"{ATTENTION}.k_proj.weight"))
    refused(built("phi3"), split, f"`{ATTENTION}.k_proj` is in no file, and the model has them in one")


def test_a_missing_scale_of_a_part_is_named(split):
    changed(split, lambda tensors: tensors.pop(f"{MLP}.up_proj.weight_scale"))
    refused(built("phi3"), split, f"`{MLP}.up_proj` has no scale")


def test_a_model_that_does_not_say_whose_rows_are_whose(split):
    model = built("phi3")
    model.config.num_key_value_heads = 3
    refused(model, split, "qkv_proj` has 256 rows and is stored as", "does not say how many are whose")


def test_such_layers_have_no_parts_for_ranks(split):
    refused(built("phi3"), split, "qkv_proj: its rows are stored under other names", shard=(0, 2))
    found = examine(built("phi3"), split)
    assert not found.problems and found.fused.joined.keys() == {f"{ATTENTION}.qkv_proj", f"{MLP}.gate_up_proj"}
