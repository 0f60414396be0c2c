"""From configurations and headers to schemes: small checkpoints made with the published packing rules, right and wrong.

No kernel is made here: a choice is right when its layout reads the weight that was packed.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import packers
import qdsl
from qdsl import reference
from qdsl.runtime import repack
from qdsl.runtime.checkpoints import FORMATS, Module

X = "model.layers.0.mlp.up_proj"
N, K = 64, 128


def tensor(words, kind=torch.int32):
    return repack.tensor_of(words.astype(f"uint{torch.empty(0, dtype=kind).element_size() * 8}"), kind)


def planned(method, config, stored, n=N, k=K, bias=False, name=X):
    """What a format makes of one module, whose headers are all that it may look at until it reads."""
    headers = {key: t.to("meta") for key, t in stored.items()}
    return FORMATS[method](config, {name: Module(n, k, bias)}, headers, stored.__getitem__)


def decoded(plan, stored, n=N, k=K, name=X):
    """The weight that a plan's choice reads."""
    assert not plan.problems
    choice = plan.choices[name]
    scheme = qdsl.load(choice.scheme, **choice.params)
    own = {short: stored[full] for full, short in choice.tensors.items()}
    for short, shape in choice.leading.items():
        for at, size in enumerate(shape):
            own[short] = own[short].narrow(at, 0, size)
    own |= choice.given
    own |= {short: made.make(own) for short, made in choice.made.items()}
    storage, sizes = scheme.layouts[choice.layout], {"e": 1, "m": 1, "n": n, "k": k}
    wanted = {t.name: t for t in scheme.weight.loaded}
    problems = repack.mismatches(scheme, storage, own, "", sizes, wanted)
    assert not problems, "\n".join(map(str, problems))
    given = {b.tensor: repack.read(scheme, storage, b, own, "", sizes) for b in storage.bindings if b.tensor in wanted}
    return reference.decode_weight(scheme, given, n, k)


def refused(plan, *messages):
    text = "\n".join(plan.problems)
    assert plan.problems, plan
    for message in messages:
        assert message in text, text


