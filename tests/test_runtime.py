"""QuantLinear on the CPU: numbers, shapes, types, copies, loading, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qdsl
from qdsl import reference
from qdsl.dtype import F32
from qdsl.dtype import dtype as format_named
from qdsl.runtime import QuantLinear, repack
from qdsl.runtime.artifact import best_arch, cpu_levels, find_artifact, fitting_arch, fitting_cuda_arch

N, K = 48, 192
SCHEMES = sorted(qdsl.shipped())
LANGUAGE = sorted((Path(__file__).parent / "schemes").glob("*.q"))
FORMATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def filled(scheme="awq4", n=N, k=K, *, seed=0, **options):
    """(a layer with random weights, their bit patterns)."""
    options.setdefault("bias", any(t.role == "bias" for t in qdsl.load(scheme).output.tensors))
    layer = QuantLinear(scheme, k, n, **options)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(seed), n, k)
    return layer.set_patterns(patterns), patterns


def inputs(layer, m, seed=1):
    return torch.randn(m, layer.in_features, generator=torch.Generator().manual_seed(seed)).to(layer.dtype)


def stored(layer, patterns, layout, prefix=""):
    return repack.write(layer.scheme, layer.scheme.layouts[layout], patterns, prefix)


def within_bound(layer, patterns, x, y):
    known = {name: patterns[name] for name in patterns if layer.bias is not None or name != "b"}
    expected = reference.linear(
        layer.scheme, x.double().numpy(), known, layer.out_features, precision=layer.manifest.precision
    )
    return bool((np.abs(y.double().numpy() - expected.y) <= expected.bound).all())


# ---- numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_its_scheme_within_the_derived_bound(kind, bias):
    layer, patterns = filled(dtype=kind, bias=bias)
    for m in (1, 2, 7, 33):
        x = inputs(layer, m)
        y = layer(x)
        assert y.dtype == kind
        assert within_bound(layer, patterns, x, y)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_shipped_scheme_is_a_layer(name):
    layer, patterns = filled(name, 32, 128)
    x = inputs(layer, 3)
    assert within_bound(layer, patterns, x, layer(x))


@pytest.mark.parametrize("k", [8, 136, 4304])
def test_one_row_equals_the_same_row_of_a_batch(k):
    layer, _ = filled(k=k, group=32, dtype=torch.float32)
    x = inputs(layer, 64)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-5, atol=1e-5)


def test_any_number_of_rows_in_one_process_up_and_down():
    layer, patterns = filled(dtype=torch.float32)
    sizes = [*range(1, 10), 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 513, 1025, 2049]
    x = inputs(layer, max(sizes))
    whole = layer(x)
    assert within_bound(layer, patterns, x, whole)
    for m in (*sizes, *reversed(sizes)):
        torch.testing.assert_close(layer(x[:m]), whole[:m], rtol=1e-5, atol=1e-5)


def test_every_variant_is_right_for_every_number_of_rows():
    layer, patterns = filled("gptq", bits=8, dtype=torch.float32)
    for name in layer.kernel.variants(K):
        for m in (1, 2, 5, 64):
            x, y = inputs(layer, m), torch.full((m, N), float("nan"))
            layer.run_into(x, y, variant=name)
            assert within_bound(layer, patterns, x, y)


def test_one_group_over_k_is_the_group_of_size_k():
    whole, patterns = filled(group="k", dtype=torch.float32)
    same, _ = filled(group=K, dtype=torch.float32)
    x = inputs(whole, 5)
    torch.testing.assert_close(whole(x), same.set_patterns(patterns)(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole.dequantize(), same.dequantize())
    assert torch.equal(reloaded(whole)(x), whole(x))


@pytest.mark.parametrize(("kind", "most"), [(torch.float16, 65504.0), (torch.bfloat16, 3.3e38)])
def test_large_sums_are_finite_when_the_answer_is(kind, most):
    k = 8192
    layer, patterns = filled(n=8, k=k, dtype=kind, bias=False)
    patterns = {
        "q": np.full_like(patterns["q"], 15), "z": np.zeros_like(patterns["z"]),
        "s": format_named("f16").encode(np.full(patterns["s"].shape, 0.001)),
    }  # fmt: skip
    y = layer.set_patterns(patterns)(torch.ones(2, k, dtype=kind))
    assert torch.isfinite(y).all() and (y.float() - 122.88).abs().max() < 1
    patterns["s"] = format_named("f16").encode(np.full(patterns["s"].shape, 60000.0))
    y = layer.set_patterns(patterns)(torch.ones(2, k, dtype=kind))
    assert not torch.isnan(y).any()
    assert torch.isinf(y).all() == (15 * 60000.0 * k > most)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (name, phase)
        for name in SCHEMES
        for phase in qdsl.load(name).phases or ("",)
        if qdsl.load(name).activations and name != "w8a8_quant_bias"  # whose bias is what other numbers make it
    ],
)
def test_a_zero_row_gives_exactly_the_bias(name, phase):
    layer, patterns = filled(name, 32, 128, phase=phase)
    for t in layer.scheme.tensors:
        if t.role == "zero" and t.dtype.is_float:  # of x, and whole
            patterns[t.name] = t.dtype.encode(np.rint(8 * t.dtype.decode(patterns[t.name])))
    layer.set_patterns(patterns)
    x = inputs(layer, 8)
    x[3] = 0
    y = layer(x)
    bias = layer.scheme.tensor("b").dtype.decode(patterns["b"]) if "b" in patterns else np.zeros(32)
    assert np.array_equal(y[3].double().numpy(), layer.scheme.output.dtype.round(bias))
    x[0], x[1] = 1e4, 1e-8
    y = layer(x)
    assert not y.isnan().any() and (layer.dtype == torch.float16 or torch.isfinite(y).all())


@pytest.mark.parametrize("name", ["w8a8_static", "w8a8_mix", "w8a8_quant_bias"])
def test_a_zero_point_is_taken_off_once(name):
    """Every code of x is the zero point, and every weight 1: what is left is the bias, to the bit."""
    n, k = 16, 72
    layer, patterns = filled(name, n, k, phase="decode" if name == "w8a8_mix" else "")
    zero, scale = layer.scheme.tensor("o"), F32.encode(np.array(0.125))
    bias = np.arange(n) - 3.0
    patterns |= {"q": np.ones((n, k), np.uint8), "o": zero.dtype.encode(np.array(-7.0))}
    patterns |= {t.name: scale for t in layer.scheme.tensors if t.role == "scale" and t.index == ()}
    patterns |= {t: np.full(n, scale) for t in "sd" if t in patterns}
    whole = bias * 8 + 7 * k  # in units of the scale, and less the zero point times the sum of the weight
    patterns["b"] = layer.scheme.tensor("b").dtype.encode(whole if name == "w8a8_quant_bias" else bias)
    y = layer.set_patterns(patterns)(torch.zeros(3, k, dtype=layer.dtype))
    assert np.array_equal(y.double().numpy(), np.tile(bias, (3, 1)))


def test_static_codes_end_at_the_largest_number():
    """x of 464 and more, in units of the scale, is 448 in e4m3 and no NaN."""
    layer, patterns = filled("fp8_static", 16, 64, dtype=torch.float32, bias=False)
    patterns |= {"t": F32.encode(np.array(1.0)), "s": F32.encode(np.array(1.0))}
    layer.set_patterns(patterns)
    largest = layer(torch.full((1, 64), 448.0))
    for size in (464.0, 465.0, 1000.0, 3e38, torch.inf):
        assert torch.equal(layer(torch.full((1, 64), size)), largest)
        assert torch.equal(layer(torch.full((1, 64), -size)), -largest)


@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_zero_input_returns_the_bias(m, kind):
    layer, _ = filled(dtype=kind)
    expected = layer.bias.to(kind).expand(m, N)
    for each in (layer, copy.deepcopy(layer)):
        assert torch.equal(each(torch.zeros(m, K, dtype=kind)), expected)


# ---- inputs ------------------------------------------------------------------------------------------------------
def test_views_give_what_their_contiguous_copies_give():
    layer, _ = filled(dtype=torch.float32)
    big = torch.randn(64, 2 * K)
    views = [
        big[::2, :K], big[:, ::2], torch.randn(K, 8).t(), big[3:4, :K], big.as_strided((1, K), (999, 1)),
        big.view(-1)[1 : K + 1], big.view(-1)[3 : 2 * K + 3].view(2, K), big.view(64, 2, K).transpose(0, 1), big[:, :K].expand(3, 64, K),
    ]  # fmt: skip
    for view in views:
        assert torch.equal(layer(view), layer(view.contiguous().clone())), (view.shape, view.stride())


def test_any_rank_and_no_rows():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 6)
    flat = layer(x)
    assert torch.equal(layer(x.view(2, 3, K)), flat.view(2, 3, N))
    assert torch.equal(layer(x[:1].view(K)), layer(x[:1]).view(N))
    assert layer(x[:0]).shape == (0, N)
    assert layer(torch.empty(2, 0, K)).shape == (2, 0, N)
    assert torch.equal(layer(x), flat)  # nothing stuck


def test_wrong_inputs_are_refused_by_name():
    layer, _ = filled(dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"64 features.*in_features = {K}"):
        layer(torch.randn(2, 64))
    with pytest.raises(ValueError, match="no dimension"):
        layer(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"torch\.float64.*cast x to torch\.float32"):
        layer(torch.randn(2, K, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"torch\.int64"):
        layer(torch.ones(2, K, dtype=torch.int64))
    with pytest.raises(ValueError, match="on meta, the layer on cpu"):
        layer(torch.empty(2, K, device="meta"))


def test_a_layer_without_weights_refuses_to_run():
    layer = QuantLinear("awq4", K, N)
    assert "not loaded" in repr(layer)
    with pytest.raises(qdsl.Error, match="no weights yet"):
        layer(torch.zeros(1, K, dtype=torch.float16))
    with pytest.raises(qdsl.Error, match="nothing to dequantize"):
        layer.dequantize()


# ---- types -------------------------------------------------------------------------------------------------------
def test_changing_the_type_selects_a_kernel_and_keeps_the_bits():
    layer, patterns = filled(dtype=torch.float32)
    bits = {name: t.clone() for name, t in layer.state_dict().items() if name in ("q", "z", "s")}
    x = inputs(layer, 5)
    y = layer(x)
    for change, kind in (
        (lambda layer: layer.half(), torch.float16),
        (lambda layer: layer.bfloat16(), torch.bfloat16),
        (lambda layer: layer.to(torch.float16), torch.float16),
        (lambda layer: layer.type(torch.bfloat16), torch.bfloat16),
        (lambda layer: layer.to("cpu", torch.float32), torch.float32),
    ):
        assert change(layer) is layer
        assert layer.dtype == kind
        for name, before in bits.items():
            assert torch.equal(repack_bytes(layer.get_buffer(name)), repack_bytes(before))
        converted = x.to(kind)
        assert within_bound(layer, patterns_in(layer, patterns), converted, layer(converted))
    assert torch.equal(layer(x), y)


def repack_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def patterns_in(layer, patterns):
    """Patterns made for float32 activations, with the bias in the layer's type."""
    bias = format_named("f32").decode(patterns["b"])
    return {**patterns, "b": layer.scheme.output.dtype.encode(bias)}


