"""Parts of layers for several ranks: every scheme and layout, cut anywhere, and whole models on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import qdsl
from qdsl import reference
from qdsl.runtime import QuantLinear, load_quantized, repack
from qdsl.runtime.checkpoints import Choice
from qdsl.runtime.conversion import convert
from qdsl.runtime.resolve import kept_tensors, misfits, resolved
from qdsl.runtime.shard import cut, quantized_part

transformers = pytest.importorskip("transformers")

AWQ = Path(__file__).parent / "data" / "awq_g128"
LAYOUTS = [(name, layout) for name in sorted(qdsl.shipped()) for layout in qdsl.load(name).layouts]


def chosen(scheme, layout="", bias=False, **params):
    return Choice(scheme, params, layout, bias, {})


class Whole:
    """A layer of random numbers, stored in a layout."""

    def __init__(self, name, layout, n, k, patterns=None, **params):
        self.name, self.layout, self.n, self.k, self.params = name, layout, n, k, params
        self.scheme = resolved(name, params, None)
        stored = {b.tensor for b in self.scheme.layouts[layout].bindings}
        bias = any(t.role == "bias" and t.name in stored for t in self.scheme.output.tensors)
        self.kept = kept_tensors(self.scheme, bias, "")
        made = reference.random_patterns(self.scheme, np.random.default_rng(0), n, k) | (patterns or {})
        self.bias = next((t for t in self.kept if self.scheme.tensor(t).role == "bias"), None)
        self.stored = repack.write(self.scheme, self.scheme.layouts[layout], {t: made[t] for t in self.kept}, "l.")
        self.choice = chosen(name, layout, self.bias is not None, **params)
        self.patterns = self.as_read(self.scheme, self.stored, n, k)
        self.read = 0  # elements

    def as_read(self, scheme, stored, n, k):
        storage, sizes = scheme.layouts[self.layout], {"e": 1, "m": 1, "n": n, "k": k}
        bound = [b for b in storage.bindings if b.tensor in self.kept and f"l.{b.source}" in stored]
        return {b.tensor: repack.read(scheme, storage, b, stored, "l.", sizes) for b in bound}

    def part(self, style, rank, world):
        """(the part, its scheme, its patterns by name)."""
        part, params = quantized_part(self.choice, "", style, rank, world, self.n, self.k)
        own = resolved(self.name, params, None)

        def read(name, at):
            found = self.stored[name][at]
            self.read += found.numel()
            return found

        bias = self.bias is not None
        stored = cut(self.scheme, own, self.layout, part, "", bias, self.stored, "l.", read)
        storage = own.layouts[self.layout]
        assert misfits(own, storage, part.n, part.k, bias and part.has_bias, "", stored, "l.") == []
        return part, own, self.as_read(own, stored, part.n, part.k)

    def weight(self):
        return reference.decode_weight(self.scheme, self.patterns, self.n, self.k)


# ---- any scheme, any layout --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda v: v)
def test_weights_of_parts_are_those_of_the_whole(name, layout):
    """Blocks of 128 and parts of 80 and 32 features, 192 and 64 inputs: parts begin inside of blocks and of words."""
    whole = Whole(name, layout, 160, 384)
    weight, bias = whole.weight(), whole.bias and whole.patterns[whole.bias]
    transformed = any(a.transforms for a in whole.scheme.activations)
    directions = {"colwise": (2, 5), "rowwise": () if transformed else (2, 6)}
    for style, worlds in directions.items():
        for world in worlds:
            own_columns = []
            for rank in range(world):
                part, own, patterns = whole.part(style, rank, world)
                found = reference.decode_weight(own, patterns, part.n, part.k)
                assert np.array_equal(found, weight[part.rows, part.columns])
                own_columns.append(found[part.before :] if style == "colwise" else found[:, part.before :])
                if whole.bias is None:
                    continue
                if style == "colwise":
                    assert np.array_equal(patterns[whole.bias], bias[part.rows])
                elif rank == 0:
                    assert np.array_equal(patterns[whole.bias], bias)
                else:  # added once
                    assert not patterns.get(whole.bias, np.zeros(1)).any()
            assert np.array_equal(np.concatenate(own_columns, 0 if style == "colwise" else 1), weight)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("name", "layout"), [("gptq_actorder", "gptq_v1"), ("gptq_sym_actorder", "pack_quantized")])
def test_inputs_of_any_group_on_any_rank(name, layout, world):
    """Act-order: a rank's inputs name groups of all of k, some of them none, and keep the scales of all."""
    groups = np.random.default_rng(1).integers(0, 7, 256).astype(np.uint32)  # of 8; unequal, and one is empty
    whole = Whole(name, layout, 48, 256, {"g": groups}, group=32)
    total = 0.0
    x = np.random.default_rng(2).standard_normal((3, 256))
    for rank in range(world):
        part, own, patterns = whole.part("rowwise", rank, world)
        assert part.before == 0 and patterns["s"].shape == whole.patterns["s"].shape
        assert np.array_equal(patterns["g"], groups[part.columns])
        total = total + reference.linear(own, x[:, part.columns], patterns, 48).y
    expected = reference.linear(whole.scheme, x, whole.patterns, 48).y
    assert np.abs(total - expected).max() <= 1e-12 * np.abs(expected).max()


