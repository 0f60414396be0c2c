"""load_quantized on checkpoints that AutoAWQ wrote, whole and damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import decoders
import qdsl
from qdsl.runtime import QuantLinear, load_quantized
from qdsl.runtime.checkpoints import Module, awq
from qdsl.runtime.stored import read_config

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parent / "data"
AWQ, GEMV = DATA / "awq_g128", DATA / "awq_gemv_g128"
DOWN = "model.layers.0.mlp.down_proj"


def built(directory=AWQ, kind=torch.float32, **changes):
    config = transformers.AutoConfig.from_pretrained(directory)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()


@pytest.fixture
def writable(tmp_path):
    """A copy of the checkpoint whose parts a test may change: (directory, tensors, save)."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    shutil.copy(AWQ / "config.json", directory)
    tensors = load_file(AWQ / "model.safetensors")

    def save():
        save_file(tensors, directory / "model.safetensors")
        return directory

    return directory, tensors, save


def configured(directory, drop=(), **changes):
    """Change the quantization settings."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in settings.items() if k not in drop}
    path.write_text(json.dumps(config))


def quantized(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def state_of(model):
    return {name: (type(m), [t.clone() for t in m.parameters(recurse=False)]) for name, m in model.named_modules()}


def refused(model, directory, *messages):
    """load_quantized fails with all these messages and leaves the model as it was."""
    before = state_of(model)
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(model, directory)
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    after = state_of(model)
    assert before.keys() == after.keys()
    for name, (kind, tensors) in before.items():
        assert after[name][0] is kind
        assert all(torch.equal(a, b) for a, b in zip(tensors, after[name][1], strict=True))
    return str(caught.value)


# ---- right -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exact():
    """The same model in float64 with exactly decoded weights."""
    model = built(kind=torch.float64)
    stored = {name: t.numpy() for name, t in load_file(AWQ / "model.safetensors").items()}
    state = {
        name: torch.from_numpy(t.astype(np.float64))
        for name, t in stored.items()
        if name.rpartition(".")[2] == "weight"
    }
    for name in stored:
        if name.endswith(".qweight"):
            module = name.removesuffix("qweight")
            state[module + "weight"] = torch.from_numpy(decoders.awq(stored, module))
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("directory", [AWQ, GEMV], ids=lambda d: d.name)
def test_the_logits_are_those_of_the_exact_weights(directory, exact):
    model = load_quantized(built(directory), directory)
    assert len(quantized(model)) == 7 and isinstance(model.lm_head, nn.Linear)
    tokens = torch.arange(24).reshape(2, 12) * 19 % 512
    with torch.inference_mode():
        found, expected = model(tokens).logits.double(), exact(tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("directory", [AWQ, GEMV], ids=lambda d: d.name)
def test_the_weights_are_those_the_writer_decodes(directory):
    model = load_quantized(built(directory), directory)
    for name, expected in load_file(AWQ / "reference_dequant.safetensors").items():
        module = model.get_submodule(name.removesuffix(".weight"))
        found = module.dequantize(torch.float16) if isinstance(module, QuantLinear) else module.weight.half()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), name


def test_types_and_devices():
    model = load_quantized(built(), AWQ, device="cpu", dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(m.dtype == torch.bfloat16 for m in quantized(model).values())
    assert model(torch.arange(5)[None]).logits.dtype == torch.bfloat16
    assert load_quantized(built(kind=torch.float16), AWQ).model.layers[0].mlp.up_proj.dtype == torch.float16


def test_a_loaded_model_generates_saves_and_loads_again():
    model = load_quantized(built(), AWQ)
    tokens = torch.arange(1, 9)[None]
    first = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    other = built()
    for name, layer in quantized(model).items():
        parent, _, last = name.rpartition(".")
        fresh = QuantLinear("awq4", layer.in_features, layer.out_features, dtype=torch.float32)
        setattr(other.get_submodule(parent), last, fresh)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0), first)


def test_parameters_may_be_on_meta_when_buffers_are_real():
    expected = load_quantized(built(), AWQ)
    model = built()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    load_quantized(model, AWQ)
    tokens = torch.arange(5)[None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    with torch.device("meta"):
        bare = built()
    with pytest.raises(qdsl.CheckpointError, match=r"inv_freq`.* on the meta device come from no checkpoint"):
        load_quantized(bare, AWQ)


def test_one_group_may_be_spelled_minus_one():
    tensors = load_file(AWQ / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    for part in ("scales", "qzeros"):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:1].clone()
    answers = []
    for group in (-1, 256):
        settings = {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        plan = awq.plan(settings, {name: Module(512, 256, False)}, tensors, tensors.__getitem__)
        assert not plan.problems
        layer = QuantLinear("awq4", 256, 512, dtype=torch.float32, **plan.choices[name].params)
        layer.load(tensors, f"{name}.", plan.choices[name].layout)
        answers.append(layer(torch.linspace(-1, 1, 256)[None]))
    assert torch.equal(*answers)


# ---- configuration -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "place", ["quantization_config", "text_config", "compression_config", "quantize_config.json", "quant_config.json"]
)
def test_where_the_configuration_may_be(place, writable):
    directory, _, save = writable
    save()
    path = directory / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    if place == "text_config":
        config["text_config"] = {"quantization_config": settings}
    elif place.endswith(".json"):
        old = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
        (directory / place).write_text(json.dumps(settings if place == "quantize_config.json" else old))
    else:
        config[place] = settings
    path.write_text(json.dumps(config))
    found, source = read_config(directory)
    assert source == (place if place.endswith(".json") else "config.json")
    assert found.get("group_size", found.get("q_group_size")) == 128
    if place != "text_config":  # which no Llama config has
        assert len(quantized(load_quantized(built(), directory))) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awk"}, "quant_method `awk` is not supported; did you mean `awq`? (supported: awq"),
        ({"version": "gemv_fast"}, "AWQ version `gemv_fast` is not supported (supported: gemm, exllama, ipex, gemv)"),
        ({"version": "marlin"}, "AWQ version `marlin`"),
        ({"bits": 8}, "AWQ with bits = 8"),
        ({"group_size": 0}, "AWQ with group_size = 0"),
        ({"group_size": "128"}, "AWQ with group_size = 128: a positive number"),
    ],
)
def test_unknown_settings_are_refused_by_name(writable, changes, message):
    directory, _, save = writable
    save()
    configured(directory, **changes)
    assert "config.json" in refused(built(), directory, message)


def test_no_configuration_and_no_directory(tmp_path):
    refused(built(), tmp_path / "absent", "no such checkpoint directory")
    refused(built(), tmp_path, "no quantization settings")
    (tmp_path / "config.json").write_text("{")
    refused(built(), tmp_path, "not readable as JSON")


def test_aliases_and_version_names(writable):
    directory, _, save = writable
    save()
    configured(directory, drop=("bits", "group_size"), w_bit=4, q_group_size=128, version="EXLLAMA", quant_method="AWQ")
    assert len(quantized(load_quantized(built(), directory))) == 7


def test_a_wrong_label_may_be_overruled(writable):
    directory, _, save = writable
    save()
    configured(directory, version="marlin")
    refused(built(), directory, "AWQ version `marlin`")
    assert len(quantized(load_quantized(built(), directory, settings={"version": "gemm"}))) == 7


def test_shapes_decide_between_gemm_and_gemv(writable):
    directory, _, save = writable
    save()
    configured(directory, version="gemv")
    with pytest.warns(UserWarning, match="labelled autoawq_gemv, but its shapes are those of autoawq"):
        model = load_quantized(built(), directory)
    assert torch.equal(
        model.model.layers[0].self_attn.q_proj.dequantize(),
        load_quantized(built(), AWQ).model.layers[0].self_attn.q_proj.dequantize(),
    )


# ---- skip lists --------------------------------------------------------------------------------------------------
def test_the_tensors_decide_whatever_the_list_says(writable):
    directory, tensors, save = writable
    dense = {}
    for name in list(tensors):
        if name.startswith(DOWN):
            dense[name] = tensors.pop(name)
    stored = {name: t.numpy() for name, t in dense.items()}
    tensors[f"{DOWN}.weight"] = torch.from_numpy(decoders.awq(stored, f"{DOWN}.")).half()
    save()
    configured(directory, modules_to_not_convert=["up_proj"])
    model = built()
    with pytest.warns(UserWarning, match="configuration and tensors disagree") as caught:
        load_quantized(model, directory)
    text = str(caught[0].message)
    assert "up_proj` is on the list" in text and "down_proj` is not on the list" in text and "lm_head" not in text
    assert isinstance(model.get_submodule(DOWN), nn.Linear) and len(quantized(model)) == 6
    configured(directory, modules_to_not_convert=["down_proj"])
    load_quantized(built(), directory)


# ---- tied heads --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stored_head", [True, False])
def test_a_tied_head(writable, stored_head):
    directory, tensors, save = writable
    head = tensors.pop("lm_head.weight")
    if stored_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save()
    for kind in (None, torch.bfloat16):
        model = load_quantized(built(tie_word_embeddings=True), directory, dtype=kind)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(
            model.lm_head.weight.half(), tensors["model.embed_tokens.weight"].to(kind or torch.float16).half()
        )
    if not stored_head:
        refused(built(), directory, "`lm_head.weight` is in no file")
    else:
        tensors["lm_head.weight"] = head
        save()
        refused(built(tie_word_embeddings=True), directory, "`lm_head.weight` differs from `model.embed_tokens.weight`")


def test_a_tied_head_that_is_stored_quantized_becomes_a_layer_of_its_own(writable):
    directory, tensors, save = writable
    del tensors["lm_head.weight"]
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.mlp.up_proj.{part}"].clone()
    save()
    model = load_quantized(built(tie_word_embeddings=True), directory)
    assert isinstance(model.lm_head, QuantLinear) and isinstance(model.model.embed_tokens.weight, nn.Parameter)


# ---- zero points -------------------------------------------------------------------------------------------------
def test_without_stored_zeros_a_symmetric_file_means_eight(writable):
    directory, tensors, save = writable
    eights = torch.tensor(-0x77777778, dtype=torch.int32)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = eights.expand_as(tensors[name]).clone()
    save()
    expected = load_quantized(built(), directory)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        del tensors[name]
    save()
    refused(built(), directory, f"`{DOWN}.qzeros` is missing")
    configured(directory, zero_point=False)
    model = load_quantized(built(), directory)
    assert torch.equal(model.get_submodule(DOWN).dequantize(), expected.get_submodule(DOWN).dequantize())


# ---- damage ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(writable, part):
    _, tensors, save = writable
    del tensors[f"{DOWN}.{part}"]
    refused(built(), save(), f"`{DOWN}.{part}` is missing")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_dense_tensor_is_named(writable, name):
    _, tensors, save = writable
    del tensors[name]
    refused(built(), save(), f"`{name}` is in no file")


def test_names_with_a_prefix_are_told(writable):
    _, tensors, save = writable
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    stored = "language_model.model.embed_tokens.weight"
    refused(
        built(),
        save(),
        f"`model.embed_tokens.weight` is in no file (but `{stored}` is: the model's names lack a prefix",
    )


def test_a_model_that_is_a_part_of_the_one_that_was_stored(writable):
    directory, tensors, save = writable
    expected = load_quantized(built(), save()).state_dict()
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    tensors["vision_tower.patch.weight"] = torch.ones(2, 2)
    configured(directory, modules_to_not_convert=["language_model.lm_head", "vision_tower"])
    save()
    with pytest.warns(UserWarning, match="1 tensors whose names do not begin with `language_model.` are left out"):
        found = load_quantized(built(), directory, prefix="language_model").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    refused(built(), directory, "prefix = 'language_model.' loads that part")
    with pytest.raises(qdsl.Error, match=r"begins with `text.`; they begin with `language_model`, `vision_tower`"):
        load_quantized(built(), directory, prefix="text")


def test_what_every_model_derives_is_left_out(writable):
    _, tensors, save = writable
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    load_quantized(built(), save())
    tensors["model.layers.0.self_attn.rotary_emb.freq"] = torch.ones(32)
    refused(built(), save(), "rotary_emb.freq` has no place in the model")


def test_everything_wrong_is_listed_at_once(writable):
    _, tensors, save = writable
    del tensors[f"{DOWN}.scales"]
    up = "model.layers.0.mlp.up_proj"
    tensors[f"{up}.scales"] = tensors[f"{up}.scales"][:1].clone()
    tensors[f"{up}.qzeros"] = tensors[f"{up}.qzeros"].short()
    directory = save()
    refused(
        built(), directory, f"`{DOWN}.scales` is missing", f"`{up}.scales` is [1, 512], layout needs [2, 512]",
        f"`{up}.qzeros` is torch.int16, layout needs i32", "model.safetensors",
    )  # fmt: skip
    tensors["model.layers.7.mlp.up_proj.qweight"] = torch.zeros(2, 2, dtype=torch.int32)
    tensors["model.norm.weight"] = torch.zeros(3)
    save()
    refused(
        built(), directory, "`model.layers.7.mlp.up_proj.qweight` has no place in the model",
        "`model.norm.weight` is [3], the model needs [256]",
    )  # fmt: skip


def test_a_shape_of_no_layout_is_refused(writable):
    _, tensors, save = writable
    tensors[f"{DOWN}.qweight"] = tensors[f"{DOWN}.qweight"][:, :3].clone()
    refused(built(), save(), f"`{DOWN}.qweight` is [512, 3]", "[512, 32] (gemm)", "[256, 64] (gemv)")


def test_a_module_stored_twice_is_refused(writable):
    _, tensors, save = writable
    tensors[f"{DOWN}.weight"] = torch.zeros(256, 512, dtype=torch.float16)
    refused(built(), save(), "both quantized (qweight, qzeros, scales) and dense (weight)")


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.0001, 0])
def test_a_truncated_file_is_named(writable, keep):
    _, _, save = writable
    path = save() / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    refused(built(), path.parent, str(path), "truncated or damaged")


def sharded(directory, tensors):
    """The checkpoint in three files with an index."""
    shards, where = [{}, {}, {}], {}
    for at, name in enumerate(sorted(tensors)):
        shards[at % 3][name] = tensors[name]
        where[name] = f"model-0000{at % 3 + 1}-of-00003.safetensors"
    for at, shard in enumerate(shards):
        save_file(shard, directory / f"model-0000{at + 1}-of-00003.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_shards(writable):
    directory, tensors, _ = writable
    sharded(directory, tensors)
    tokens = torch.arange(5)[None]
    assert torch.equal(load_quantized(built(), directory)(tokens).logits, load_quantized(built(), AWQ)(tokens).logits)
    missing = directory / "model-00002-of-00003.safetensors"
    rest = load_file(missing)
    missing.unlink()
    refused(built(), directory, str(missing), "missing")
    gone = rest.popitem()[0]
    save_file(rest, missing)
    refused(built(), directory, f"promises `{gone}`, which no file holds")


def test_weights_that_are_not_safetensors(writable):
    directory, _, _ = writable
    (directory / "model.safetensors").symlink_to(directory / "nowhere")
    refused(built(), directory, "model.safetensors: no file, or a link to none")
    (directory / "model.safetensors").unlink()
    refused(built(), directory, "no safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"")
    refused(built(), directory, "pickled weights")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, directory / name)
    refused(built(), directory, "several safetensors files (a.safetensors, b.safetensors)")


def test_a_model_of_another_architecture_is_refused_whole(writable):
    _, _, save = writable
    text = refused(built(intermediate_size=1024), save(), "up_proj.qweight", "for n = 1024, k = 256")
    assert "down_proj" in text