def test_the_bias_outlives_a_narrower_type():
    layer, _ = filled(dtype=torch.float32)
    before = layer.bias.clone()
    layer.half().bfloat16().float()
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, before)


def test_an_input_of_another_type_gets_its_kernel():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 4)
    half = layer(x.half())
    assert half.dtype == torch.float16
    assert torch.equal(half, copy.deepcopy(layer).half()(x.half()))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


def test_a_type_that_the_scheme_lacks_is_refused(tmp_path):
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 2)
    y = layer(x)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        layer.double()
    assert torch.equal(layer(x), y)
    fixed = tmp_path / "fixed.q"
    fixed.write_text(
        "scheme fixed\n\nweight {\n    code  q[n, k] : i8\n    scale s[n]    : f32\n    w ~ q * s\n}\n\n"
        "compute f16 -> f32\noutput f16\n"
    )
    with pytest.raises(TypeError, match=r"fixed takes torch\.float16 only.*no parameter `act`"):
        QuantLinear(fixed, K, N, dtype=torch.bfloat16)


# ---- copies ------------------------------------------------------------------------------------------------------
def reloaded(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = QuantLinear(layer.scheme, layer.in_features, layer.out_features, layer.bias is not None)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def saved_whole(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_safetensors(layer):
    from safetensors.torch import load, save

    fresh = QuantLinear(layer.scheme, layer.in_features, layer.out_features, layer.bias is not None)
    fresh.load_state_dict(load(save(layer.state_dict())))
    return fresh


@pytest.mark.parametrize("name", ["awq4", "gptq_actorder", "nf4", "fp8_block", "nvfp4", "w8a8_static"])
def test_five_routes_of_copying_are_bitwise_equal(name):
    layer, _ = filled(name, 32, 128)
    x = inputs(layer, 5)
    y = layer(x)
    routes = (
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        saved_whole,
        reloaded,
        through_safetensors,
    )
    for route in routes:
        assert torch.equal(route(layer)(x), y), route
    again = reloaded(reloaded(layer))
    assert torch.equal(again(x), y)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), y)


