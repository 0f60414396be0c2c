"""Experts: stacks in place of 3-D parameters and of lists, from every form in which files hold them."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import decoders
import packers
import qdsl
from qdsl import reference
from qdsl.runtime import QuantExperts, QuantLinear, QuantStack, load_quantized
from qdsl.runtime.conversion import convert
from qdsl.runtime.examination import examine
from qdsl.runtime.inspection import inspect

transformers = pytest.importorskip("transformers")

MIXTRAL = Path(__file__).parent / "data" / "awq_moe_mixtral_g64"
HIDDEN, INNER, EXPERTS = 64, 96, 4
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) * 19 % 64


def built(config, kind=torch.float32):
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    if hasattr(model, "set_experts_implementation") and kind == torch.float64:
        model.set_experts_implementation("eager")  # the others take no float64
    return model


def qwen(**more):
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, **more)


def gpt_oss():
    return transformers.GptOssConfig(
        **SIZES, num_local_experts=EXPERTS, layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip


def experts_of(model) -> QuantExperts:
    (found,) = (m for m in model.modules() if isinstance(m, QuantExperts))
    return found


def written(directory, config, settings, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps(config.to_dict() | {"quantization_config": settings}, default=str)
    )
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def near(model, exact, tokens=TOKENS, limit=1e-5):
    """The logits of a model are those of one in float64 with the weights that were stored."""
    with torch.inference_mode():
        found, expected = model(tokens).logits.double(), exact(tokens).logits
    assert (found - expected).abs().max() <= limit * expected.abs().max()


def refused(model, directory, *messages):
    before = [type(m) for m in model.modules()]
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(model, directory)
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    assert [type(m) for m in model.modules()] == before
    return str(caught.value)


# ---- a checkpoint of AutoAWQ ---------------------------------------------------------------------------------------
@functools.cache
def mixtral():
    return transformers.AutoConfig.from_pretrained(MIXTRAL)


@pytest.fixture(scope="module")
def loaded():
    return load_quantized(built(mixtral()), MIXTRAL)


def test_experts_of_a_whole_checkpoint(loaded):
    """Weights to the bit, and logits as of the model in float64 with them."""
    stored = {name: t.numpy() for name, t in load_file(MIXTRAL / "model.safetensors").items()}
    exact, state, at = built(mixtral(), torch.float64), {}, "model.layers.0.block_sparse_moe"
    for name, tensor in stored.items():
        if name.endswith("qweight"):
            state[name.replace("qweight", "weight")] = torch.from_numpy(decoders.awq(stored, name[: -len("qweight")]))
        elif name.endswith("weight"):
            state[name.replace("block_sparse_moe", "mlp")] = torch.from_numpy(tensor.astype(np.float64))
    experts = experts_of(loaded)
    for own, theirs in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        stack = experts.projections[own]
        assert isinstance(stack, QuantStack) and stack.count == 4 and stack.q.shape[0] == 4
        for e in range(4):
            assert torch.equal(stack.dequantize(e), state[f"{at}.experts.{e}.{theirs}.weight"])
    one = [{w: state.pop(f"{at}.experts.{e}.{w}.weight") for w in ("w1", "w2", "w3")} for e in range(4)]
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack([torch.cat([own["w1"], own["w3"]]) for own in one])
    state["model.layers.0.mlp.experts.down_proj"] = torch.stack([own["w2"] for own in one])
    exact.load_state_dict(state)
    near(loaded, exact, torch.arange(24).reshape(2, 12) * 19 % 512)
    assert isinstance(loaded.model.layers[0].mlp.gate.weight, nn.Parameter)


def test_routing_is_that_of_the_class_replaced(loaded):
    """Also where a slot names no expert, an expert is hit by nobody, and there are no tokens."""
    experts, plain = experts_of(loaded), built(mixtral()).model.layers[0].mlp.experts
    plain.config._experts_implementation = "eager"
    with torch.no_grad():
        for e in range(4):
            own = {name: stack.dequantize(e, torch.float32) for name, stack in experts.projections.items()}
            plain.gate_up_proj[e] = torch.cat([own["gate_proj"], own["up_proj"]])
            plain.down_proj[e] = own["down_proj"]
    x, weights = torch.randn(5, 128), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [4, 0], [3, 1], [1, 4], [4, 4]])
    found, expected = experts(x, chosen, weights), plain(x, chosen, weights)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max() and not found[4].any()
    assert experts(x[:0], chosen[:0], weights[:0]).shape == (0, 128)
    assert experts(x.half(), chosen, weights).dtype == torch.float16
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    grads = [torch.autograd.grad(m(i, chosen, weights).sum(), i)[0] for m, i in zip((experts, plain), inputs)]
    assert (grads[0] - grads[1]).abs().max() < 1e-5 * grads[1].abs().max()
    for wrong in ((x, chosen, weights[:, :1]), (x, chosen), (x[:4], chosen, weights), (x, chosen + 3, weights)):
        with pytest.raises(ValueError, match=r"experts and weights of each|tokens|routed to expert 7 of 4"):
            experts(*wrong)


def test_stacks_are_copied_moved_and_saved(loaded, tmp_path):
    experts = experts_of(loaded)
    x, chosen, weights = torch.randn(6, 128), torch.tensor([[0, 1], [2, 3]] * 3), torch.rand(6, 2)
    expected, plain = experts(x, chosen, weights), {k: v.clone() for k, v in experts.state_dict().items()}
    assert sum(t.nbytes for t in experts.buffers()) < 1.02 * sum(
        t.nbytes for name, t in load_file(MIXTRAL / "model.safetensors").items() if "experts" in name
    )
    torch.save(experts, tmp_path / "experts.pt")
    for other in (
        copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)),
        torch.load(tmp_path / "experts.pt", weights_only=False), copy.deepcopy(experts).half().float(),
    ):  # fmt: skip
        assert torch.equal(other(x, chosen, weights), expected)
    half = copy.deepcopy(experts).half()
    assert half.down_proj.dtype == torch.float16 and half(x.half(), chosen, weights.half()).dtype == torch.float16
    assert all(
        torch.equal(half.state_dict()[name], t) for name, t in plain.items() if not name.endswith("_extra_state")
    )
    fresh = QuantStack(4, "awq4", 256, 128, dtype=torch.float32, group=64)
    with pytest.raises(qdsl.Error, match="has no weights yet"):
        fresh(torch.randn(1, 256), 0)
    save_file(dict(experts.down_proj.state_dict()), tmp_path / "down.safetensors")
    fresh.load_state_dict(load_file(tmp_path / "down.safetensors"))
    h = torch.randn(3, 256)
    assert all(torch.equal(fresh(h, e), experts.down_proj(h, e)) for e in range(4))
    assert torch.equal(fresh(h, 1), fresh.member(1)(h))
    with pytest.raises(RuntimeError, match=r"saved: e = 4(.|\n)*layer: e = 3"):
        QuantStack(3, "awq4", 256, 128, dtype=torch.float32, group=64).load_state_dict(fresh.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key(.|\n)*Unexpected key"):
        fresh.load_state_dict({"x" if name == "q" else name: t for name, t in fresh.state_dict().items()})
    assert fresh.to("meta").q.is_meta and fresh.to_empty(device="cpu").q.shape[0] == 4


def test_members_are_layers_to_the_bit():
    """Also where a member's share of a stack begins where no kernel may read: scales of 4 bytes."""
    scheme = qdsl.load("fp8_static")
    each = [reference.random_patterns(scheme, np.random.default_rng(e), 48, HIDDEN) for e in range(3)]
    stack, x = QuantStack(3, scheme, HIDDEN, 48), torch.randn(5, HIDDEN)
    stack.fill(lambda e, one: one.set_patterns(each[e]))
    x = x.to(stack.dtype).requires_grad_()
    for e, patterns in enumerate(each):
        layer = QuantLinear(scheme, HIDDEN, 48).set_patterns(patterns)
        assert torch.equal(stack(x, e), layer(x)) and torch.equal(stack.dequantize(e), layer.dequantize())
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (stack(x, e), layer(x))]
        assert torch.equal(*grads)
    with pytest.raises(qdsl.CheckpointError, match="no patterns for"):
        stack.fill(lambda e, one: one.set_patterns(each[e] if e < 2 else {}))
    with pytest.raises(qdsl.Error, match="has no weights yet"):
        stack(x, 0)


