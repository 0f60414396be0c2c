"""Layers of tensor-core kernels without a GPU: artifacts for the CPU whose library is the emulation of sm_80's kernels.

So inputs that are sorted by group, and features of which several make one, go the whole way: checkpoint, layer, state_dict,
a move to kernels of another layout, and back.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference
from qdsl.artifact import MANIFEST, open_artifact
from qdsl.cache import nvcc
from qdsl.choice import only
from qdsl.codegen.cuda import host, main_loop
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target
from qdsl.manifest import Manifest, plain_params
from qdsl.runtime import QuantLinear
from qdsl.runtime.artifact import cpu_levels

sys.path.insert(0, str(Path(__file__).parent))

from emulation.emulate import built

TEST_SCHEMES = Path(__file__).parent / "schemes"
pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
N, K = 44, 200


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The artifact of a scheme whose only kernel is that of sm_80 for 8 tokens."""
    known: dict[str, Path] = {}

    def make(scheme) -> Path:
        if scheme.bound not in known:
            folder, goal, level = tmp_path_factory.mktemp("artifact"), target("cuda", "sm_80"), cpu_levels()[0]
            planned = plan(scheme, goal)
            variant = replace(next(v for v in planned.variants if v.name in ("m8", "b8")), order="by rising k")
            kept = {step.function for step in variant.steps}
            file = built(host.emit(main_loop.lower(planned, kept), goal), folder / "kernel.so")
            manifest = Manifest(
                scheme.name, scheme.text, plain_params(scheme), "cpu", {level: file.name}, {level: planned.buffers}, {level: {"": (variant,)}},
                {level: {"": only(variant.name)}}, planned.precision, None, (), {}, {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}, scheme.bound,
            )  # fmt: skip
            (folder / MANIFEST).write_text(manifest.to_json())
            known[scheme.bound] = folder
        return known[scheme.bound]

    return make


SCHEMES = [("gptq_actorder", {"group": 32}), ("gptq", {"group": 20}), (TEST_SCHEMES / "gate_up_channel.q", {}),
           (TEST_SCHEMES / "gate_up_actorder.q", {}), ("fp8a16_block", {"block": 24}), ("fp8_dynamic", {})]  # fmt: skip


def agrees(layer, patterns, m=5):
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((m, K))).to(layer.dtype)
    expected = reference.linear(layer.scheme, x.double().numpy(), patterns, N, precision=layer.manifest.precision)
    assert (np.abs(layer(x).double().numpy() - expected.y) <= expected.bound).all()


@pytest.mark.parametrize(("name", "params"), SCHEMES, ids=lambda v: getattr(v, "stem", None) or str(v))
def test_numbers_survive_every_way_a_layer_is_moved(name, params, emulated):
    scheme = qdsl.load(name, **params)
    artifact = emulated(scheme)
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, K)
    patterns = {name: bits for name, bits in patterns.items() if scheme.tensor(name).role != "bias"}
    layer = QuantLinear(scheme, K, N, artifact=artifact).set_patterns(patterns)
    assert layer.kernel.names[-1] == "x.source" or layer.kernel.order is None
    agrees(layer, patterns)
    exact = reference.decode_weight(scheme, patterns, N, K)
    assert np.array_equal(layer.dequantize().numpy(), exact)
    # Another layer of these kernels, and one of kernels that want another layout: both ways.
    saved = layer.state_dict()
    again = QuantLinear(scheme, K, N, artifact=artifact)
    again.load_state_dict(saved)
    agrees(again, patterns)
    portable = QuantLinear(scheme, K, N)
    assert portable.kernel.key != layer.kernel.key
    portable.load_state_dict(saved)
    agrees(portable, patterns)
    back = QuantLinear(scheme, K, N, artifact=artifact)
    back.load_state_dict(portable.state_dict())
    agrees(back, patterns)
    for tensor, other in zip(saved.values(), back.state_dict().values(), strict=True):
        assert tensor.shape == other.shape
    agrees(pickle.loads(pickle.dumps(layer)), patterns)
    with torch.device("meta"):
        empty = QuantLinear(scheme, K, N, artifact=artifact)
    empty.load_state_dict(saved, assign=True)
    agrees(empty, patterns)


def test_groups_of_any_size_take_several_runs(emulated):
    """All inputs in one group, and none in another: what a slice of a larger weight may have."""
    scheme = qdsl.load("gptq_actorder", group=32)
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, K)
    del patterns["b"]
    layer = QuantLinear(scheme, K, N, artifact=emulated(scheme))
    for groups in (np.full(K, 3), np.arange(K) % 7, np.arange(K) // 32):
        patterns["g"] = groups.astype(np.uint32)
        layer.set_patterns(patterns)
        agrees(layer, patterns)
        assert np.array_equal(layer.dequantize().numpy(), reference.decode_weight(scheme, patterns, N, K))
        saved = layer.state_dict()
        again = QuantLinear(scheme, K, N, artifact=emulated(scheme))
        again.load_state_dict(saved)
        agrees(again, patterns)


def test_a_state_that_does_not_fit_its_groups_is_refused(emulated):
    scheme = qdsl.load("gptq_actorder", group=32)
    layer = QuantLinear(scheme, K, N, artifact=emulated(scheme))
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, K)
    del patterns["b"]
    state = layer.set_patterns(patterns).state_dict()
    state["g"] = torch.full_like(state["g"], 3)
    with pytest.raises(RuntimeError, match="its tag says"):
        QuantLinear(scheme, K, N, artifact=emulated(scheme)).load_state_dict(state)


def test_the_manifest_holds_the_order(emulated):
    manifest = open_artifact(emulated(qdsl.load("gptq", group=20))).manifest
    (arch,) = manifest.libraries
    assert str(manifest.order(arch)) == "inputs in their order, in runs of 32, of 20 inputs"
    assert Manifest.from_json(manifest.to_json()) == manifest