def test_a_copy_shares_nothing():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 2)
    y = layer(x)
    other = copy.deepcopy(layer)
    other.q.zero_()
    assert torch.equal(layer(x), y) and not torch.equal(other(x), y)


def test_a_pickle_opens_in_a_fresh_process(tmp_path):
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 3)
    torch.save((layer, x, layer(x)), tmp_path / "layer.pt")
    code = "import sys, torch; l, x, y = torch.load(sys.argv[1], weights_only=False); assert torch.equal(l(x), y)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "layer.pt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_saved_bits_of_another_meaning_are_refused_with_both_shown():
    layer, _ = filled(group=64)
    for other, shown in (
        (QuantLinear("awq4", K, N, True, group=32), "k // 32"),
        (QuantLinear("gptq_sym", K, N, True), "gptq_sym"),
    ):
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"(?s)saved: .*k // 64.*layer: ") as caught:
            other.load_state_dict(layer.state_dict())
        assert shown in str(caught.value)
        assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items() if name != "_extra_state")


def test_saved_bits_without_their_tag_are_refused():
    layer, _ = filled()
    state = {name: t for name, t in layer.state_dict().items() if name != "_extra_state"}
    with pytest.raises(RuntimeError, match="_extra_state"):
        QuantLinear("awq4", K, N, True).load_state_dict(state)
    state = layer.state_dict() | {"_extra_state": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="not a qdsl tag"):
        QuantLinear("awq4", K, N, True).load_state_dict(state)
    state = layer.state_dict()
    state["q"] = state["q"].reshape(-1)
    with pytest.raises(RuntimeError, match=r"q is .* its tag says"):
        QuantLinear("awq4", K, N, True).load_state_dict(state)
    del state["q"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"q"'):
        QuantLinear("awq4", K, N, True).load_state_dict(state)


def test_bits_of_another_devices_layout_are_repacked():
    """As between CPU and GPU: here the foreign layout is that of the checkpoint."""
    layer, patterns = filled(dtype=torch.float32)
    x = inputs(layer, 3)
    tag = layer.tag
    foreign, state = [], layer.state_dict()
    for buffer in tag.buffers:
        binding = next(b for b in layer.scheme.layouts["autoawq"].bindings if b.tensor == buffer.tensor)
        name = {"i32": "uint32", "f16": "float16", "f32": "float32"}[binding.stored.name]
        foreign.append(type(buffer)(buffer.tensor, name, binding.layout))
        words = binding.layout.pack(patterns[buffer.tensor])
        state[buffer.tensor] = repack.tensor_of(words, getattr(torch, name))
    state["_extra_state"] = dataclasses.replace(tag, kind="cuda", buffers=tuple(foreign)).to_tensor()
    fresh = QuantLinear("awq4", K, N, True, dtype=torch.float32)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), layer(x))