@pytest.mark.filterwarnings("ignore:.*configuration and tensors disagree")
def test_what_is_missing_or_misshapen_is_named(tmp_path):
    shutil.copytree(MIXTRAL, tmp_path / "damaged")
    whole, path = load_file(MIXTRAL / "model.safetensors"), tmp_path / "damaged" / "model.safetensors"
    model, at = built(mixtral()), "model.layers.0.block_sparse_moe.experts"

    def without(changes, *messages):
        save_file({name: t for name, t in {**whole, **changes}.items() if t is not None}, path)
        return refused(model, tmp_path / "damaged", *messages)

    for part in ("qweight", "qzeros", "scales"):
        without({f"{at}.3.w2.{part}": None}, "model.safetensors: ", f"`{at}.3.w2.{part}` is missing")
    said = without(
        {f"{at}.{e}.w1.scales": None for e in range(4)}, f"`{at}.0.w1.scales`", "(and so for 3 more experts)"
    )
    assert f"{at}.1" not in said
    without({name: None for name in whole if f"{at}.2." in name}, f"`{at}.2.w1` is in no file")
    without({f"{at}.1.w3.scales": whole[f"{at}.1.w3.scales"][:1].clone()}, f"`{at}.1.w3.scales` is [1, 256]")
    without(
        {f"{at}.4.w1.qweight": whole[f"{at}.0.w1.qweight"].clone()}, f"`{at}.4.w1.qweight` has no place in the model"
    )
    parts = ("qweight", "qzeros", "scales")
    dense = {**{f"{at}.1.w2.{part}": None for part in parts}, f"{at}.1.w2.weight": torch.zeros(128, 256)}
    without(dense, f"`{at}.1.w2` is stored as `{at}.1.w2.weight`, and `{at}.0.w1` is quantized")
    without({f"{at}.1.w2.scales": whole[f"{at}.1.w2.scales"].float()}, f"`{at}.1.w2` is awq4(", "must be alike")
    without(
        {"model.layers.0.block_sparse_moe.gate.weight": None},
        "`model.layers.0.block_sparse_moe.gate.weight` is in no file",
    )