def test_an_integer_bias_that_corrects_a_zero_point_counts_once():
    whole = Whole("w8a8_quant_bias", "modelslim", 24, 96)
    x = np.random.default_rng(1).standard_normal((3, 96))
    parts = [whole.part("rowwise", rank, 3) for rank in range(3)]
    total = sum(reference.linear(own, x[:, part.columns], patterns, 24).y for part, own, patterns in parts)
    expected = reference.linear(whole.scheme, x, whole.patterns, 24).y
    assert np.abs(total - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "layout", "params"),
    [("awq4", "autoawq", {}), ("gptq", "gptq_v1", {"bits": 3}), ("gptq", "gptq_planar", {"bits": 5}),
     ("fp8_block", "deepseek", {}), ("nvfp4", "modelopt", {})],
)  # fmt: skip
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_no_more_is_read_than_a_rank_needs(name, layout, params, style):
    whole = Whole(name, layout, 256, 512, **params)
    whole.part(style, 1, 2)
    split = sum(t.numel() for t in whole.stored.values()) / 2
    assert abs(whole.read - split) <= 256 / 2 + 2  # the bias is not split by rows, and scalars never are


def test_what_cannot_be_split_says_why():
    cases = {
        ("awq4", "colwise", 3): "out_features = 160 can't be split over 3 ranks",
        ("awq4", "rowwise", 5): "in_features = 384 can't be split over 5 ranks",
        ("w4a4_flatquant", "rowwise", 2): "transforms x before it is quantized",
        ("gptq_actorder", "rowwise", 384): "1 inputs may not name all of the 3 groups of 384 inputs",
    }
    for (name, style, world), message in cases.items():
        with pytest.raises(qdsl.Error, match=message):
            quantized_part(chosen(name), "", style, 0, world, 160, 384)
    tests = Path(__file__).parent / "schemes"
    with pytest.raises(qdsl.Error, match="folds 2 features into one"):
        quantized_part(chosen(str(tests / "gate_up.q")), "", "colwise", 0, 2, 160, 384)
    with pytest.raises(qdsl.Error, match=r"y = .* of parts is no sum"):
        quantized_part(chosen(str(tests / "gate_up.q")), "", "rowwise", 0, 2, 160, 384)