def test_meta_layers_give_shapes():
    layer = QuantLinear("awq4", K, N, True, device="meta", dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        y = layer(torch.empty(2, 3, K, device="meta", dtype=dtype))
        assert y.is_meta and y.shape == (2, 3, N) and y.dtype == dtype
    with pytest.raises(qdsl.Error, match="meta device and has no numbers"):
        QuantLinear.from_float(torch.nn.Linear(K, N, device="meta"), "awq4")


def test_a_saved_bias_that_the_layer_lacks_is_unexpected():
    layer, _ = filled(dtype=torch.float32)
    without = QuantLinear("awq4", K, N, False, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "b"'):
        without.load_state_dict(layer.state_dict())


def test_running_into_what_does_not_fit():
    layer, _ = filled(dtype=torch.float32)
    x, y = torch.zeros(2, K), torch.zeros(2, N)
    with pytest.raises(ValueError, match=rf"x is \[2, 1, {K}\], needed is \[m, {K}\]"):
        layer.run_into(x[:, None], y)
    with pytest.raises(ValueError, match="has no kernel `nope` for this layer; it has "):
        layer.run_into(x, y, variant="nope")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(qdsl.Error, match="torch sees no GPU here"):
        QuantLinear("awq4", K, N, device="cuda")


def test_meta_layers_get_their_numbers_later():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 2)
    empty = QuantLinear("awq4", K, N, True, device="meta", dtype=torch.float32)
    assert all(b.is_meta for b in empty.buffers())
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), layer(x))
    made = QuantLinear("awq4", K, N, True, device="meta", dtype=torch.float32).to_empty(device="cpu")
    with pytest.raises(qdsl.Error, match="no weights"):
        made(x)


# ---- loading -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [*map(str, SCHEMES), *map(str, LANGUAGE)], ids=lambda p: Path(p).stem)
def test_what_is_written_in_a_layout_is_read_back(path):
    scheme = qdsl.load(path)
    n, k = 64, 128
    sizes = {"e": 3, "m": 1, "n": n, "k": k}
    free = {"i": 8, "c": 8, "j": k // 8, "d": k // 8, "b": k // 4, "r": 3}
    patterns = reference.random_patterns(scheme, np.random.default_rng(3), n, k, experts=3, free=free)
    for storage in scheme.layouts.values():
        tensors = repack.write(scheme, storage, patterns, "p.")
        bound = {b.tensor: scheme.tensor(b.tensor) for b in storage.bindings}
        assert repack.mismatches(scheme, storage, tensors, "p.", sizes, bound) == []
        for binding in storage.bindings:
            found = repack.read(scheme, storage, binding, tensors, "p.", sizes)
            np.testing.assert_array_equal(found, patterns[binding.tensor], err_msg=f"{storage.name} {binding.tensor}")


@pytest.mark.parametrize("layout", ["autoawq", "autoawq_gemv"])
def test_loading_a_checkpoint_layout(layout):
    layer, patterns = filled(n=64, k=256, dtype=torch.float32)
    x = inputs(layer, 3)
    tensors = stored(layer, patterns, layout, "model.up.")
    fresh = QuantLinear("awq4", 256, 64, True, dtype=torch.float32)
    assert fresh.load(tensors, "model.up.", layout) is fresh
    assert torch.equal(fresh(x), layer(x))
    fresh.load(tensors, "model.up.", layout)  # repacking is idempotent
    assert torch.equal(fresh(x), layer(x))
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}
    assert torch.equal(fresh.load(strided, "model.up.", layout)(x), layer(x))