# ---- tensors of one expert each ------------------------------------------------------------------------------------
def gptq(name, n, k, seed, index=None, symmetric=True):
    """(the weight, its tensors as GPTQModel stores them), in groups of 32."""
    rng = np.random.default_rng(seed)
    q, z = rng.integers(0, 16, (n, k)), np.full((k // 32, n), 8) if symmetric else rng.integers(1, 16, (k // 32, n))
    s = rng.uniform(0.01, 0.02, (k // 32, n)).astype(np.float16)
    index = np.arange(k) // 32 if index is None else index
    words = {"qweight": packers.autogptq(q, 4), "qzeros": packers.autogptq(z, 4).T}
    stored = {f"{name}.{part}": torch.from_numpy(w.astype(np.uint32).view(np.int32)) for part, w in words.items()}
    stored |= {f"{name}.scales": torch.from_numpy(s), f"{name}.g_idx": torch.from_numpy(index.astype(np.int32))}
    return torch.from_numpy((q - z.T[:, index]) * s.T[:, index].astype(np.float64)), stored


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2"}


def made_qwen(model, ways, base="model.layers.0.mlp.experts"):
    """(the exact weights by projection, the tensors of a checkpoint); `ways` has options of single experts."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items() if ".experts." not in name}
    weights: dict[str, list[torch.Tensor]] = {}
    for own, (n, k) in {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        for e in range(EXPERTS):
            weight, stored = gptq(f"{base}.{e}.{own}", n, k, len(tensors), **ways.get((own, e), {}))
            tensors |= stored
            weights.setdefault(own, []).append(weight)
    return {own: torch.stack(each) for own, each in weights.items()}, tensors


def test_experts_whose_groups_or_zeros_differ_are_read_in_the_general_way(tmp_path):
    """One expert is out of order or asymmetric, as one that calibration hit; the stack has one scheme."""
    shuffled = np.random.default_rng(1).permutation(np.arange(INNER) // 32)
    ways = {("down_proj", 2): {"index": shuffled}, ("up_proj", 1): {"symmetric": False}}
    weights, tensors = made_qwen(built(qwen()), ways)
    with pytest.warns(UserWarning, match="symmetric by the configuration, but its zero points are not"):
        model = load_quantized(built(qwen()), written(tmp_path / "gptq", qwen(), GPTQ, tensors))
    experts, exact = experts_of(model), built(qwen(), torch.float64)
    kinds = {own: stack.scheme.name for own, stack in experts.projections.items()}
    assert [kinds[own] for own in weights] == ["gptq_sym", "gptq", "gptq_sym_actorder"]
    for own, each in weights.items():
        assert all(torch.equal(experts.projections[own].dequantize(e), weight) for e, weight in enumerate(each))
    state = {name: t for name, t in tensors.items() if name in exact.state_dict()}
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat([weights["gate_proj"], weights["up_proj"]], 1)
    state["model.layers.0.mlp.experts.down_proj"] = weights["down_proj"]
    exact.load_state_dict(state)
    near(model, exact)


class Listed(nn.Module):
    """A block as models had it before their experts were 3-D parameters."""

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, x):
            return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Listed.Expert() for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            token, slot = torch.where(chosen == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


@pytest.mark.filterwarnings("ignore:.*configuration and tensors disagree")
def test_lists_of_experts_are_stacked_and_run_their_own_forward(tmp_path):
    torch.manual_seed(0)
    model, exact = nn.ModuleDict({"mlp": Listed()}), nn.ModuleDict({"mlp": Listed()}).double()
    weights, tensors = made_qwen(model, {("up_proj", 0): {"index": np.arange(HIDDEN) // 32 ^ 1}}, "mlp.experts")
    directory = written(tmp_path / "listed", qwen(), GPTQ, tensors)
    found = inspect(directory, model)
    assert [(row.module, row.experts) for row in found.modules] == [
        ("mlp.gate", 0), ("mlp.experts.gate_proj", 4), ("mlp.experts.up_proj", 4), ("mlp.experts.down_proj", 4),
    ]  # fmt: skip
    load_quantized(model, directory)
    experts = model.mlp.experts
    assert isinstance(experts, QuantExperts) and len(experts) == EXPERTS and not list(experts.parameters())
    state = {"mlp.gate.weight": tensors["mlp.gate.weight"]}
    state |= {f"mlp.experts.{e}.{own}.weight": w for own, each in weights.items() for e, w in enumerate(each)}
    exact.load_state_dict(state)
    x = torch.randn(7, HIDDEN)
    found, expected = model.mlp(x), exact.mlp(x.double())
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(copy.deepcopy(model).mlp(x), found) and torch.equal(
        pickle.loads(pickle.dumps(model)).mlp(x), found
    )
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.mlp(x), found)
    out = convert(directory, tmp_path / "converted", model=nn.ModuleDict({"mlp": Listed()}))
    assert torch.equal(load_quantized(nn.ModuleDict({"mlp": Listed()}), out).mlp(x), found)
    tensors["mlp.experts.1.down_proj.weight"] = torch.zeros(HIDDEN, INNER)  # one of them dense: each by itself
    less = {
        name: t
        for name, t in tensors.items()
        if not name.startswith("mlp.experts.1.down_proj.") or name.endswith(".weight")
    }
    apart = load_quantized(nn.ModuleDict({"mlp": Listed()}), written(tmp_path / "apart", qwen(), GPTQ, less))
    assert isinstance(apart.mlp.experts, nn.ModuleList) and isinstance(apart.mlp.experts[1].up_proj, QuantLinear)


def test_experts_may_be_floats(tmp_path):
    """In a checkpoint whose attention is quantized: expert by expert, or as the model has them."""
    model = built(qwen())
    name, at = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
    _, stored = gptq(name, 64, HIDDEN, 0)
    whole = {key: t.detach().clone() for key, t in model.state_dict().items() if not key.startswith(name)} | stored
    apart = {key: t for key, t in whole.items() if ".experts." not in key}
    for e in range(EXPERTS):
        apart[f"{at}.{e}.gate_proj.weight"], apart[f"{at}.{e}.up_proj.weight"] = whole[f"{at}.gate_up_proj"][e].chunk(2)
        apart[f"{at}.{e}.down_proj.weight"] = whole[f"{at}.down_proj"][e]
    for tensors, why in ((whole, "stored as float32"), (apart, "stored as float32, expert by expert")):
        directory = written(tmp_path / "floats", qwen(), GPTQ, tensors)
        rows = {row.module: row for row in inspect(directory).modules}
        assert rows[f"{at}.down_proj"].why == why and rows[f"{at}.down_proj"].experts == EXPERTS
        other = built(qwen())
        with torch.no_grad():
            other.model.layers[0].mlp.experts.gate_up_proj.zero_()
        load_quantized(other, directory)
        assert all(torch.equal(other.state_dict()[key], model.state_dict()[key]) for key in whole if ".experts." in key)
    del apart[f"{at}.2.up_proj.weight"]
    refused(built(qwen()), written(tmp_path / "floats", qwen(), GPTQ, apart), f"`{at}.2.up_proj.weight` is in no file")
    apart[f"{at}.2.up_proj.weight"] = torch.zeros(INNER, HIDDEN - 1)
    directory = written(tmp_path / "floats", qwen(), GPTQ, apart)
    refused(built(qwen()), directory, f"`{at}.2.up_proj.weight` is [96, 63], the model needs [96, 64]")


def test_a_description_may_have_one_key_for_all_experts(tmp_path):
    """ModelSlim: `experts.weight` means each; without any key, what is stored as floats is floats."""
    rng, at = np.random.default_rng(2), "model.layers.0.mlp.experts"
    model = built(qwen())
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items() if ".experts." not in name}
    for e in range(EXPERTS):
        for own, shape in {
            "gate_proj": (INNER, HIDDEN),
            "up_proj": (INNER, HIDDEN),
            "down_proj": (HIDDEN, INNER),
        }.items():
            tensors |= {
                f"{at}.{e}.{own}.weight": torch.from_numpy(rng.integers(-128, 128, shape).astype(np.int8)),
                f"{at}.{e}.{own}.weight_scale": torch.from_numpy(rng.uniform(0.01, 0.02, (shape[0], 1)).astype(np.float32)),
                f"{at}.{e}.{own}.weight_offset": torch.zeros(shape[0], 1),
            }  # fmt: skip
    directory = written(tmp_path / "modelslim", qwen(), {}, tensors)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    description = directory / "quant_model_description.json"
    description.write_text(json.dumps({f"{at}.weight": "W8A8_DYNAMIC"}))
    found = examine(built(qwen()), directory)
    assert not found.problems and found.plan.choices[f"{at}.3.up_proj"].scheme == "w8a8_dynamic"
    assert set(found.stacks) == {at}
    description.write_text(json.dumps({f"language_model.{at}.0.gate_proj.weight": "W8A8_DYNAMIC"}))
    said = "\n".join(examine(built(qwen()), directory).problems)
    assert f"`{at}.0.gate_proj.weight` is stored quantized, and has no type in the description (nearest: " in said
    assert "(and so for 3 more experts)" in said and "has no place" not in said


# ---- tensors of all experts together -------------------------------------------------------------------------------
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def made_mxfp4(model):
    """(the state of the exact model, the tensors of gpt-oss' checkpoints): blocks of 32 along k, low nibble first."""
    rng, state, tensors = torch.Generator().manual_seed(1), {}, {}
    for name, t in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, k, n = t.shape
            blocks = torch.randint(0, 256, (count, n, k // 32, 16), dtype=torch.uint8, generator=rng)
            scales = torch.randint(118, 124, (count, n, k // 32), dtype=torch.uint8, generator=rng)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight = torch.empty(count, n, k, dtype=torch.float64)
            for block in range(k // 32):
                for j in range(16):
                    for half, code in enumerate((blocks[:, :, block, j] & 15, blocks[:, :, block, j] >> 4)):
                        power = torch.exp2(scales[:, :, block].double() - 127)
                        weight[:, :, 32 * block + 2 * j + half] = E2M1[code.long()] * power
            state[name] = weight.transpose(1, 2)
        else:
            tensors[name] = torch.randn(t.shape, generator=rng).bfloat16() * (2 if "bias" in name else 0.2)
            state[name] = tensors[name].double()
    return state, tensors


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def test_mxfp4_of_gpt_oss(tmp_path):
    """Rows of gate and up alternate, each expert has biases, and the activation clamps: all as the model's class has it."""
    state, tensors = made_mxfp4(built(gpt_oss()))
    directory = written(tmp_path / "gpt_oss", gpt_oss(), MXFP4, tensors)
    model, exact = load_quantized(built(gpt_oss()), directory), built(gpt_oss(), torch.float64)
    again = load_quantized(built(gpt_oss()), convert(directory, tmp_path / "converted"))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    exact.load_state_dict(state)
    experts = experts_of(model)
    for own, stack in experts.projections.items():
        weights, biases = state[f"model.layers.0.mlp.experts.{own}"], tensors[f"model.layers.0.mlp.experts.{own}_bias"]
        assert all(torch.equal(stack.dequantize(e), weights[e].T) for e in range(EXPERTS))
        assert torch.equal(stack.b, biases) and stack.b.dtype == torch.bfloat16
    near(model, exact)
    rows = {row.module: row for row in inspect(directory).modules}
    row = rows["model.layers.0.mlp.experts.gate_up_proj"]
    assert (row.experts, row.n, row.k, row.scheme, row.layout) == (4, 192, 64, "mxfp4", "gpt_oss")
    at = "model.layers.0.mlp.experts.down_proj"

    def damaged(changes, *messages):
        less = {name: t for name, t in {**tensors, **changes}.items() if t is not None}
        said = refused(built(gpt_oss()), written(tmp_path / "damaged", gpt_oss(), MXFP4, less), *messages)
        assert said.count("\n- ") == 1, said

    for part in ("blocks", "scales", "bias"):
        damaged({f"{at}_{part}": None}, "model.safetensors: ", f"`{at}_{part}` is ")
    damaged({f"{at}_scales": tensors[f"{at}_scales"][:3]}, f"`{at}_scales` is [3, 64, 3], and the model has 4 experts")
    damaged({f"{at}_scales": tensors[f"{at}_scales"][:, :, :2]}, f"`{at}_scales[e]` is [64, 2], layout needs [64, 3]")
    damaged({f"{at}_blocks": tensors[f"{at}_blocks"].int()}, f"`{at}_blocks[e]` is torch.int32")


def llama4():
    return transformers.Llama4TextConfig(
        **SIZES, num_local_experts=EXPERTS, intermediate_size_mlp=INNER, interleave_moe_layer_step=1, attn_temperature_tuning=False,
        no_rope_layers=[1], pad_token_id=0,
    )  # fmt: skip


def test_fp8_of_llama_4(tmp_path):
    """Parameters lie [e, k, n] with a scale for each output, and the class takes tokens in one part for each expert."""
    model, rng = built(llama4()), torch.Generator().manual_seed(3)
    tensors, state = {}, {}
    for name, t in model.state_dict().items():
        tensors[name] = t.detach().clone()
        if ".experts." in name:
            tensors[name] = (torch.randn(t.shape, generator=rng) * 60).to(torch.float8_e4m3fn)
            n = t.shape[2]
            scale = torch.rand((EXPERTS, n), generator=rng) * 0.01 + 0.001
            tensors[f"{name}_scale"] = scale.reshape((-1, 1, n) if "gate_up" in name else (-1, n, 1))
            state[name] = tensors[name].double() * scale[:, None].double()
    settings = {
        "quant_method": "fbgemm_fp8",
        "modules_to_not_convert": ["self_attn", "router", "lm_head", "shared_expert"],
    }
    directory = written(tmp_path / "llama4", llama4(), settings, tensors)
    model = load_quantized(model, directory)
    experts = experts_of(model)
    assert {stack.scheme.name for stack in experts.projections.values()} == {"fp8_dynamic"}
    for own, stack in experts.projections.items():
        weights = state[f"model.layers.0.feed_forward.experts.{own}"]
        assert all(torch.equal(stack.dequantize(e), weights[e].T) for e in range(EXPERTS))
    plain = built(llama4(), torch.float64).model.layers[0].feed_forward.experts
    plain.load_state_dict({own: state[f"model.layers.0.feed_forward.experts.{own}"] for own in experts.projections})
    x = torch.randn(EXPERTS * 3, HIDDEN)
    found, expected = experts(x), plain(x.double())
    assert (found - expected).abs().max() < 0.15 * expected.abs().max()  # x is rounded to e4m3, twice
    with torch.inference_mode():
        assert torch.isfinite(model(TOKENS).logits).all()


@pytest.mark.parametrize(
    "names", [("gate_up_proj", "down_proj", "", "_scale_inv"), ("w13", "w2", "_weight", "_weight_scale_inv")]
)
def test_blocks_of_experts_together_are_those_of_each(names, tmp_path):
    """fp8 in blocks under two spellings: what a format sees of a stack is what it sees of experts stored one by one."""
    tensors = {key: t.detach().clone() for key, t in built(qwen()).state_dict().items() if ".experts." not in key}
    wide, down, codes, scales = names
    whole = {
        f"{wide}{codes}": torch.randn(EXPERTS, 2 * INNER, HIDDEN).to(torch.float8_e4m3fn),
        f"{wide}{scales}": torch.rand(EXPERTS, 2 * INNER // 32, HIDDEN // 32),
        f"{down}{codes}": torch.randn(EXPERTS, HIDDEN, INNER).to(torch.float8_e4m3fn),
        f"{down}{scales}": torch.rand(EXPERTS, HIDDEN // 32, INNER // 32),
    }
    at = "model.layers.0.mlp.experts"
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    stored = tensors | {f"{at}.{key}": t for key, t in whole.items()}
    found = examine(built(qwen()), written(tmp_path / "fp8", qwen(), settings, stored))
    assert not found.problems and {c.scheme for c in found.plan.choices.values()} == {"fp8_block"}
    for own, name in (("gate_up_proj", wide), ("down_proj", down)):
        (projection,) = (p for p in found.stacks[at] if p.name == own)
        for e, module in enumerate(projection.modules):
            assert torch.equal(found.files.member(e)[f"{module}.weight"].float(), whole[f"{name}{codes}"][e].float())
            assert torch.equal(found.files.member(e)[f"{module}.weight_scale_inv"], whole[f"{name}{scales}"][e])


def test_classes_that_are_not_known_are_refused(tmp_path):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN))
            self.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER))

        def forward(self, x, router_indices, routing_weights):
            return x

    _, tensors = made_qwen(nn.ModuleDict({"gate": nn.Linear(2, 2, bias=False)}), {}, "experts")
    directory = written(tmp_path / "unknown", qwen(), GPTQ, tensors)
    model = nn.ModuleDict({"gate": nn.Linear(2, 2, bias=False), "experts": Experts()})
    said = refused(model, directory, "`experts` can't hold the experts that are stored as `experts.0.")
    assert "whose forward takes x, router_indices, routing_weights" in said and said.count("\n- ") == 1


# ---- memory --------------------------------------------------------------------------------------------------------
def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def test_a_stack_is_never_there_twice():
    """Beyond the final size there is one expert at a time."""
    count, n, k = 48, 256, 2048
    shapes = {"qweight": (k, n // 8), "qzeros": (k // 128, n // 8), "scales": (k // 128, n)}
    kinds = {"scales": torch.float16}
    one = {part: torch.ones(shape, dtype=kinds.get(part, torch.int32)) for part, shape in shapes.items()}
    tensors = {f"{e}.{part}": tensor.clone() for e in range(count) for part, tensor in one.items()}
    size = sum(t.nbytes for t in tensors.values())
    QuantStack(1, "awq4", k, n, dtype=torch.float32).load(tensors, "{e}.", "autoawq")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of this process can't be set back")
    before = _peak()
    stack = QuantStack(count, "awq4", k, n, dtype=torch.float32).load(tensors, "{e}.", "autoawq")
    assert _peak() - before < 1.6 * size
    assert sum(t.nbytes for t in stack.buffers()) < 1.01 * size
