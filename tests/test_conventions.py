"""What a stored number means is the producer's choice: one weight as several of them store it is read as one weight."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_resolution import ct_config, ct_weights, decoded, gptq_config, planned, refused, tensor
from torch import nn

import packers
import qdsl
from qdsl import reference
from qdsl.runtime.checkpoints import FORMATS, Module
from qdsl.runtime.examination import examine

X = "model.layers.0.mlp.up_proj"


def read(method, config, n, k, scheme=None, **parts):
    """The weight that a format makes of a module's tensors."""
    stored = {f"{X}.{name.replace('__', '.')}": t for name, t in parts.items()}
    plan = planned(method, config, stored, n, k)
    weight = decoded(plan, stored, n, k)
    assert scheme in (None, plan.choices[X].scheme)
    return weight


# ---- zero points -------------------------------------------------------------------------------------------------
def every_level(symmetric):
    """All 16 codes in groups of all 16 zero points, or of 8: (codes, zero points, scales, the weight).  Rows differ."""
    n, k = 24, 256
    row, column = np.arange(n)[:, None], np.arange(k)
    q = (column + 3 * row) % 16
    z = np.full((n, 16), 8) if symmetric else (np.arange(16) + row) % 16
    s = np.exp2(np.arange(16) % 5 - 6.0) * np.ones((n, 1))
    return q, z, s, (q - z.repeat(16, 1)) * s.repeat(16, 1)


def encodings(symmetric):
    """(name, the weight as it is read, rows that are compared)"""
    q, z, s, _ = every_level(symmetric)
    (n, k), t = q.shape, torch.from_numpy(s.T.copy()).half()
    settings = {"bits": 4, "group_size": 16, "version": "gemm"}
    awq = {"qweight": tensor(packers.autoawq_gemm(q)), "scales": t}
    zeros = {"qzeros": tensor(packers.autoawq_gemm(z))}
    yield "AWQ, packed", read("awq", settings | {"zero_point": True}, n, k, **awq, **zeros)
    for label, stored in (("gptq", (z - 1) % 16), ("gptq_v2", z)):
        config = gptq_config(group=16, label=label, symmetric=symmetric)
        words = {"qweight": tensor(packers.autogptq(q, 4)), "qzeros": tensor(packers.autogptq(stored.T, 4).T)}
        yield f"{label}, packed", read("gptq", config, n, k, **words, scales=t)
    packed = {"weight_packed": tensor(packers.compressed_tensors_dense(q, 4)), "weight_scale": t.T.contiguous()}
    packed["weight_shape"] = torch.tensor([n, k])
    if not symmetric:
        packed["weight_zero_point"] = tensor(packers.compressed_tensors_dense(z.T, 4).T)
    config = ct_config("pack-quantized", ct_weights(group=16, symmetric=symmetric))
    yield "compressed-tensors, packed or implied", read("compressed-tensors", config, n, k, **packed)
    if symmetric:
        yield "AWQ, implied", read("awq", settings | {"zero_point": False}, n, k, **awq)
        signed = {"weight": torch.from_numpy((q - 8).astype(np.int8)), "weight_scale": t.T.contiguous()}
        config = ct_config("int-quantized", ct_weights(group=16))
        yield "compressed-tensors, signed", read("compressed-tensors", config, n, k, **signed)
    else:  # a zero point in a number of its own: an integer, and a float
        signed = {"weight": torch.from_numpy((q - 8).astype(np.int8)), "weight_scale": t.T.contiguous().float()}
        signed["weight_offset"] = torch.from_numpy((z - 8).astype(np.float32))
        kinds = dict.fromkeys((f"{X}.{name}" for name in signed), "W8A16") | {"group_size": 16}
        yield "ModelSlim, plain", read("modelslim", kinds, n, k, **signed)
    hqq = qdsl.load("hqq", group=16)
    patterns = {"q": q.astype(np.uint32), **{a: hqq.tensor(a).dtype.encode(v) for a, v in (("s", s), ("z", z * 1.0))}}
    yield "HQQ, float", reference.decode_weight(hqq, patterns, n, k)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_in_every_encoding_of_zero_points(symmetric):
    weight = every_level(symmetric)[-1]
    for name, found in encodings(symmetric):
        assert np.array_equal(found, weight), name