def test_all_mismatches_are_reported_together_and_nothing_changes():
    layer, patterns = filled(n=64, k=256)
    tensors = stored(layer, patterns, "autoawq", "up.")
    x = inputs(layer, 2)
    y = layer(x)
    tensors["up.qweight"] = tensors["up.qweight"].T.contiguous()
    tensors["up.scales"] = tensors["up.scales"].float()
    del tensors["up.qzeros"]
    with pytest.raises(qdsl.CheckpointError) as caught:
        layer.load(tensors, "up.", "autoawq")
    text = str(caught.value)
    assert "`up.qweight` is [8, 256], layout needs [256, 8]" in text and "with n = 64, k = 256" in text
    assert "transposed" in text and "awq4.q:" in text and "^^^" in text
    assert "`up.scales` is torch.float32, layout needs f16" in text and "`scale_type=f32`" in text
    assert "`up.qzeros` is missing" in text
    assert torch.equal(layer(x), y)


def test_a_layout_must_be_named_when_there_are_several():
    layer, patterns = filled()
    tensors = stored(layer, patterns, "autoawq")
    with pytest.raises(qdsl.CheckpointError, match=r"name one of its layouts \(autoawq, autoawq_gemv\)"):
        layer.load(tensors)
    with pytest.raises(qdsl.CheckpointError, match="did you mean `autoawq`"):
        layer.load(tensors, layout="autoawk")
    only, patterns = filled("w8a16", 32, 128)
    x = inputs(only, 2)
    assert torch.equal(
        QuantLinear("w8a16", 128, 32, True).load(stored(only, patterns, "compressed_tensors"))(x), only(x)
    )


def test_types_with_the_same_bits_and_exact_widenings_pass():
    layer, patterns = filled("mxfp4", 32, 128)
    x = inputs(layer, 2)
    tensors = stored(layer, patterns, "gpt_oss")
    tensors["scales"] = tensors["scales"].view(torch.uint8)
    assert torch.equal(QuantLinear("mxfp4", 128, 32, True).load(tensors, layout="gpt_oss")(x), layer(x))
    layer, patterns = filled("w8a16", 32, 128)
    tensors = stored(layer, patterns, "compressed_tensors")
    tensors["weight_scale"] = tensors["weight_scale"].half()
    wide = QuantLinear("w8a16", 128, 32, True).load(tensors)
    assert wide.s.dtype == torch.float32 and torch.equal(
        wide.s.flatten()[:32], tensors["weight_scale"].float().flatten()
    )
    tensors["weight"] = tensors["weight"].view(torch.uint8)
    with pytest.raises(qdsl.CheckpointError, match=r"`weight` is torch\.uint8, layout needs i8"):
        wide.load(tensors)


def test_a_scalar_may_be_stored_with_one_element():
    layer, patterns = filled("w8a8_static", 32, 128)
    tensors = stored(layer, patterns, "compressed_tensors")
    x = inputs(layer, 2)
    tensors["input_scale"] = tensors["input_scale"].reshape(1)
    assert torch.equal(QuantLinear("w8a8_static", 128, 32, True).load(tensors)(x), layer(x))


@pytest.mark.parametrize("value", [-1, 3, 2**31 - 1])
def test_an_index_beyond_the_groups_is_refused(value):
    layer, patterns = filled("gptq_actorder", 64, 96, group=32)
    tensors = stored(layer, patterns, "gptq_v2")
    tensors["g_idx"][17] = value
    with pytest.raises(qdsl.CheckpointError, match=rf"`g_idx` names position {value} at \[17\].*only 3"):
        layer.load(tensors, layout="gptq_v2")
    tensors["g_idx"] = tensors["g_idx"].long().clamp(0, 2)
    layer.load(tensors, layout="gptq_v2")


def test_a_value_that_its_type_cannot_hold_is_refused():
    layer, patterns = filled("w4a8", 32, 128)
    tensors = stored(layer, patterns, "plain")
    tensors["zeros"][3, 0] = 16
    with pytest.raises(qdsl.CheckpointError, match=r"`zeros` holds 16 at \[3, 0\].*u4"):
        layer.load(tensors)


def test_a_bias_that_the_layer_lacks_is_no_silent_loss():
    layer, patterns = filled()
    tensors = stored(layer, patterns, "autoawq")
    plain = QuantLinear("awq4", K, N)
    with pytest.raises(qdsl.CheckpointError, match="made without `b`"):
        plain.load(tensors, layout="autoawq")
    tensors["bias"].zero_()
    plain.load(tensors, layout="autoawq")
    del tensors["bias"]
    with pytest.raises(qdsl.CheckpointError, match="`bias` is missing"):
        layer.load(tensors, layout="autoawq")


def test_the_bias_keeps_the_type_it_was_stored_in():
    layer, patterns = filled()
    tensors = stored(layer, patterns, "autoawq")
    tensors["bias"] = torch.randn(N)
    layer.load(tensors, layout="autoawq")
    assert torch.equal(layer.bias, tensors["bias"])
    zero = torch.zeros(1, K)
    assert torch.equal(layer(zero.half())[0], tensors["bias"].half())
    assert torch.equal(reloaded(layer).float()(zero)[0], tensors["bias"])


