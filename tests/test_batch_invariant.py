"""Layers whose rows keep their bits whatever the number of rows, and how a layer comes to its kernels; on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qdsl
from qdsl import reference
from qdsl.artifact import MANIFEST
from qdsl.choice import Row, Table
from qdsl.runtime import QuantLinear, load_quantized
from qdsl.runtime import artifact as artifact_module
from qdsl.runtime.artifact import cpu_levels

N, K = 48, 192
DATA = Path(__file__).parent / "data"
TOGETHER = Path(__file__).parent / "schemes" / "one_scale.q"  # one activation scale for all rows


def filled(scheme="awq4", n=N, k=K, **options):
    options.setdefault("bias", any(t.role == "bias" for t in qdsl.load(scheme).output.tensors))
    layer = QuantLinear(scheme, k, n, **options)
    return layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(0), n, k))


def inputs(layer, m):
    return torch.randn(m, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.dtype)


# ---- numbers -----------------------------------------------------------------------------------------------------
# Kinds of portable kernels, one of each; tests/test_simd.py has the others.
@pytest.mark.parametrize(
    "name", ["awq4", "fp8_block", "gptq_actorder", "nvfp4", "w4a4_flatquant", "w8a8_dynamic", "w8a8_mix"]
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name):
    layer = filled(name, 40, 384, batch_invariant=True)
    x = inputs(layer, 65)
    alone = torch.cat([layer(row[None]) for row in x])
    for m in (1, 2, 3, 4, 5, 7, 16, 17, 64, 65):
        assert torch.equal(layer(x[:m]), alone[:m])
    x[:20] = 1000
    assert torch.equal(layer(x)[20:], alone[20:]), "nor on what the others hold"


def test_by_default_equal_calls_give_equal_bits():
    layer = filled()
    for m in (1, 4, 16, 64, 257):
        x = inputs(layer, m)
        y = layer(x)
        assert all(torch.equal(layer(x), y) for _ in range(20))


def test_what_is_computed_from_all_rows_is_refused():
    scheme = qdsl.load(TOGETHER)
    QuantLinear(scheme, K, N)
    with pytest.raises(qdsl.Error, match=r"one_scale.* can't be batch-invariant: `scale t\[\].*all rows of x"):
        QuantLinear(scheme, K, N, batch_invariant=True)


# ---- which kernels -----------------------------------------------------------------------------------------------
@pytest.fixture
def several(tmp_path, monkeypatch):
    """An artifact with four variants that are the same function, and a list that gets the name of every one called."""
    folder = tmp_path / "several"
    artifact = qdsl.compile(qdsl.load("awq4", act="f32"), "cpu", cpu_levels()[-1:], out=folder)
    (arch,) = artifact.manifest.libraries
    (portable,) = artifact.manifest.variants[arch][""]
    variants = tuple(
        replace(portable, name=name, order=order, k_multiple=multiple)
        for name, order, multiple in (("one", "a", 1), ("few", "b", 1), ("many", "b", 1), ("fast", "c", 64))
    )
    spare = Row(64, 64, ((1, "one"), (None, "many")), ((2, "few"), (None, "many")))
    rows = (
        Row(48, 192, ((1, "one"), (8, "few"), (None, "fast")), ((2, "few"), (None, "many"))),
        Row(4096, 4096, ((None, "fast"),), ((None, "fast"),)),
    )
    manifest = replace(
        artifact.manifest, variants={arch: {"": variants}}, tables={arch: {"": Table("by hand", spare, rows)}}
    )
    (folder / MANIFEST).write_text(manifest.to_json())
    called: list[str] = []
    load = artifact_module.Kernel.load

    def recording(kernel):
        fresh = kernel._variants is None
        load(kernel)
        for name, calls in kernel._variants.items() if fresh else ():
            (call,) = calls
            function = lambda *args, name=name, f=call.function: (called.append(name), f(*args))
            kernel._variants[name] = (replace(call, function=function),)

    monkeypatch.setattr(artifact_module.Kernel, "load", recording)
    monkeypatch.setattr(artifact_module, "_KERNELS", {})
    return folder, called


@pytest.mark.parametrize(
    ("n", "k", "free", "fixed"),
    [
        (48, 192, {1: "one", 2: "few", 8: "few", 9: "fast", 99: "fast"}, {1: "few", 2: "few", 3: "many", 99: "many"}),
        (48, 200, {1: "one", 2: "few", 8: "few", 9: "many"}, {1: "few", 3: "many"}),
        (2048, 1024, {1: "fast", 9: "fast"}, {1: "fast", 9: "fast"}),
        (2048, 1032, {1: "one", 2: "many"}, {1: "few", 2: "few", 3: "many"}),
    ],
)
def test_the_table_decides(several, n, k, free, fixed):
    folder, called = several
    for expected, options in ((free, {}), (fixed, {"batch_invariant": True})):
        layer = filled("awq4", n, k, artifact=folder, dtype=torch.float32, **options)
        for m, name in expected.items():
            called.clear()
            layer(inputs(layer, m))
            assert called == [name]
            if not options:
                assert layer.manifest.choose(layer.kernel.arch, m, n, k).name == name


def test_a_variant_can_be_asked_for(several):
    folder, called = several
    layer = filled("awq4", N, 200, artifact=folder, dtype=torch.float32)
    assert layer.kernel.variants(200) == ["one", "few", "many"] and layer.kernel.variants(K)[-1] == "fast"
    x, y = inputs(layer, 3), torch.zeros(3, N)
    layer.run_into(x, y, variant="one")
    assert called == ["one"] and torch.equal(y, layer(x))


# ---- the option stays with the layer -----------------------------------------------------------------------------
def reloaded(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = QuantLinear(layer.scheme, layer.in_features, layer.out_features, True, batch_invariant=True)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@pytest.mark.parametrize(
    "route",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        reloaded,
        lambda layer: layer.half().to(torch.float32),
        lambda layer: layer.to("cpu"),
    ],
    ids=["deepcopy", "pickle", "state_dict", "type", "device"],
)
def test_it_survives(route):
    layer = filled(dtype=torch.float32, batch_invariant=True)
    x = inputs(layer, 5)
    y = layer(x)
    other = route(layer)
    assert other.batch_invariant and other.kernel.batch_invariant and "batch_invariant" in repr(other)
    assert torch.equal(other(x), y)
    assert other(x.half()).dtype == torch.float16
    assert all(artifact_module.kernel(key).batch_invariant for key in other._keys.values())


def test_layers_with_and_without_it_have_kernels_of_their_own():
    one, other = filled(batch_invariant=True), filled()
    assert one.kernel.key != other.kernel.key and not other.batch_invariant
    one.load_state_dict(other.state_dict())
    assert one.batch_invariant, "like the type, it is the layer's and not the numbers'"


def test_it_survives_torch_compile():
    torch._dynamo.reset()
    layer = filled(dtype=torch.float32, batch_invariant=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = inputs(layer, 16)
    alone = torch.cat([layer(row[None]) for row in x])
    for m in (1, 5, 16):
        assert torch.equal(compiled(x[:m]), alone[:m])


def test_quantized_from_a_float_layer():
    layer = QuantLinear.from_float(nn.Linear(K, N), "gptq_sym", batch_invariant=True)
    assert layer.kernel.batch_invariant


def test_a_whole_model_is_loaded_with_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(DATA / "awq_g128")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load_quantized(model, DATA / "awq_g128", batch_invariant=True)
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert layers and all(layer.kernel.batch_invariant for layer in layers)