# ---- GPTQ --------------------------------------------------------------------------------------------------------
def made_gptq(bits=4, group=32, label="gptq", symmetric=True, whole_words=False, index=None, seed=0, planes=False):
    """(the weight, the stored tensors)"""
    rng = np.random.default_rng(seed)
    groups = -(-K // group)
    q = rng.integers(0, 1 << bits, (N, K))
    z = np.full((groups, N), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (groups, N))
    if not symmetric:
        z[:, ::7] = 0  # the zero points that borrow
    s = rng.uniform(0.01, 0.02, (groups, N)).astype(np.float16)
    index = np.arange(K) // group if index is None else index
    pack = packers.gptq_planar if planes else packers.autogptq
    if label != "gptq":
        zeros = pack(z, bits).T
    elif whole_words:
        ones = sum(1 << at for at in range(0, 32, bits))
        zeros = (packers.autogptq(z, bits).T - np.uint64(ones)) & np.uint64(0xFFFFFFFF)
    else:
        zeros = packers.autogptq((z - 1) % (1 << bits), bits).T
    stored = {
        f"{X}.qweight": tensor(pack(q, bits)), f"{X}.qzeros": tensor(zeros),
        f"{X}.scales": torch.from_numpy(s), f"{X}.g_idx": torch.from_numpy(index.astype(np.int32)),
    }  # fmt: skip
    return (q - z.T[:, index]) * s.T[:, index].astype(np.float64), stored


def gptq_config(bits=4, group=32, label="gptq", symmetric=True, **more):
    return {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, "checkpoint_format": label} | more


MODEL = {"meta": {"quantizer": ["gptqmodel:7.3.4"]}}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_gptq_widths_and_zeros(bits, symmetric, label):
    weight, stored = made_gptq(bits, label=label, symmetric=symmetric)
    plan = planned("gptq", gptq_config(bits, label=label, symmetric=symmetric), stored)
    assert np.array_equal(decoded(plan, stored), weight)
    assert plan.choices[X].scheme == ("gptq_sym" if symmetric else "gptq")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_that_borrow_across_fields_are_read_as_gptqmodel_wrote_them(bits):
    weight, stored = made_gptq(bits, symmetric=False, whole_words=True)
    plan = planned("gptq", gptq_config(bits, symmetric=False, **MODEL), stored)
    assert np.array_equal(decoded(plan, stored), weight)
    old = planned("gptq", gptq_config(bits, symmetric=False, meta={"quantizer": "gptqmodel:0.8.1"}), stored)
    assert not np.array_equal(decoded(old, stored), weight)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_planes_of_bits(bits):
    weight, stored = made_gptq(bits, label="gptq_p", symmetric=False, planes=True)
    assert np.array_equal(
        decoded(planned("gptq", gptq_config(bits, label="gptq_p", symmetric=False), stored), stored), weight
    )
    refused(planned("gptq", gptq_config(bits, label="gptq_v2", symmetric=False), stored) if bits > 3
            else planned("gptq", gptq_config(9, label="gptq_p"), stored), "GPTQ with bits = ")  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored_as", ["gptq", "gptq_v2"])
def test_a_wrong_label_of_a_symmetric_file_is_reported_and_changes_nothing(bits, stored_as):
    weight, stored = made_gptq(bits, label=stored_as)
    other = "gptq" if stored_as == "gptq_v2" else "gptq_v2"
    for label in (stored_as, other, None):
        config = gptq_config(bits, label=label)
        plan = planned("gptq", config, stored)
        assert np.array_equal(decoded(plan, stored), weight)
        assert bool(plan.contradictions) == ((label or "gptq") != stored_as)
        assert all(X in text for text in plan.contradictions)


def test_zeros_that_are_not_constant_count_whatever_sym_says():
    weight, stored = made_gptq(symmetric=False)
    plan = planned("gptq", gptq_config(symmetric=True), stored)
    assert np.array_equal(decoded(plan, stored), weight) and "not all 8" in plan.contradictions[0]


def test_one_group_is_spelled_in_two_ways():
    weight, stored = made_gptq(group=K)
    plans = [planned("gptq", gptq_config(group=group), stored) for group in (-1, K)]
    assert all(np.array_equal(decoded(plan, stored), weight) for plan in plans)
    assert plans[0].choices[X].params == plans[1].choices[X].params


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_last_group_may_be_short(symmetric):
    weight, stored = made_gptq(group=96, symmetric=symmetric)  # of 128 inputs
    plan = planned("gptq", gptq_config(group=96, symmetric=symmetric), stored)
    assert np.array_equal(decoded(plan, stored), weight) and "groups in order" in plan.choices[X].why
    weight, stored = made_ct(group=96, symmetric=symmetric)
    config = ct_config("pack-quantized", ct_weights(group=96, symmetric=symmetric))
    assert np.array_equal(decoded(planned("compressed-tensors", config, stored), stored), weight)


@pytest.mark.parametrize("block", [48, 128, 256])
def test_last_blocks_may_be_short(block):
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.normal(0, 50, (N, K)).astype(np.float32)).to(torch.float8_e4m3fn)
    s = torch.from_numpy(2.0 ** rng.integers(-9, -5, (-(-N // block), -(-K // block)))).float()
    stored = {f"{X}.weight": q, f"{X}.weight_scale_inv": s}
    wide = s.double().repeat_interleave(block, 0)[:N].repeat_interleave(block, 1)[:, :K]
    plan = planned("fp8", {"weight_block_size": [block, block]}, stored)
    assert np.array_equal(decoded(plan, stored), (q.double() * wide).numpy())


def test_an_index_out_of_order_counts_whatever_desc_act_says():
    index = np.random.default_rng(1).permutation(np.arange(K) // 32)
    weight, stored = made_gptq(index=index, symmetric=False)
    for desc_act in (True, False):
        plan = planned("gptq", gptq_config(symmetric=False, desc_act=desc_act), stored)
        assert plan.choices[X].scheme == "gptq_actorder" and np.array_equal(decoded(plan, stored), weight)
        assert bool(plan.contradictions) == (not desc_act)


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("form", ["in order", "all zero", "empty", "none", "too large", "one group"])
def test_forms_of_an_index(form, desc_act):
    group = K if form == "one group" else 32
    weight, stored = made_gptq(group=group)
    index = f"{X}.g_idx"
    if form == "none":
        del stored[index]
    else:
        changed = {"all zero": torch.zeros(K), "empty": torch.zeros(0), "too large": torch.arange(K)}
        stored[index] = changed.get(form, stored[index]).int()
    plan = planned("gptq", gptq_config(group=group, desc_act=desc_act), stored)
    if form == "too large":
        refused(plan, f"`{index}` names group 127 of 4")
    elif desc_act and form not in ("in order", "one group"):
        refused(plan, "desc_act by the configuration")
    else:
        assert plan.choices[X].scheme == "gptq_sym" and np.array_equal(decoded(plan, stored), weight)


def test_rules_for_single_modules():
    weight, stored = made_gptq(8, group=64)
    rules = {"-:.*attn.*": {}, "+:.*up_proj": {"bits": 8, "group_size": 64}, ".*": {"bits": 3}}
    plan = planned("gptq", gptq_config(dynamic=rules), stored)
    assert np.array_equal(decoded(plan, stored), weight) and "dynamic['+:.*up_proj']" in plan.choices[X].why
    fused = {r".*\.gate_up_proj": {"bits": 8, "group_size": 64}}  # the fused name, though parts are stored
    assert np.array_equal(decoded(planned("gptq", gptq_config(dynamic=fused), stored), stored), weight)
    refused(
        planned("gptq", gptq_config(group=64), stored), f"`{X}.qweight` is [32, 64], 4 bits", "8 bits would fit",
    )  # fmt: skip
    with pytest.raises(qdsl.CheckpointError, match=r"dynamic\['\('\]: '\(' is no regular expression"):
        planned("gptq", gptq_config(dynamic={"(": {}}), stored)
    excluded = planned("gptq", gptq_config(8, 64, dynamic={f"-:{X}": {}}), stored)
    assert np.array_equal(decoded(excluded, stored), weight) and "not to be quantized" in excluded.contradictions[0]


def test_a_head_has_the_settings_that_its_writer_added():
    """GPTQModel quantizes a head to 8 bits in groups of 32 unless it is told otherwise, and says so in `dynamic`."""
    weight, stored = made_gptq(8)
    stored = {key.replace(X, "lm_head"): t for key, t in stored.items()}
    config = gptq_config(4, 128, lm_head=True)
    refused(planned("gptq", config, stored, name="lm_head"), "8 bits would fit")
    config["dynamic"] = {"lm_head": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "mse": 2.4}}
    assert np.array_equal(decoded(planned("gptq", config, stored, name="lm_head"), stored, name="lm_head"), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format `marlin` is not supported: its codes are in the order"),
        ({"checkpoint_format": None, "is_marlin_format": True}, "`marlin`"),
        ({"checkpoint_format": "gemm"}, 'set quant_method to "awq"'),
        ({"checkpoint_format": "gptq_v9"}, "(supported: gptq, gptq_v2, gptq_p)"),
        ({"bits": 5}, "GPTQ with bits = 5: `gptq` has 2, 3, 4, 8"),
        ({"bits": None}, "GPTQ with bits = None"),
        ({"group_size": 0}, "GPTQ with group_size = 0"),
        ({"dynamic": {".*": 3}}, "dynamic['.*'] = 3: settings are wanted"),
    ],
)
def test_gptq_settings_that_are_refused(changes, message):
    refused(planned("gptq", gptq_config() | changes, made_gptq()[1]), message)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_missing_part_of_a_module_is_named(part):
    _, stored = made_gptq(symmetric=False)
    del stored[f"{X}.{part}"]
    plan = planned("gptq", gptq_config(symmetric=False), stored)
    choice = plan.choices[X]
    scheme = qdsl.load(choice.scheme, **choice.params)
    own = {f"{X}.{short}": stored[full] for full, short in choice.tensors.items()}
    wanted = {t.name: t for t in scheme.weight.loaded}
    sizes = {"e": 1, "m": 1, "n": N, "k": K}
    found = repack.mismatches(scheme, scheme.layouts[choice.layout], own, f"{X}.", sizes, wanted)
    assert f"`{X}.{part}` is missing" in "\n".join([*plan.problems, *map(str, found)])


# ---- auto-round --------------------------------------------------------------------------------------------------
def test_auto_round_writes_the_tensors_of_others():
    weight, stored = made_gptq(symmetric=False)
    config = {"bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round:auto_gptq"}
    assert np.array_equal(decoded(planned("auto-round", config, stored), stored), weight)
    rng = np.random.default_rng(1)
    q, z = rng.integers(0, 16, (N, K)), rng.integers(0, 16, (N, 4))
    s = rng.uniform(0.01, 0.02, (4, N)).astype(np.float16)
    stored = {
        f"{X}.qweight": tensor(packers.autoawq_gemm(q)), f"{X}.qzeros": tensor(packers.autoawq_gemm(z)),
        f"{X}.scales": torch.from_numpy(s),
    }  # fmt: skip
    weight = (q - z.repeat(32, 1)) * s.T.astype(np.float64).repeat(32, 1)
    plan = planned("auto-round", config | {"packing_format": "auto_round:auto_awq"}, stored)
    assert np.array_equal(decoded(plan, stored), weight)


@pytest.mark.parametrize("key", [X, r".*up_proj", "mlp", "model.layers.0.mlp.gate_up_proj"])
def test_auto_round_changes_settings_of_single_modules(key):
    weight, stored = made_gptq(8, group=64)
    config = {"bits": 4, "group_size": 32, "extra_config": {"attn": {"bits": 3}, key: {"bits": 8, "group_size": 64}}}
    assert np.array_equal(decoded(planned("auto-round", config, stored), stored), weight)
    dense = planned("auto-round", config | {"extra_config": {key: {"bits": 16}}}, {f"{X}.weight": torch.zeros(N, K)})
    assert not (dense.choices or dense.problems or dense.contradictions)


def test_auto_round_that_is_refused():
    _, stored = made_gptq()
    config = {"bits": 4, "group_size": 32}
    refused(planned("auto-round", config | {"packing_format": "auto_round:fp8"}, stored), "packing_format `fp8`")
    refused(planned("auto-round", config | {"act_bits": 8}, stored), "act_bits 8")
    with pytest.raises(qdsl.CheckpointError, match=r"extra_config\['\('\]: '\(' is no regular expression"):
        planned("auto-round", config | {"extra_config": {"(": {}}}, stored)


# ---- compressed-tensors ------------------------------------------------------------------------------------------
def ct_config(format, weights, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": None}
    return {"config_groups": {"group_0": group}, "format": format, "ignore": ["lm_head"]} | more


def ct_weights(bits=4, group=32, symmetric=True, kind="int", **more):
    strategy = {} if group is None else {"group_size": group, "strategy": "channel" if group == -1 else "group"}
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "dynamic": False} | strategy | more


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = TOKEN | {"strategy": "tensor", "dynamic": False}


def made_ct(bits=4, group=32, symmetric=True, padded=False, index=None, zeros=None):
    """A pack-quantized module: (the weight, the stored tensors)"""
    rng = np.random.default_rng(2)
    groups = -(-K // group)
    q = rng.integers(0, 1 << bits, (N, K))
    z = np.full((N, groups), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (N, groups))
    z = z if zeros is None else np.full_like(z, zeros)
    s = rng.uniform(0.01, 0.02, (N, groups)).astype(np.float16)
    pack = packers.compressed_tensors_padded if padded else packers.compressed_tensors_dense
    stored = {
        f"{X}.weight_packed": tensor(pack(q, bits)), f"{X}.weight_scale": torch.from_numpy(s),
        f"{X}.weight_shape": torch.tensor([N, K]),
    }  # fmt: skip
    if not symmetric:
        stored[f"{X}.weight_zero_point"] = tensor(packers.compressed_tensors_dense(z.T, bits).T)
    if index is not None:
        stored[f"{X}.weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    at = np.arange(K) // group if index is None or (index < 0).all() else index
    return (q - z[:, at]) * s[:, at].astype(np.float64), stored


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_codes_of_every_width(bits, symmetric):
    weight, stored = made_ct(bits, symmetric=symmetric)
    plan = planned("compressed-tensors", ct_config("pack-quantized", ct_weights(bits, symmetric=symmetric)), stored)
    assert np.array_equal(decoded(plan, stored), weight)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_whole_codes_in_a_word_are_told_by_their_shape(bits):
    weight, stored = made_ct(bits, padded=True)
    plan = planned("compressed-tensors", ct_config("pack-quantized", ct_weights(bits)), stored)
    assert np.array_equal(decoded(plan, stored), weight) and "up to 0.11" in plan.choices[X].why


def test_zero_points_that_all_are_the_least_code_are_still_zero_points():
    weight, stored = made_ct(symmetric=False, zeros=0)
    plan = planned("compressed-tensors", ct_config("pack-quantized", ct_weights(symmetric=False)), stored)
    assert np.array_equal(decoded(plan, stored), weight)
    refused(planned("compressed-tensors", ct_config("pack-quantized", ct_weights()), stored), "which is it?")


@pytest.mark.parametrize("symmetric", [True, False])
def test_names_of_groups(symmetric):
    index = np.random.default_rng(3).permutation(np.arange(K) // 32)
    for given, order, scheme in (
        (index, "group", "_actorder"), (index, "dynamic", "_actorder"), (np.arange(K) // 32, "group", ""),
        (np.full(K, -1), None, ""), (np.full(K, -1), "weight", ""),
    ):  # fmt: skip
        weight, stored = made_ct(symmetric=symmetric, index=given)
        config = ct_config("pack-quantized", ct_weights(symmetric=symmetric, actorder=order))
        plan = planned("compressed-tensors", config, stored)
        assert np.array_equal(decoded(plan, stored), weight)
        assert plan.choices[X].scheme == ("gptq_sym" if symmetric else "gptq") + scheme
    config = ct_config("pack-quantized", ct_weights(actorder="group"))
    refused(planned("compressed-tensors", config, made_ct()[1]), f"`{X}.weight_g_idx` is missing")
    refused(planned("compressed-tensors", config, made_ct(index=np.full(K, -1))[1]), "names group -1 of 4")


def integers(bits=8, scales=(N, 1), **more):
    rng = np.random.default_rng(4)
    q = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (N, K)).astype(np.int8)
    s = rng.uniform(0.01, 0.02, scales).astype(np.float32)
    wide = np.repeat(s, K // s.shape[1], axis=1) if s.ndim == 2 else s
    stored = {f"{X}.weight": torch.from_numpy(q), f"{X}.weight_scale": torch.from_numpy(s)}
    return q * wide.astype(np.float64), stored | {f"{X}.{part}": t for part, t in more.items()}


@pytest.mark.parametrize(
    ("scheme", "weights", "inputs", "made"),
    [
        ("w8a16", ct_weights(8, -1), None, {}),
        ("w8a16", ct_weights(8, None), None, {"scales": (1,)}),
        ("w8a16_group", ct_weights(8, 32), None, {"scales": (N, 4)}),
        ("gptq_sym", ct_weights(4, 32), None, {"bits": 4, "scales": (N, 4)}),
        ("w8a8_dynamic", ct_weights(8, -1), TOKEN, {}),
        ("w8a8_dynamic", ct_weights(8, None), TOKEN, {"scales": (1,)}),
        ("w8a8_dynamic_asym", ct_weights(8, -1), TOKEN | {"symmetric": False}, {}),
        ("w8a8_static_sym", ct_weights(8, -1), STATIC, {"input_scale": torch.ones(1)}),
        ("w8a8_static", ct_weights(8, -1), STATIC | {"symmetric": False},
         {"input_scale": torch.ones(1), "input_zero_point": torch.ones(1, dtype=torch.int8)}),
        ("w4a8_dynamic", ct_weights(4, -1), TOKEN, {"bits": 4}),
        ("w4a8_fp8", ct_weights(4, 32), TOKEN | {"type": "float"}, {"bits": 4, "scales": (N, 4)}),
    ],
)  # fmt: skip
def test_integers_in_bytes(scheme, weights, inputs, made):
    weight, stored = integers(**made)
    for format in ("int-quantized", "naive-quantized"):
        plan = planned("compressed-tensors", ct_config(format, weights, inputs), stored)
        assert np.array_equal(decoded(plan, stored), weight) and plan.choices[X].scheme == scheme


def test_what_no_scheme_is_known_for_is_refused_with_its_arguments():
    _, stored = integers(scales=(N, 4))
    text = (
        f"`{X}` is int-quantized, weights int8 symmetric per group 32, static, input int8 symmetric per token, dynamic"
    )
    refused(planned("compressed-tensors", ct_config("int-quantized", ct_weights(8), TOKEN), stored), text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ct_config("marlin-24", ct_weights()), "has format `marlin-24`, which is not supported (pack-quantized"),
        (ct_config("pack-quantized", ct_weights(), sparsity_config={"targets": ["Linear"]}), "`sparsity_config`"),
        (ct_config("pack-quantized", ct_weights(), transform_config={"config_groups": {"R1": {}}}), "`transform_config`"),
        ({"format": "pack-quantized"}, "without `config_groups`"),
        (ct_config("pack-quantized", ct_weights(group=0) | {"strategy": "group"}), "group_size = 0"),
        (ct_config("int-quantized", ct_weights()), f"`{X}.weight` is missing (but `{X}.weight_packed` is there)"),
        (ct_config("nvfp4-pack-quantized", ct_weights()), "is torch.int32, nvfp4-pack-quantized"),
        ({"format": "pack-quantized", "config_groups": {"g": {"targets": ["re:.*attn"], "weights": ct_weights()}}},
         "no group of `config_groups` targets it"),
    ],
)  # fmt: skip
def test_compressed_tensors_that_are_refused(config, message):
    refused(planned("compressed-tensors", config, made_ct()[1]), message)


def test_shapes_that_contradict_the_model():
    _, stored = made_ct()
    config = ct_config("pack-quantized", ct_weights())
    refused(
        planned("compressed-tensors", config, stored | {f"{X}.weight_shape": torch.tensor([K, N])}), "says [128, 64]"
    )
    del stored[f"{X}.weight_shape"]
    refused(planned("compressed-tensors", config, stored), f"`{X}.weight_shape` is missing")


def test_a_group_that_names_a_module_comes_before_that_of_all():
    weight, stored = made_ct(8)
    config = ct_config("pack-quantized", ct_weights())
    config["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": ct_weights(8)}
    assert np.array_equal(decoded(planned("compressed-tensors", config, stored), stored), weight)
    ignoring = planned("compressed-tensors", config | {"ignore": [X]}, stored)
    assert np.array_equal(decoded(ignoring, stored), weight) and "list `ignore`" in ignoring.contradictions[0]
    dense = planned("compressed-tensors", config, {f"{X}.weight": torch.zeros(N, K)})
    assert not dense.choices and "is a target of `group_1`, but is stored dense" in dense.contradictions[0]


def test_scales_of_the_cache_are_left_out_and_reported():
    _, stored = made_ct()
    extra = {f"model.layers.0.self_attn.{part}": torch.ones(1) for part in ("k_scale", "k_proj.output_scale")}
    plan = planned("compressed-tensors", ct_config("pack-quantized", ct_weights()), stored | extra)
    assert plan.skipped == extra.keys() and "2 scales of a quantized key-value cache" in plan.notices[0]


# ---- fp8 ---------------------------------------------------------------------------------------------------------
def floats(scale, name="weight_scale", kind=torch.float8_e4m3fn, **more):
    """8-bit floats with a scale of some shape: (the weight, the stored tensors)"""
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.normal(0, 50, (N, K)).astype(np.float32)).to(kind)
    s = torch.from_numpy(np.asarray(2.0 ** rng.integers(-9, -5, scale))).float()
    wide = s.double()
    if s.dim() == 2 and s.shape != (N, 1):
        wide = wide.repeat_interleave(32, 0)[:N].repeat_interleave(32, 1)[:, :K]
    wide = wide[:, None] if wide.dim() == 1 and len(wide) == N else wide
    stored = {f"{X}.weight": q, f"{X}.{name}": s} | {f"{X}.{part}": t for part, t in more.items()}
    return (q.double() * wide).numpy(), stored


BLOCKS = {"weight_block_size": [32, 32]}


@pytest.mark.parametrize(
    ("scheme", "config", "made"),
    [
        ("fp8_tensor_dynamic", {"activation_scheme": "dynamic"}, {"scale": ()}),
        ("fp8_tensor_dynamic", {"activation_scheme": "dynamic"}, {"scale": (1,)}),
        ("fp8_tensor_dynamic", {"activation_scheme": "dynamic"}, {"scale": (1,), "kind": torch.float8_e5m2}),
        ("fp8_static", {"activation_scheme": "static"}, {"scale": (), "input_scale": torch.ones(())}),
        ("fp8_dynamic", {"activation_scheme": "dynamic"}, {"scale": (N, 1)}),
        ("fp8_dynamic", {}, {"scale": (N,)}),
        ("fp8_block", BLOCKS, {"scale": (2, 4), "name": "weight_scale_inv"}),
        ("fp8_block", BLOCKS, {"scale": (2, 4)}),
        ("fp8_block_ue8m0", BLOCKS | {"scale_fmt": "ue8m0"}, {"scale": (2, 4), "name": "weight_scale_inv"}),
    ],
)
def test_fp8_granularities(scheme, config, made):
    weight, stored = floats(**made)
    plan = planned("fp8", config, stored)
    assert np.array_equal(decoded(plan, stored), weight) and plan.choices[X].scheme == scheme


@pytest.mark.parametrize(
    ("scheme", "config", "shape"),
    [("fp8a16_block", BLOCKS, (2, 4)), ("fp8a16_channel", {}, (N,)), ("fp8a16_tensor", {}, ())],
)
def test_scales_that_divide_are_told_by_the_configuration_alone(scheme, config, shape):
    weight, stored = floats(shape, "weight_scale_inv")
    name = f"{X}.weight_scale_inv"
    plan = planned("fp8", config | {"weight_scale_semantics": "inverse"}, stored | {name: 1 / stored[name]})
    assert plan.choices[X].scheme == scheme
    assert np.array_equal(decoded(plan, stored | {name: 1 / stored[name]}), weight)


def test_scales_that_are_no_powers_of_two_are_no_ue8m0():
    _, stored = floats((2, 4), "weight_scale_inv")
    stored[f"{X}.weight_scale_inv"] *= 1.5
    plan = planned("fp8", BLOCKS | {"scale_fmt": "ue8m0"}, stored)
    with pytest.raises(ValueError, match=r"weight_scale_inv` holds .* means powers of two"):
        decoded(plan, stored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_scheme": "token"}, "activation_scheme `token` is not supported"),
        ({"weight_block_size": [128]}, "weight_block_size = [128]: two positive numbers"),
        ({"weight_block_size": [64, 128]}, "blocks that are not square"),
        (BLOCKS | {"activation_scheme": "static"}, "static activations: no scheme has both"),
        ({"store_dtype": "mxfp4"}, "store_dtype `mxfp4`"),
        ({"weight_scale_semantics": "log"}, "weight_scale_semantics `log`"),
        ({"weight_block_size": [64, 64]}, f"`{X}.weight_scale` is [2, 4], weight_block_size [64, 64]"),
    ],
)
def test_fp8_that_is_refused(config, message):
    refused(planned("fp8", config, floats((2, 4))[1]), message)


def test_fp8_weights_of_another_type_or_without_a_scale():
    _, stored = floats(())
    refused(planned("fp8", {}, {f"{X}.weight": stored[f"{X}.weight"]}), "has no scale")
    refused(
        planned("fp8", {}, stored | {f"{X}.weight": torch.zeros(N, K, dtype=torch.int8)}), "is torch.int8, fp8 stores"
    )
    both = stored | {f"{X}.weight_scale_inv": torch.ones(())}
    refused(planned("fp8", {}, both), "has weight_scale and weight_scale_inv")
    notice = planned("fbgemm-fp8", {"activation_scale_ub": 1200.0}, floats((N, 1))[1]).notices[0]
    assert "activation_scale_ub = 1200.0 is not applied" in notice


def test_lists_of_modules_to_leave_out_name_whole_components():
    _, stored = floats(())
    for entry, hits in ((X, True), ("up_proj", True), ("model.layers.0", True), ("model.layers", True), ("up_pro", False),
                        ("model.layers.0.mlp.gate_up_proj", True)):  # fmt: skip
        assert bool(planned("fp8", {"ignored_layers": [entry]}, stored).contradictions) == hits, entry
    dense = {f"{X}.weight": torch.zeros(N, K)}
    assert "but is stored dense" in planned("fp8", {"ignored_layers": ["lm_head"]}, dense).contradictions[0]
    assert not planned("fp8", {"ignored_layers": [X]}, dense).contradictions


# ---- ModelOpt ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "algorithm", "stored"),
    [
        ("fp8_static", "FP8", floats((), input_scale=torch.ones(()))),
        ("fp8_dynamic", "FP8_PER_CHANNEL_PER_TOKEN", floats((N,))),
    ],
)
def test_modelopt_algorithms(scheme, algorithm, stored):
    weight, tensors = stored
    old = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}}
    new = {"producer": {"name": "modelopt"}, "quant_algo": algorithm, "ignore": ["lm_head"]}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {X: {"quant_algo": algorithm}}}
    for config in (old, new, mixed):
        plan = planned("modelopt", config, tensors)
        assert np.array_equal(decoded(plan, tensors), weight) and plan.choices[X].scheme == scheme