# ---- from float, and back ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in SCHEMES if qdsl.load(name).quantize])
def test_quantizing_a_float_layer(name):
    torch.manual_seed(0)
    has_bias = any(t.role == "bias" for t in qdsl.load(name).output.tensors)
    dense = nn.Linear(128, 64, bias=has_bias)
    layer = QuantLinear.from_float(dense, name)
    assert layer.dtype == torch.float32
    error = (layer.dequantize() - dense.weight.double()).abs().max() / dense.weight.abs().max()
    assert error < 0.35  # two-bit schemes are coarse; anything wrong is far beyond
    if has_bias:
        assert torch.equal(layer.bias.float(), dense.bias)


def test_schemes_that_need_calibration_say_so():
    with pytest.raises(qdsl.Error, match=r"must be calibrated|no `quantize` block"):
        QuantLinear.from_float(nn.Linear(128, 64), "w8a8_static")


@pytest.mark.parametrize("kind", [None, torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dequantize_rounds_once_from_the_exact_value(kind):
    layer, patterns = filled()
    exact = reference.decode_weight(layer.scheme, patterns, N, K)
    found = layer.dequantize(kind)
    assert found.shape == (N, K) and found.dtype == (kind or torch.float64)
    rounded = exact if kind in (None, torch.float64) else format_named(FORMATS[kind]).round(exact)
    assert np.array_equal(found.double().numpy(), rounded)


def counted_in_codes(n=16, k=72):
    """A layer that sums codes of x, in which 3 stands for 0, and its x, which are no other numbers than codes stand for."""
    layer, patterns = filled("w8a8_quant_bias", n, k, dtype=torch.float32)
    rng = np.random.default_rng(0)
    patterns |= {
        "c": F32.encode(np.array(0.25)),
        "o": F32.encode(np.array(3.0)),
        "d": F32.encode(2.0 ** rng.integers(-9, -5, n)),
    }
    patterns["b"] = layer.scheme.tensor("b").dtype.encode(rng.integers(-99, 99, n).astype(float))
    return layer.set_patterns(patterns), torch.from_numpy(rng.integers(-60, 60, (5, k)) * 0.25).float()


def test_the_weight_of_a_layer_that_counts_in_codes_is_the_models():
    layer, x = counted_in_codes()
    weight, zero = layer.dequantize(), torch.zeros(1, x.shape[1])
    assert torch.equal(layer(x).double() - layer(zero).double(), x.double() @ weight.T)  # all of it is exact


def test_the_gradient_of_a_layer_that_counts_in_codes():
    layer, x = counted_in_codes()
    upstream = torch.randn(5, 16, dtype=torch.float64).float()
    layer(x.requires_grad_()).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ layer.dequantize(torch.float32), rtol=1e-5, atol=1e-5)


# ---- gradients ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, K), (512, K), (2, 5, K), (2, 1, 3, K), (0, K)])
def test_the_gradient_is_that_of_the_dequantized_layer(shape):
    layer, _ = filled(dtype=torch.float32)
    weight = layer.dequantize(torch.float32)
    x = torch.randn(shape, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    upstream = torch.randn(*shape[:-1], N)
    layer(x).backward(upstream)
    nn.functional.linear(same, weight).backward(upstream)
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=1e-5)
    assert not any(b.requires_grad for b in layer.buffers())


def test_training_beside_a_frozen_layer_with_checkpointing():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer, _ = filled(dtype=torch.bfloat16)
    down, up = nn.Linear(K, 8, False).bfloat16(), nn.Linear(8, N, False).bfloat16()

    def block(x):
        return layer(x) + up(down(x))

    grads = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        x = torch.ones(2, 5, K, dtype=torch.bfloat16, requires_grad=True)
        up.zero_grad(), down.zero_grad()
        run(x).float().square().mean().backward()
        grads.append((x.grad, up.weight.grad.clone(), down.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert grads[0][0].abs().max() > 0


def test_quantized_activations_pass_the_gradient_straight_through():
    layer, _ = filled("w8a8_dynamic", 32, 128, dtype=torch.float32)
    x = torch.randn(3, 128, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.ones(3, 32) @ layer.dequantize(torch.float32)
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 2).requires_grad_()
    with pytest.raises(qdsl.Error, match="no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_an_output_without_a_gradient_is_refused(tmp_path):
    path = tmp_path / "relu.q"
    path.write_text(qdsl.load("w8a16").text.replace("y = acc + b", "y = relu(acc + b)"))
    layer = QuantLinear(path, 64, 8, dtype=torch.float32)
    layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(0), 8, 64))
    x = torch.randn(2, 64)
    assert (layer(x) >= 0).all()
    with pytest.raises(qdsl.Error, match=r"can't pass a gradient to x yet: its output is `relu\(acc \+ b\)`"):
        layer(x.requires_grad_())


# ---- construction ------------------------------------------------------------------------------------------------
def test_a_scheme_comes_by_name_path_value_or_artifact(tmp_path):
    layer, patterns = filled(dtype=torch.float32, group=64)
    x = inputs(layer, 2)
    path = Path(tmp_path) / "mine.q"
    path.write_text(layer.scheme.text)
    compiled = qdsl.compile(layer.scheme, "cpu", cpu_levels()[:1], out=tmp_path / "compiled")
    for made in (
        QuantLinear(path, K, N, True, dtype=torch.float32, group=64),
        QuantLinear(qdsl.load("awq4"), K, N, True, dtype=torch.float32, group=64),
        QuantLinear(compiled.path, K, N, True),
        QuantLinear(layer.scheme, K, N, True, artifact=compiled.path),
        QuantLinear(layer.scheme, K, N, True, artifact=compiled, compile="never"),
    ):
        assert torch.equal(made.set_patterns(patterns)(x), layer(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantLinear("awq5", K, N), r"no such scheme; did you mean `awq4`"),
        (lambda: QuantLinear("awq4", 0, N), "at least one input"),
        (lambda: QuantLinear("awq4", K, N, compile="always"), '"auto" or "never"'),
        (lambda: QuantLinear("awq4", K, N, phase="decode"), r"no phase `decode` \(it has: none\)"),
        (lambda: QuantLinear("w4a8", K, N, True), "declares no bias"),
        (lambda: QuantLinear("awq4", K, N, groups=64), "group"),
        (lambda: QuantLinear("awq4", K, N, device="xpu"), "not for `xpu`"),
        (lambda: QuantLinear("awq4", K, N, artifact="/nowhere"), "no such artifact"),
    ],
)
def test_construction_refuses_by_name(make, message):
    with pytest.raises((qdsl.Error, ValueError), match=message):
        make()


def test_a_requirement_is_checked_at_construction(tmp_path):
    path = tmp_path / "even.q"
    path.write_text(qdsl.load("w8a16").text.replace("compute act", "require k % 64 == 0\n\ncompute act"))
    with pytest.raises(qdsl.Error, match=r"requires k % 64 == 0.*k = 100"):
        QuantLinear(path, 100, 8)


def test_schemes_that_a_layer_cannot_hold_say_why():
    with pytest.raises(qdsl.Error, match="one matrix"):
        QuantLinear(Path(__file__).parent / "schemes" / "experts.q", K, N)


# ---- artifacts ---------------------------------------------------------------------------------------------------
def test_never_compiling_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(qdsl.ArtifactError, match=r"run `qdsl compile awq4 .*-P group=96 .*--target cpu --arch "):
        QuantLinear("awq4", K, N, group=96, compile="never")


def test_prebuilt_artifacts_are_found_without_a_compiler(tmp_path, monkeypatch):
    scheme = qdsl.load("awq4", group=96)
    qdsl.compile(scheme, "cpu", cpu_levels()[-1:], out=tmp_path / "built" / "one")
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "empty"))
    for entry in (tmp_path / "built", tmp_path / "built" / "one"):
        monkeypatch.setenv("QDSL_ARTIFACTS", f"{tmp_path / 'absent'}:{entry}")
        layer, patterns = filled(group=96, compile="never")
        assert layer.manifest.libraries.keys() == {cpu_levels()[-1]}
        x = inputs(layer, 2)
        assert within_bound(layer, patterns, x, layer(x))


