"""qdsl quantize: what it writes, read by the formats' readers and by decoders of our own, and how it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import decoders
import qdsl
from qdsl.cli import main
from qdsl.runtime import QuantLinear, load_quantized, quantization, repack
from qdsl.runtime.checkpoints.written import all_writable, written
from qdsl.runtime.examination import examine
from qdsl.runtime.quantization import quantize

transformers = pytest.importorskip("transformers")

WRITABLE = [(name, layout) for name, layouts in all_writable() for layout in layouts]
LAYERS = 7
UP = "model.layers.0.mlp.up_proj"


def built(directory):
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are in no checkpoint
    return model.eval()


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """A Llama of one layer in bfloat16, with biases."""
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    directory = tmp_path_factory.mktemp("floats")
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def stored(directory):
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def settings(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def untouched(out):
    return not list(out.parent.iterdir())


# ---- right -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "layout"), WRITABLE)
def test_every_layout_is_read_back_as_what_was_quantized(floats, out, name, layout):
    quantize(floats, out, name, layout=layout)
    found, floating = examine(built(out), out), stored(floats)
    assert not found.problems and not found.notices and len(found.plan.choices) == LAYERS
    for module, choice in found.plan.choices.items():
        scheme, weight = qdsl.load(choice.scheme, **choice.params), floating[f"{module}.weight"]
        expected = qdsl.reference.quantize(qdsl.load(name), weight.double().numpy())
        own = {short: found.files[full] for full, short in choice.tensors.items()}
        sizes = {"e": 1, "m": 1, "n": weight.shape[0], "k": weight.shape[1]}
        for binding in scheme.layouts[layout].bindings:
            if binding.tensor in expected:
                read = repack.read(scheme, scheme.layouts[layout], binding, own, "", sizes)
                apart = np.abs(read.astype(np.int64) - expected[binding.tensor])
                assert apart.max() <= ("/" in str(binding.value)), (module, binding.tensor)  # reciprocals round in f32
            elif f"{module}.bias" in floating:
                assert torch.equal(own["bias"], floating[f"{module}.bias"])


@pytest.mark.parametrize("name", ["awq4", "w8a8_dynamic", "fp8_block", "mxfp4"])
def test_it_loads_as_quantizing_at_load_does(floats, out, name):
    online = load_quantized(built(floats), floats, scheme=name)
    saved = load_quantized(built(floats), quantize(floats, out, name))
    assert sum(isinstance(m, QuantLinear) for m in saved.modules()) == LAYERS
    first, second = (
        {key: t for key, t in model.state_dict().items() if not key.endswith("_extra_state")}
        for model in (online, saved)
    )
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_awq_files_are_those_of_autoawq(floats, out):
    quantize(floats, out, "awq4", {"group": 64})
    assert settings(out) == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    tensors = stored(out)
    kinds = {part: tensors[f"{UP}.{part}"].dtype for part in ("qweight", "qzeros", "scales")}
    assert kinds == {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}
    found = decoders.awq({key: t.numpy() for key, t in tensors.items() if key.startswith(UP)}, f"{UP}.")
    weight = stored(floats)[f"{UP}.weight"].double().numpy()
    step = (weight.reshape(256, 2, 64).max(-1) - weight.reshape(256, 2, 64).min(-1)) / 15
    assert (np.abs(found - weight).reshape(256, 2, 64).max(-1) <= step * 1.01).all()  # both ends round, at most


def test_fp8_and_int8_files_are_codes_times_scales(floats, out):
    weight = stored(floats)[f"{UP}.weight"].float()
    tensors = stored(quantize(floats, out / "fp8", "fp8_block"))
    blocks = tensors[f"{UP}.weight_scale_inv"].repeat_interleave(128, 0)
    assert tensors[f"{UP}.weight"].dtype == torch.float8_e4m3fn
    assert (tensors[f"{UP}.weight"].float() * blocks - weight).abs().max() <= weight.abs().max() / 16
    tensors = stored(quantize(floats, out / "int8", "w8a8_dynamic"))
    rows = tensors[f"{UP}.weight"].float() * tensors[f"{UP}.weight_scale"]
    assert ((rows - weight).abs() <= tensors[f"{UP}.weight_scale"] * 0.501).all()
    group = settings(out / "int8")["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["dynamic"]) == ("channel", True)


def test_files_an_index_and_what_goes_along(floats, out):
    quantize(floats, out, "w8a8_dynamic", part=40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    assert all(name in load_file(out / file) for name, file in index.items())
    assert sorted(p.name for p in out.iterdir()) == sorted(
        {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", *index.values()}
    )


def test_a_scheme_of_ones_own_that_means_the_same(floats, out):
    text = (
        qdsl.load("awq4")
        .text.replace("scheme awq4", "scheme tighter")
        .replace("(top - bottom) / 15", "(top - bottom) / 16")
    )
    quantize(floats, out, qdsl.parse(text, "tighter.q"))
    assert settings(out)["quant_method"] == "awq"
    found = examine(built(out), out)
    assert not found.problems and found.plan.choices[UP].scheme == "awq4"


def test_the_command(floats, out, capsys):
    assert (
        main(
            [
                "quantize",
                str(floats),
                "--scheme",
                "awq4",
                "-P",
                "group=64",
                "-o",
                str(out),
                "--skip",
                "down_proj,lm_head",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"{out}\n"
    assert settings(out)["modules_to_not_convert"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert main(["quantize", str(floats), "--scheme", "awq4", "-o", str(out)]) == 1
    assert capsys.readouterr().err == f"error: {out}: exists; choose another directory or remove it\n"


# ---- interrupted -------------------------------------------------------------------------------------------------
def test_a_run_that_was_interrupted_goes_on(floats, out, monkeypatch):
    names, real = [], quantization.quantized

    def counted(scheme, weight):
        names.append(tuple(weight.shape))
        if len(names) == 4:
            raise KeyboardInterrupt
        return real(scheme, weight)

    monkeypatch.setattr(quantization, "quantized", counted)
    with pytest.raises(KeyboardInterrupt):
        quantize(floats, out, "w8a8_dynamic", part=40_000)
    assert not out.exists()
    quantize(floats, out, "w8a8_dynamic", part=40_000)
    assert 4 < len(names) < 4 + LAYERS and [p.name for p in out.parent.iterdir()] == ["out"]
    monkeypatch.undo()
    whole = stored(quantize(floats, out.with_name("whole"), "w8a8_dynamic"))
    found = stored(out)
    assert whole.keys() == found.keys() and all(torch.equal(whole[key], found[key]) for key in whole)


# ---- wrong -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (
            "awq4",
            {"layout": "autoawq_gemv"},
            "layout `autoawq_gemv` is of no format whose configuration qdsl writes; take autoawq",
        ),
        ("awq4", {"layout": "gemm"}, "no layout `gemm` (it has: autoawq, autoawq_gemv)"),
        ("hqq", {}, "awq4: autoawq; fp8_block: deepseek, compressed_tensors;"),
        ("nf4", {}, "nf4"),
        ("awq4", {"params": {"group": 96}}, "k = 128 is no multiple of 96, as readers of layout `autoawq` need"),
        ("fp8_block", {"params": {"fmt": "e5m2"}}, "is of no format whose configuration qdsl writes"),
    ],
)
def test_what_can_not_be_written(floats, out, scheme, options, message):
    with pytest.raises(qdsl.Error) as caught:
        quantize(floats, out, scheme, **options)
    assert message in str(caught.value) or message in str(caught.value).replace(" are of", " is of"), str(caught.value)
    assert untouched(out)


def test_a_quantized_checkpoint_is_refused(out):
    awq = Path(__file__).parent / "data" / "awq_g128"
    with pytest.raises(qdsl.CheckpointError, match="quantized already, by awq"):
        quantize(awq, out, "awq4")
    assert untouched(out)


def test_a_weight_that_can_not_be_quantized_names_its_module(floats, out, tmp_path_factory):
    broken = tmp_path_factory.mktemp("broken")
    tensors = stored(floats)
    tensors[f"{UP}.weight"][3, 5] = torch.inf
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_text((floats / "config.json").read_text())
    with pytest.raises(qdsl.CheckpointError, match=rf"{UP}: the weight is inf at \[3, 5\]"):
        quantize(broken, out, "w8a8_dynamic")
    assert not out.exists()


def test_a_configuration_that_would_say_something_else_is_refused(floats, out, monkeypatch):
    def wrong(*args):
        said = written(*args)
        said.settings["group_size"] = 64
        return said

    monkeypatch.setattr(quantization, "written", wrong)
    with pytest.raises(qdsl.Error, match="the settings of awq can't say what would be written"):
        quantize(floats, out, "awq4")
    assert untouched(out)