def test_zero_points_of_rows_that_fill_no_word():
    """compressed-tensors packs them along n, of which the last word has some to spare."""
    q, z, s, weight = every_level(False)
    n, k = 20, q.shape[1]
    stored = {
        "weight_packed": tensor(packers.compressed_tensors_dense(q[:n], 4)),
        "weight_zero_point": tensor(packers.compressed_tensors_dense(z[:n].T, 4).T | np.uint64(0xFFFF0000) * (
            np.arange(3)[:, None] == 2)),
        "weight_scale": torch.from_numpy(s[:n]).half(), "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip
    config = ct_config("pack-quantized", ct_weights(group=16, symmetric=False))
    assert np.array_equal(read("compressed-tensors", config, n, k, **stored), weight[:n])


# ---- groups ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [4, 8])
def test_one_group_is_minus_one_and_all_of_k(bits):
    """k is no power of two, and every format has the two spellings."""
    rng = np.random.default_rng(0)
    n, k = 8, 2560
    q, s = rng.integers(0, 1 << bits, (n, k)), torch.from_numpy(rng.uniform(0.01, 0.02, (1, n))).half()
    middle = 1 << (bits - 1)
    weight = (q - middle) * s.T.double().numpy()
    zeros = np.full((1, n), middle)
    gptq = {"qweight": tensor(packers.autogptq(q, bits)), "scales": s, "g_idx": torch.zeros(k, dtype=torch.int32)}
    gptq["qzeros"] = tensor(packers.autogptq(zeros - 1, bits).T)
    packed = {"weight_packed": tensor(packers.compressed_tensors_dense(q, bits)), "weight_scale": s.T.contiguous()}
    packed["weight_shape"] = torch.tensor([n, k])
    for group in (-1, k):
        assert np.array_equal(read("gptq", gptq_config(bits, group), n, k, **gptq), weight)
        config = {"bits": bits, "group_size": group, "sym": True, "packing_format": "auto_round:auto_gptq"}
        assert np.array_equal(read("auto-round", config, n, k, **gptq), weight)
        config = ct_config("pack-quantized", ct_weights(bits, group))
        assert np.array_equal(read("compressed-tensors", config, n, k, **packed), weight)
        if bits == 4:
            awq = {
                "qweight": tensor(packers.autoawq_gemm(q)),
                "qzeros": tensor(packers.autoawq_gemm(zeros.T)),
                "scales": s,
            }
            config = {"bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
            assert np.array_equal(read("awq", config, n, k, **awq), weight)


# ---- scales ------------------------------------------------------------------------------------------------------
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CT_FP4 = ct_weights(4, 16, kind="float", strategy="tensor_group")


def made_fp4(n=32, k=64):
    """(the values of codes, as they are stored)"""
    rng = np.random.default_rng(1)
    q = rng.integers(0, 16, (n, k))
    return FP4[q % 8] * np.where(q > 7, -1, 1), tensor(packers.low_nibble_first(q), torch.uint8)


def test_the_tensor_scale_of_nvfp4_divides_or_multiplies(tmp_path):
    """3584 is a divisor in one tool's files; the other stores 1/3584 under another name."""
    values, codes = made_fp4()
    s = torch.from_numpy(np.random.default_rng(2).uniform(1, 400, (32, 4))).to(torch.float8_e4m3fn)
    weight = values * s.double().numpy().repeat(16, 1) / 2048
    config = ct_config("nvfp4-pack-quantized", CT_FP4)
    ct = {"weight_packed": codes, "weight_scale": s, "weight_global_scale": torch.tensor([2048.0])}
    assert np.array_equal(read("compressed-tensors", config, 32, 64, "nvfp4a16", **ct), weight)
    mo = {"weight": codes, "weight_scale": s, "weight_scale_2": torch.tensor(1 / 2048)}
    assert np.array_equal(read("modelopt", {"quant_algo": "W4A16_NVFP4"}, 32, 64, "nvfp4a16", **mo), weight)

    def told(method, config, parts):
        save_file({f"up.{name}": t for name, t in parts.items()}, tmp_path / "model.safetensors")
        settings = {"quantization_config": {"quant_method": method, **config}}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return examine(nn.ModuleDict({"up": nn.Linear(64, 32, bias=False)}), tmp_path).notices

    algorithm = {"quant_algo": "W4A16_NVFP4"}
    assert not told("compressed-tensors", config, ct) and not told("modelopt", algorithm, mo)
    large = "by the scales of whole tensors weights reach 9.63e+06 (`up.{}`)"
    wrong = told("modelopt", algorithm, mo | {"weight_scale_2": torch.tensor(3584.0)})
    assert wrong[0].startswith(large.format("weight_scale_2"))
    wrong = told("compressed-tensors", config, ct | {"weight_global_scale": torch.tensor([1 / 3584])})
    assert wrong[0].startswith(large.format("weight_global_scale"))


def test_a_byte_that_is_an_exponent():
    """117 is 2^-10, whoever wrote it and whatever type the file gives the byte."""
    values, codes = made_fp4()
    exponents = np.random.default_rng(3).integers(110, 125, (32, 2)).astype(np.uint8)
    exponents[0, 0] = 117
    weight = values * np.exp2(exponents.astype(np.float64) - 127).repeat(32, 1)
    assert weight[0, :32].tolist() == (values[0, :32] / 1024).tolist()
    gpt_oss = {"blocks": codes.reshape(32, 2, 16)}
    config = ct_config("mxfp4-pack-quantized", ct_weights(4, 32, kind="float"))
    for kind in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.from_numpy(exponents).view(kind)
        assert np.array_equal(read("mxfp4", {}, 32, 64, "mxfp4", **gpt_oss, scales=scale), weight)
        ct = {"weight_packed": codes, "weight_scale": scale}
        assert np.array_equal(read("compressed-tensors", config, 32, 64, "mxfp4", **ct), weight)


def test_scales_of_blocks_multiply_whatever_their_name_unless_the_writer_says_otherwise():
    rng = np.random.default_rng(4)
    q = torch.from_numpy(rng.normal(0, 50, (64, 64)).astype(np.float32)).to(torch.float8_e4m3fn)
    s = torch.from_numpy(np.exp2(rng.integers(-9, -5, (2, 2)))).float()
    weight = (q.double() * s.double().repeat_interleave(32, 0).repeat_interleave(32, 1)).numpy()
    config = {"weight_block_size": [32, 32]}
    for more, stored in (
        ({}, {"weight_scale_inv": s}), ({}, {"weight_scale": s}), ({"scale_fmt": "ue8m0"}, {"weight_scale_inv": s}),
        ({"weight_scale_semantics": "inverse"}, {"weight_scale_inv": 1 / s}),
    ):  # fmt: skip
        assert np.array_equal(read("fp8", config | more, 64, 64, weight=q, **stored), weight), (more, stored.keys())


@pytest.mark.parametrize(("n", "k"), [(80, 4096), (4096, 64), (4096, 192), (320, 320)])
def test_blocks_that_sizes_do_not_fill(n, k):
    """The number of scales is rounded up, and the last ones serve what there is."""
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.integers(-8, 8, (n, k)).astype(np.float32)).to(torch.float8_e4m3fn)
    s = torch.from_numpy(np.exp2(rng.integers(-9, -5, (-(-n // 128), -(-k // 128))))).float()
    wide = s.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    found = read("fp8", {"weight_block_size": [128, 128]}, n, k, "fp8_block", weight=q, weight_scale_inv=s)
    assert np.array_equal(found, (q.double() * wide).numpy())


# ---- rules for single modules ------------------------------------------------------------------------------------
def test_rules_are_resolved_by_the_names_that_are_stored():
    """Groups of 128 by default; of 32 for what a fused name means; 8 bits by ranges of layers; one layer is left out."""
    names = [f"model.layers.{at}.self_attn.{own}_proj" for at in (0, 9, 12, 18) for own in "qo"]
    rules = {
        r"-:model\.layers\.0\.self_attn\.o_proj": {}, r"+:.*\.(1[0-5])\.": {"bits": 8},
        r"+:.*\.(1[6-9]|2[01])\.": {"bits": 8, "group_size": 64}, r".*\.qkv_proj": {"group_size": 32},
    }  # fmt: skip
    expected = {}
    for name in names:
        at, own = int(name.split(".")[2]), name[-6]
        if (at, own) != (0, "o"):
            expected[name] = (8, 64) if at == 18 else (8, 128) if at == 12 else (4, 32) if own == "q" else (4, 128)
    rng, stored, weights = np.random.default_rng(6), {}, {}
    n, k = 16, 256
    for name, (bits, group) in expected.items():
        q, s = rng.integers(0, 1 << bits, (n, k)), rng.uniform(0.01, 0.02, (k // group, n)).astype(np.float16)
        zeros = np.full((k // group, n), (1 << (bits - 1)) - 1)
        stored |= {
            f"{name}.qweight": tensor(packers.autogptq(q, bits)), f"{name}.scales": torch.from_numpy(s),
            f"{name}.qzeros": tensor(packers.autogptq(zeros, bits).T),
        }  # fmt: skip
        weights[name] = (q - (1 << (bits - 1))) * s.T.astype(np.float64).repeat(group, 1)
    stored["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(n, k)
    headers = {name: t.to("meta") for name, t in stored.items()}
    config = gptq_config(4, 128, dynamic=rules)
    plan = FORMATS["gptq"](config, dict.fromkeys(names, Module(n, k, False)), headers, stored.__getitem__)
    assert not plan.problems and not plan.contradictions
    assert {name: (c.params["bits"], c.params["group"]) for name, c in plan.choices.items()} == expected
    for name, weight in weights.items():
        assert np.array_equal(decoded(plan, stored, n, k, name), weight), name
    two = {
        ".*": {"bits": 8},
        r".*\.q_proj": {"group_size": 64},
    }  # the first that fits counts, and the tensors contradict
    plan = FORMATS["gptq"](config | {"dynamic": two}, dict.fromkeys(names, Module(n, k, False)), headers, stored.get)
    refused(plan, "model.layers.9.self_attn.q_proj")