def test_a_changed_library_is_not_loaded(tmp_path):
    artifact = qdsl.compile(qdsl.load("awq4", group=160), "cpu", cpu_levels()[:1], out=tmp_path / "built")
    layer, _ = filled(k=320, group=160, artifact=artifact.path)
    library = artifact.path / next(iter(artifact.manifest.libraries.values()))
    library.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(qdsl.ArtifactError, match=r"sha256.*will not be loaded"):
        layer(torch.zeros(1, 320, dtype=torch.float16))


@pytest.mark.parametrize(
    ("capability", "libraries", "expected"),
    [
        ((7, 5), ("sm_80", "sm_90a"), None),
        ((8, 0), ("sm_80", "sm_90a"), "sm_80"),
        ((8, 6), ("sm_80", "sm_86", "sm_90a"), "sm_86"),
        ((8, 9), ("sm_80", "sm_86", "sm_90a"), "sm_86"),
        ((9, 0), ("sm_80", "sm_90", "sm_90a"), "sm_90a"),
        ((9, 0), ("sm_80", "sm_90"), "sm_90"),
        ((10, 0), ("sm_80", "sm_90a"), "sm_80"),
        ((12, 0), ("sm_80", "sm_90", "sm_90a", "sm_120"), "sm_120"),
        ((12, 1), ("sm_90a",), None),
    ],
)
def test_which_library_a_gpu_takes(capability, libraries, expected):
    assert fitting_cuda_arch(libraries, capability) == expected


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"),
     ((12, 0), "sm_120"), ((13, 1), "sm_121")],
)  # fmt: skip
def test_what_is_compiled_for_a_gpu(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert best_arch(torch.device("cuda:0")) == arch


def test_a_gpu_that_is_too_old_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(qdsl.TargetError, match="sm_75 is too old"):
        find_artifact(qdsl.load("awq4"), torch.device("cuda:0"))


def test_a_missing_compiler_is_no_matter_with_a_warm_cache(monkeypatch, tmp_path):
    filled(dtype=torch.float32)
    monkeypatch.setenv("PATH", str(tmp_path))
    layer, patterns = filled(dtype=torch.float32)
    x = inputs(layer, 2)
    assert within_bound(layer, patterns, x, layer(x))


def test_which_library_a_processor_takes():
    assert fitting_arch(("x86-64-v9",), torch.device("cpu")) is None
    assert fitting_arch(cpu_levels(), torch.device("cpu")) == cpu_levels()[0]


def test_an_artifact_for_no_device_here_names_the_command(tmp_path):
    scheme = qdsl.load("awq4")
    artifact = qdsl.compile(scheme, "cpu", cpu_levels()[:1], out=tmp_path / "built")
    file = next(iter(artifact.manifest.libraries.values()))
    other = dataclasses.replace(artifact.manifest, libraries={"x86-64-v9": file})
    (artifact.path / "manifest.json").write_text(other.to_json())
    with pytest.raises(qdsl.ArtifactError, match=rf"has kernels for x86-64-v9.*--arch {cpu_levels()[0]} -o "):
        find_artifact(scheme, torch.device("cpu"), given=qdsl.open_artifact(artifact.path))


# ---- processes and threads ---------------------------------------------------------------------------------------
def test_importing_starts_neither_cuda_nor_a_compiler():
    code = (
        "import sys, qdsl.runtime, torch\n"
        "found = {'tvm', 'tvm_ffi', 'lark', 'transformers', 'qdsl.codegen'} & set(sys.modules)\n"
        "assert not found, found\n"
        "qdsl.load('awq4')\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_may_share_a_layer():
    layer, _ = filled(dtype=torch.float32)
    x = inputs(layer, 5)
    expected, wrong = layer(x), []

    def work():
        for _ in range(50):
            if not torch.equal(layer(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_dropped_layer_frees_its_buffers():
    layer, _ = filled()
    layer(inputs(layer, 2))
    gone = weakref.ref(layer.q)
    del layer
    gc.collect()
    assert gone() is None


# ---- what comes with a call --------------------------------------------------------------------------------------
def epilogue_layer(name: str) -> QuantLinear:
    layer = QuantLinear(Path(__file__).parent / "schemes" / f"{name}.q", 64, 32, bias=True)
    return layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(0), 32, 64))


def test_a_residual_is_added_where_the_scheme_says():
    layer = epilogue_layer("epilogue")
    x, residual = torch.randn(2, 3, 64), torch.randn(2, 3, 32)
    with torch.no_grad():
        plain = layer(x)
        assert torch.allclose(layer(x, residual), plain + residual, atol=1e-6)
        strided = residual.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(layer(x, residual=strided), layer(x, residual))
        assert torch.equal(epilogue_layer("residual")(x, residual), layer(x, residual))


def test_a_residual_that_does_not_fit_is_refused():
    x = torch.randn(3, 64)
    for given, words in (
        (torch.randn(3, 64), r"the residual is \[3, 64\] torch.float32 on cpu, needed is \[3, 32\]"),
        (torch.randn(3, 32).half(), "torch.float16"),
    ):
        with pytest.raises(ValueError, match=words):
            epilogue_layer("epilogue")(x, given)
    with pytest.raises(ValueError, match="needs its residual `r` with every call"):
        epilogue_layer("residual")(x)
    plain = QuantLinear("awq4", 128, 32, act="f32")
    plain.set_patterns(reference.random_patterns(plain.scheme, np.random.default_rng(0), 32, 128) | {})
    with pytest.raises(
        ValueError, match=r"adds no residual; declare one in its output block: `residual r\[m, n\] : f32"
    ):
        plain(torch.randn(1, 128), torch.randn(1, 32))


def test_gate_and_up_make_one_output():
    layer = QuantLinear(Path(__file__).parent / "schemes" / "gate_up.q", 64, 96, act="f32")
    layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(0), 96, 64))
    x = torch.randn(5, 64)
    weight = torch.from_numpy(layer.dequantize().double().numpy())
    gate, up = (x.double() @ weight.T).chunk(2, -1)
    with torch.no_grad():
        y = layer(x)
    assert y.shape == (5, 48) and torch.allclose(y.double(), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
    with pytest.raises(qdsl.Error, match="can't pass a gradient to x"):
        layer(x.requires_grad_())


def test_a_code_that_is_no_number_is_refused():
    """No kernel of ours spends an instruction on NaN, and a model with one has no answers to give."""
    scheme = qdsl.load("fp8a16_tensor", act="f32")
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), 16, 64)
    (layout,) = scheme.layouts
    patterns["q"][3, 17] = 0x7F
    tensors = repack.write(scheme, scheme.layouts[layout], patterns, "p.")
    layer = QuantLinear(scheme, 64, 16, bias=True)
    with pytest.raises(
        qdsl.CheckpointError, match=r"1 codes that are no numbers; the first, 0x7f at \[3, 17\], is nan in e4m3"
    ):
        layer.load(tensors, "p.")
    patterns["q"][3, 17] = 0x7E
    layer.load(repack.write(scheme, scheme.layouts[layout], patterns, "p."), "p.")