def test_modelopt_fp4_scales_multiply():
    rng = np.random.default_rng(6)
    q, s = rng.integers(0, 16, (N, K)), torch.from_numpy(rng.uniform(1, 2, (N, K // 16))).to(torch.float8_e4m3fn)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[q % 8] * np.where(q > 7, -1, 1)
    stored = {
        f"{X}.weight": tensor(packers.low_nibble_first(q), torch.uint8), f"{X}.weight_scale": s,
        f"{X}.weight_scale_2": torch.tensor(0.125), f"{X}.input_scale": torch.tensor(0.5),
    }  # fmt: skip
    for algorithm, scheme in (("NVFP4", "nvfp4"), ("W4A16_NVFP4", "nvfp4a16")):
        plan = planned("modelopt", {"quant_algo": algorithm, "group_size": 16}, stored)
        expected = values * s.double().numpy().repeat(16, 1) * 0.125
        assert np.array_equal(decoded(plan, stored), expected) and plan.choices[X].scheme == scheme
    refused(planned("modelopt", {"quant_algo": "NVFP4", "group_size": 32}, stored), "has groups of 16")


def test_modelopt_that_is_refused():
    _, stored = floats(())
    refused(planned("modelopt", {"quant_algo": "W4A8_AWQ"}, stored), "quant_algo `W4A8_AWQ` is not supported")
    refused(planned("modelopt", {"quant_algo": "MIXED_PRECISION"}, stored), "without `quantized_layers`")
    layers = {"model.layers.0.mlp.up_prj": {"quant_algo": "FP8"}}
    plan = planned("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, stored)
    refused(plan, "has no such layer (nearest: `model.layers.0.mlp.up_prj`)")
    for pattern, hits in (("*mlp*", True), ("up_proj", True), ("*attn*", False)):
        plan = planned("modelopt", {"quant_algo": "FP8", "ignore": [pattern]}, stored)
        assert bool(plan.contradictions) == hits


# ---- ModelSlim ---------------------------------------------------------------------------------------------------
def described(kind, stored, **more):
    return dict.fromkeys(stored, kind) | more


@pytest.mark.parametrize(
    ("kind", "scheme", "made", "more"),
    [
        ("W8A8_DYNAMIC", "w8a8_dynamic", {"weight_offset": torch.zeros(N, 1)}, {}),
        ("W8A16", "w8a16", {"weight_offset": torch.zeros(N, 1)}, {}),
        ("W8A16", "w8a16_group", {"scales": (N, 4), "weight_offset": torch.zeros(N, 4)}, {"group_size": 32}),
        ("W4A8_DYNAMIC", "w4a8_dynamic", {"bits": 4, "weight_offset": torch.zeros(N, 1)}, {}),
        ("W4A4_DYNAMIC", "w4a4", {"bits": 4, "weight_offset": torch.zeros(N, 1)}, {}),
    ],
)
def test_modelslim_types(kind, scheme, made, more):
    weight, stored = integers(**made)
    plan = planned("modelslim", described(kind, stored, **more), stored)
    assert np.array_equal(decoded(plan, stored), weight) and plan.choices[X].scheme == scheme


def test_modelslim_offsets_of_weights():
    weight, stored = integers(weight_offset=torch.full((N, 1), 3.0))
    plan = planned("modelslim", described("W8A16", stored), stored)
    expected = weight - 3.0 * stored[f"{X}.weight_scale"].double().numpy()
    assert np.allclose(decoded(plan, stored), expected, rtol=0, atol=1e-12) and plan.choices[X].scheme == "w8a16_asym"
    refused(
        planned("modelslim", described("W8A8_DYNAMIC", stored), stored), "is not 0, and W8A8_DYNAMIC has no zero points"
    )


def test_modelslim_rows_in_pairs():
    rng = np.random.default_rng(7)
    q, s = rng.integers(-8, 8, (N, K)), rng.uniform(0.01, 0.02, (N, 1)).astype(np.float32)
    stored = {
        f"{X}.weight": tensor(packers.modelslim_row_pairs(q & 15), torch.int8), f"{X}.weight_scale": torch.from_numpy(s),
        f"{X}.weight_offset": torch.zeros(N, 1), f"{X}.scale_bias": torch.zeros(N, 1),
    }  # fmt: skip
    plan = planned("modelslim", described("W4A8_DYNAMIC", stored, version="1.0.0"), stored)
    assert np.array_equal(decoded(plan, stored), q * s.astype(np.float64))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_modelslim_sums_scaled_by_a_float_or_its_bits(kind):
    scale = np.linspace(0.001, 0.002, N).astype(np.float32)
    _, stored = integers(
        input_scale=torch.ones(1), input_offset=torch.zeros(1), quant_bias=torch.zeros(N, dtype=torch.int32),
        deq_scale=torch.from_numpy(scale) if kind == torch.float32 else tensor(packers.modelslim_scale_in_i64(scale), kind),
    )  # fmt: skip
    choice = planned("modelslim", described("W8A8", stored), stored).choices[X]
    assert choice.bias and choice.layout == ("modelslim" if kind == torch.float32 else "modelslim_f16")
    mixed = planned("modelslim", described("W8A8_MIX", stored), stored)
    assert mixed.choices[X].scheme == "w8a8_mix" and f"{X}.quant_bias" in mixed.choices[X].unread
    for part in ("input_scale", "input_offset", "quant_bias", "deq_scale"):
        less = {name: t for name, t in stored.items() if name != f"{X}.{part}"}
        refused(planned("modelslim", described("W8A8_MIX", stored), less), f"`{X}.{part}` is missing")


def test_descriptions_with_defects():
    _, stored = integers(weight_offset=torch.zeros(N, 1))
    refused(planned("modelslim", {f"language_model.{X}.weight": "W8A8_DYNAMIC"}, stored), "has no type in the description",
            f"(nearest: `language_model.{X}.weight`")  # fmt: skip
    refused(planned("modelslim", described("FLOAT", stored), stored), "described as FLOAT, is stored quantized")
    refused(planned("modelslim", described("W2A2", stored), stored), "W2A2, is not supported (supported: W8A8, ")
    dense = {f"{X}.weight": torch.zeros(N, K)}
    assert not planned("modelslim", {}, dense).problems
    assert "but is stored dense" in planned("modelslim", described("W8A8", dense), dense).contradictions[0]


# ---- bitsandbytes ------------------------------------------------------------------------------------------------
def made_nf4(nested, **changes):
    rng = np.random.default_rng(8)
    q = rng.integers(0, 16, (N, K))
    book = torch.tensor(qdsl.load("nf4").tensor("c").value, dtype=torch.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [N, K], "dtype": "float16"}
    count = N * K // 64
    stored = {"weight": tensor(packers.bitsandbytes_nf4(q), torch.uint8), "weight.quant_map": book}
    if nested:
        table, runs = torch.linspace(-1, 1, 256), torch.from_numpy(rng.uniform(1, 2, -(-count // 48))).float()
        codes = torch.from_numpy(rng.integers(0, 256, count)).to(torch.uint8)
        absmax = table[codes.long()] * runs.repeat_interleave(48)[:count] + torch.tensor(2.5)
        state |= {"nested_blocksize": 48, "nested_offset": 2.5}
        stored |= {"weight.absmax": codes, "weight.nested_absmax": runs, "weight.nested_quant_map": table}
    else:
        absmax = stored["weight.absmax"] = torch.from_numpy(rng.uniform(1, 2, count)).float()
    text = json.dumps(state | changes).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    weight = book.double().numpy()[q] * absmax.double().numpy().reshape(N, K // 64).repeat(64, 1)
    return weight, {f"{X}.{part}": t for part, t in stored.items()}


@pytest.mark.parametrize("nested", [False, True])
def test_code_books(nested):
    weight, stored = made_nf4(nested)
    plan = planned("bitsandbytes", {"load_in_4bit": True}, stored)
    assert np.array_equal(decoded(plan, stored), weight)


@pytest.mark.parametrize("part", ["weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "weight.absmax",
                                  "weight.nested_absmax", "weight.nested_quant_map"])  # fmt: skip
def test_missing_parts_of_code_books(part):
    _, stored = made_nf4(True)
    del stored[f"{X}.{part}"]
    refused(planned("bitsandbytes", {}, stored), "is missing", X)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_type": "fp4"}, "quant_type fp4, needed is nf4"),
        ({"shape": [K, N]}, "shape [128, 64], needed is [64, 128]"),
        ({"blocksize": 48}, "groups would cross rows"),
        ({"nested_offset": None}, "has no nested_offset"),
        ({"nested_blocksize": 7}, f"`{X}.weight.nested_absmax` is [3], needed is [19]"),
    ],
)
def test_records_that_contradict(changes, message):
    refused(planned("bitsandbytes", {}, made_nf4(True, **changes)[1]), message)


def test_another_code_book_and_rows_of_bytes():
    _, stored = made_nf4(False)
    stored[f"{X}.weight.quant_map"] = stored[f"{X}.weight.quant_map"].flip(0)
    refused(planned("bitsandbytes", {}, stored), "is not the code book of `nf4`")
    q = np.random.default_rng(9).integers(-128, 128, (N, K)).astype(np.int8)
    rows = {f"{X}.weight": torch.from_numpy(q), f"{X}.SCB": torch.full((N,), 127.0)}
    plan = planned("bitsandbytes", {"load_in_8bit": True}, rows)
    assert np.array_equal(decoded(plan, rows), q.astype(np.float64))
    rows[f"{X}.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    refused(planned("bitsandbytes", {}, rows), "rows are in another order")