# ---- whole models ------------------------------------------------------------------------------------------------
SPLIT = {
    "model.layers.*.self_attn.q_proj": "colwise_gather_output",
    "model.layers.*.self_attn.k_proj": "replicate",
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
TOKENS = torch.arange(24).reshape(2, 12) * 19 % 512


def built(directory=AWQ, **changes):
    config = transformers.AutoConfig.from_pretrained(directory)
    del config.quantization_config
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The checkpoint with biases everywhere, and two linears that are not quantized, one of each direction."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors, config = load_file(AWQ / "model.safetensors"), json.loads((AWQ / "config.json").read_text())
    config |= {"attention_bias": True, "mlp_bias": True}
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "k_proj", "o_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    plain, rng = built(attention_bias=True, mlp_bias=True), torch.Generator().manual_seed(1)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            tensors[f"{name}.bias"] = torch.randn(module.out_features, generator=rng) / 8
            if name.endswith(("k_proj", "o_proj")):
                tensors[f"{name}.weight"] = module.weight.detach().clone()
                for part in ("qweight", "qzeros", "scales"):
                    del tensors[f"{name}.{part}"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def answers(directory, **options):
    """Logits of a model, and the gradient of a sum of them to its embeddings."""
    model = load_quantized(built(directory), directory, **options)
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    (logits * torch.linspace(-1, 1, 512)).sum().backward()
    return model, logits.detach(), x.grad


OTHER = """
import sys
from datetime import timedelta
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import test_shard
dist.init_process_group("gloo", f"file://{sys.argv[3]}", timedelta(minutes=2), world_size=2, rank=1)
for plan in (None, test_shard.SPLIT):
    test_shard.answers(sys.argv[2], shard=(1, 2), tp_plan=plan)
dist.destroy_process_group()
"""


def test_two_processes_answer_as_one_does(directory, tmp_path):
    _, expected, gradient = answers(directory)
    command = [sys.executable, "-c", OTHER, str(Path(__file__).parent), str(directory), str(tmp_path / "meet")]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        dist.init_process_group("gloo", f"file://{tmp_path / 'meet'}", world_size=2, rank=0)
        for plan in (None, SPLIT):
            model, found, own = answers(directory, shard=(0, 2), tp_plan=plan)
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert (own - gradient).abs().max() <= 1e-5 * gradient.abs().max()
            layer = model.model.layers[0]
            assert (layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features) == (256, 256)
            heads = 4 if plan else 2  # gathered, so that all heads are here
            assert layer.self_attn.q_proj.out_features == 128 and layer.self_attn.k_proj.weight.shape == (
                32 * heads,
                256,
            )
        with pytest.raises(qdsl.Error, match=r"shard = \(1, 2\), but this process is rank 0 of 2"):
            load_quantized(built(directory), directory, shard=(1, 2))
        assert other.wait(120) == 0, other.stdout.read()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        other.kill()
        other.communicate()


def test_a_rank_has_its_part_of_every_linear(directory):
    """Without torch.distributed: partial sums of rows, and biases on the first rank alone."""
    full = load_quantized(built(directory), directory)
    parts = [load_quantized(built(directory), directory, shard=(rank, 2)) for rank in range(2)]
    for name, linear in full.named_modules():
        if not isinstance(linear, QuantLinear | nn.Linear) or name == "lm_head":
            continue
        own = [part.get_submodule(name) for part in parts]
        assert all(type(layer) is type(linear) for layer in own)
        by_rows = name.endswith(("o_proj", "down_proj"))
        weights = [m.dequantize() if isinstance(m, QuantLinear) else m.weight for m in (linear, *own)]
        assert torch.equal(torch.cat(weights[1:], int(by_rows)), weights[0])
        if by_rows:
            assert torch.equal(own[0].bias, linear.bias) and own[1].bias is None
        else:
            assert torch.equal(torch.cat([layer.bias for layer in own]), linear.bias)
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(2))
        xs = x.chunk(2, 1) if by_rows else (x, x)
        found = [layer(part) for layer, part in zip(own, xs)]
        y = sum(found) if by_rows else torch.cat(found, 1)
        assert (y - linear(x)).abs().max() <= 1e-5 * y.abs().max()


def test_floats_are_quantized_with_the_scales_of_the_whole_layer(tmp_path):
    """One scale a channel, and one a group of 64, in the second of which the second part's inputs begin."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(192, 64, dtype=torch.bfloat16)})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for scheme, params in (("w8a8_dynamic", {}), ("awq4", {"group": 64})):
        options = {"scheme": scheme, "params": params, "skip": ()}
        whole = load_quantized(nn.ModuleDict({"up": nn.Linear(192, 64)}), tmp_path, **options)["up"]
        for style, axis in (("colwise", 0), ("rowwise", 1)):
            ranks = [
                load_quantized(
                    nn.ModuleDict({"up": nn.Linear(192, 64)}), tmp_path, shard=(r, 2), tp_plan={"up": style}, **options
                )["up"]
                for r in range(2)
            ]
            size = (64, 192)[axis] // 2
            own = [layer.dequantize().narrow(axis, -size, size) for layer in ranks]
            assert torch.equal(torch.cat(own, axis), whole.dequantize())
            if style == "colwise":
                assert torch.equal(torch.cat([layer.bias for layer in ranks]), whole.bias)
            else:
                assert torch.equal(ranks[0].bias, whole.bias) and ranks[1].bias is None


def test_parts_that_begin_inside_of_a_block_are_layers(tmp_path):
    """fp8 in blocks of 128: of 160 x 384, parts of 80 features, or of 64 inputs."""
    whole = Whole("fp8a16_block", "deepseek", 160, 384)
    save_file({f"up.{name.removeprefix('l.')}": t for name, t in whole.stored.items()}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    x = torch.randn(2, 384, generator=torch.Generator().manual_seed(0)).bfloat16()

    def layers(style, world):
        for rank in range(world):
            model = nn.ModuleDict({"up": nn.Linear(384, 160, dtype=torch.bfloat16)})
            yield load_quantized(model, tmp_path, shard=(rank, world), tp_plan={"up": style})["up"]

    weight = torch.from_numpy(whole.weight().copy())
    expected = x.double() @ weight.T + torch.from_numpy(whole.scheme.tensor("b").dtype.decode(whole.patterns["b"]))
    columns, rows = list(layers("colwise", 2)), list(layers("rowwise", 6))
    assert [layer.out_features for layer in columns] == [80, 160] and [layer.in_features for layer in rows] == [
        64,
        128,
    ] * 3
    assert torch.equal(torch.cat([layer.dequantize()[-80:] for layer in columns]), weight)
    assert torch.equal(torch.cat([layer.dequantize()[:, -64:] for layer in rows], 1), weight)
    whole_y = torch.cat([layer(x) for layer in columns], 1).double()
    summed = sum(layer(part) for layer, part in zip(rows, x.chunk(6, 1), strict=True)).double()
    for y in (whole_y, summed):  # x is rounded to e4m3, in blocks of its own
        assert (y - expected).norm() <= 0.05 * expected.norm()


def test_models_that_cannot_be_split_say_why_and_stay(tmp_path):
    def refused(message, model=None, **options):
        model = built() if model is None else model
        before = {name: type(m) for name, m in model.named_modules()}
        with pytest.raises((qdsl.CheckpointError, ValueError), match=message):
            load_quantized(model, AWQ, **options)
        assert {name: type(m) for name, m in model.named_modules()} == before

    refused(r"2 heads \(num_key_value_heads\) can't be split over 4 ranks", shard=(0, 4))
    refused("shard is \\(rank, world\\) with 0 <= rank < world, not \\(2, 2\\)", shard=(2, 2))
    refused("without shard = \\(rank, world\\) nothing is", tp_plan=SPLIT)
    refused("the plan's style `ep` is not supported", shard=(0, 2), tp_plan={"lm_head": "ep"})
    refused("names no linear of the model: model.up", shard=(0, 2), tp_plan={"model.up": "colwise"})
    tied = built()
    tied.other = nn.Linear(256, 512, bias=False)
    tied.other.weight = tied.lm_head.weight
    refused("lm_head: its weight is tied", tied, shard=(0, 2), tp_plan={"lm_head": "colwise"})
    planless = built()
    planless.config.base_model_tp_plan = None
    refused("LlamaForCausalLM has no plan for tensor parallelism", planless, shard=(0, 2))
    convert(AWQ, tmp_path / "converted")
    with pytest.raises(qdsl.CheckpointError, match="up_proj: it is saved for kernels as a whole"):
        load_quantized(built(), tmp_path / "converted", shard=(0, 2))
    gathered = load_quantized(built(), AWQ, shard=(0, 2), tp_plan=SPLIT)
    with pytest.raises(qdsl.Error, match=r"initialize torch\.distributed"):
        gathered(TOKENS)
