"""Transforms of x: contractions are the sum they stand for, extents come from tensors, and kernels stay in the bound."""

from __future__ import annotations

import hashlib
import pickle
import string
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qdsl
from qdsl import reference, transform
from qdsl.artifact import MANIFEST
from qdsl.cache import nvcc
from qdsl.choice import only
from qdsl.codegen import pipeline
from qdsl.codegen.cuda import host
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target
from qdsl.diagnostic import CheckpointError
from qdsl.dtype import F32
from qdsl.manifest import Manifest, plain_params
from qdsl.runtime import QuantLinear, repack
from qdsl.runtime.artifact import cpu_levels
from qdsl.runtime.verify import verify
from qdsl.transform import contractions, extents, passes, solved

sys.path.insert(0, str(Path(__file__).parent))

from emulation.emulate import built

SCHEMES = Path(__file__).parent / "schemes"
FILES = [qdsl.shipped()["w4a4_flatquant"], *(SCHEMES / f"{name}.q" for name in ("smoothing", "rotation", "rotated"))]
FLATQUANT = FILES[0]
N, K = 33, 144
TEXT = """
scheme test
weight {{ code q[n, k] : i8 w ~ q }}
activation {{ {} scale t[m] : f32 = amax(abs(x)) / 127 code a[m, k] : i8 = x / t x ~ a * t }}
compute i8 -> i32
output f16
"""


def parsed(declarations: str) -> transform.Transform:
    (found,) = qdsl.parse(TEXT.format(declarations)).activation().transforms
    return found


def filled(file: Path, k: int = K, **options):
    """(a layer with random weights, their bit patterns)."""
    scheme = qdsl.load(file)
    layer = QuantLinear(scheme, k, N, any(t.role == "bias" for t in scheme.output.tensors), **options)
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, k)
    return layer.set_patterns(patterns), patterns


def inputs(layer, m=5):
    return torch.from_numpy(np.random.default_rng(1).standard_normal((m, layer.in_features))).to(layer.dtype)


def agrees(layer, patterns, m=5) -> bool:
    x = inputs(layer, m)
    expected = reference.linear(layer.scheme, x.double().numpy(), patterns, N)
    return bool((np.abs(layer(x).double().numpy() - expected.y) <= expected.bound).all())


# ---- contractions ------------------------------------------------------------------------------------------------
def one_after_another(t, x, values):
    """The contractions in float64, each as it is spelled."""
    size = extents(t, {"x": x.shape, **{name: v.shape for name, v in values.items()}})
    for c in contractions(t):
        letter = dict(zip(dict.fromkeys([*c.source, *c.summed, *c.result, *(d for f in c.factors for d in f.digits)]),
                          string.ascii_lowercase, strict=False))  # fmt: skip
        spell = ["".join(letter[d] for d in f.digits) for f in c.factors]
        arrays = [values[f.name].reshape([size[d] for d in f.digits]) for f in c.factors]
        source = x.reshape(len(x), *(size[d] for d in c.source))
        spec = ",".join(["Z" + "".join(letter[d] for d in c.source), *spell])
        x = np.einsum(f"{spec}->Z{''.join(letter[d] for d in c.result)}", source, *arrays).reshape(len(x), -1)
    return x


@given(data=st.data())
def test_contractions_are_the_sum(data):
    """Random products: matrices on some digits of x, factors on others, digits in another order."""
    names = "ijkl"[: data.draw(st.integers(2, 4))]
    size = {d: data.draw(st.integers(1, 4)) for d in names}
    made, declared, product = dict(zip(names, names, strict=True)), [], []
    for d in names:
        kind = data.draw(st.sampled_from(["matrix", "factor", "scaled matrix"]))
        if "matrix" in kind:
            made[d] = d.upper()
            declared.append(f"param m_{d}[{d}, {d.upper()}] : f32")
            product.append(f"m_{d}[{d}, {d.upper()}]")
        if kind != "matrix":
            declared.append(f"param v_{d}[{d}] : f32")
            product.append(f"v_{d}[{made[d]}]")
    order = data.draw(st.permutations(names))
    product = data.draw(st.permutations([*product, f"x[m, ({' '.join(names)})]"]))
    body = " * ".join(product)
    body = f"sum({body})" if made != dict(zip(names, names, strict=True)) else body
    t = parsed(f"{' '.join(declared)} transform x[m, ({' '.join(made[d] for d in order)})] = {body}")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = {f"m_{d}": (size[d], size[d]) for d in names} | {f"v_{d}": (size[d],) for d in names}
    used = {f.name for f in transform.factors(t)} - {"x"}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items() if name in used}
    x = rng.standard_normal((3, int(np.prod([size[d] for d in names]))))
    expected = reference.apply_transform(t, x, values)
    np.testing.assert_allclose(one_after_another(t, x, values), expected, rtol=1e-9, atol=1e-9)
    assert len(contractions(t)) <= len(names), "factors join a pass that has their digits"


def test_two_matrices_are_two_contractions():
    t = qdsl.load(FLATQUANT).activation().transforms[0]
    first, second = contractions(t)
    assert (first.source, first.summed, first.result) == (("i", "j"), ("i",), ("j", "c"))
    assert (second.source, second.summed, second.result) == (("j", "c"), ("j",), ("c", "d"))


def test_few_directions_come_before_many():
    """x meets `u` first, though it is written last: the other way there would be i·r·c products."""
    t = parsed("param u[i, r] : f32 param d[r, c] : f32 transform x[m, c] = sum(d[r, c] * x[m, i] * u[i, r])")
    assert [(c.summed, c.result) for c in contractions(t)] == [(("i",), ("r",)), (("r",), ("c",))]


# ---- extents -----------------------------------------------------------------------------------------------------
def test_what_no_tensor_tells_is_left_of_x():
    t = parsed("param h[i, j] : f32 transform x[m, (b j)] = sum(h[i, j] * x[m, (b i)])")
    assert [(f.digit, f.tensor) for f in solved(t)] == [("i", "h"), ("j", "h"), ("b", "x")]
    assert extents(t, {"h": (8, 8), "x": (2, 48)}) == {"i": 8, "j": 8, "b": 6}


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ((4, 4), (5, 5), r"`\(i j\)` has 20 positions in `x\[m, \(i j\)\]`, and x has 24 features"),
        ((4, 6), (6, 6), "makes 36 features of the 24 of x"),
    ],
)
def test_shapes_that_disagree_are_named(left, right, words):
    t = qdsl.load(FLATQUANT).activation().transforms[0]
    with pytest.raises(ValueError, match=words):
        extents(t, {"left": left, "right": right, "x": (2, 24)})


def test_sizes_for_tests_fit_or_there_are_none():
    scheme = qdsl.load(SCHEMES / "rotated.q")  # one matrix from both sides: k is a square
    assert transform.free_sizes(scheme, 64) == {"i": 8, "j": 8}
    assert transform.free_sizes(scheme, 40) is None
    with pytest.raises(ValueError, match="no x of 40 features"):
        reference.random_patterns(scheme, np.random.default_rng(0), 8, 40)


# ---- the bound ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_codes_next_to_a_tie_are_inside_the_bound(file):
    """Sums in float32 in an order of their own move x, and with it scales and codes."""
    scheme, k = qdsl.load(file), 1024
    rng = np.random.default_rng(2)
    patterns = reference.random_patterns(scheme, rng, N, k)
    block = scheme.activation()
    values = {t.name: t.dtype.decode(patterns[t.name]) for t in block.operand.loaded}
    x = scheme.output.dtype.round(rng.standard_normal((64, k)))
    expected = reference.linear(scheme, x, patterns, N)
    moved = x
    for t in block.transforms:
        whole = reference.apply_transform(t, moved, values)
        size = reference.apply_transform(t, np.abs(moved), {n: np.abs(v) for n, v in values.items()})
        moved = F32.round(whole + rng.choice([-1.0, 1.0], whole.shape) * F32.unit * size)
    plain = qdsl.parse(scheme.text.replace("transform", "#"), "plain", **plain_params(scheme))
    found = reference.linear(plain, moved, patterns, N).y
    assert (np.abs(found - expected.y) <= expected.bound).all()
    if file.stem == "rotation":  # with codes of 8 bits and sums on their way
        codes = [reference.activate(s, given, patterns)[1]["a"] for s, given in ((plain, moved), (scheme, x))]
        assert (codes[0] != codes[1]).any(), "some code is another"


# ---- layers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_layer_takes_its_extents_from_its_numbers(file):
    layer, patterns = filled(file)
    assert agrees(layer, patterns) and agrees(pickle.loads(pickle.dumps(layer)), patterns)
    (storage,) = layer.scheme.layouts.values()
    if layer.bias is None or "b" in {b.tensor for b in storage.bindings}:
        tensors = repack.write(layer.scheme, storage, patterns)
        fresh = QuantLinear(layer.scheme, K, N, layer.bias is not None).load(tensors)
        assert torch.equal(fresh(inputs(layer)), layer(inputs(layer)))
    saved = layer.state_dict()
    for device in ("cpu", "meta"):
        with torch.device(device):
            again = QuantLinear(layer.scheme, K, N, layer.bias is not None)
        again.load_state_dict(saved, assign=device == "meta")
        assert torch.equal(again(inputs(layer)), layer(inputs(layer)))


def test_layers_of_one_kernel_have_extents_of_their_own():
    scheme = qdsl.load(FLATQUANT)
    for sizes in ({"i": 12, "c": 12, "j": 12, "d": 12}, {"i": 4, "c": 4, "j": 36, "d": 36}):
        patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, K, free=sizes)
        layer = QuantLinear(scheme, K, N, bias=True).set_patterns(patterns)
        assert agrees(layer, patterns)
        assert layer.left.shape == (sizes["i"], sizes["c"])


def test_a_checkpoint_of_wrong_extents_is_refused_before_anything_changes():
    layer, patterns = filled(FLATQUANT)
    (storage,) = layer.scheme.layouts.values()
    before = layer(inputs(layer))
    tensors = repack.write(layer.scheme, storage, patterns)
    for left, words in (
        (torch.eye(5), "has 60 positions"),
        (torch.eye(12, 13), "makes 156 features"),
        (torch.ones(12), "rank 2"),
    ):
        with pytest.raises(CheckpointError, match=words):
            layer.load({**tensors, "left_trans": left})
    with pytest.raises(CheckpointError, match="`left` is"):
        layer.set_patterns({**patterns, "left": patterns["left"][0]})
    assert torch.equal(layer(inputs(layer)), before)


def test_a_layer_without_numbers_has_no_extents():
    layer = QuantLinear(qdsl.load(FLATQUANT), K, N)
    assert layer.left.shape == (0, 0)
    again = QuantLinear(layer.scheme, K, N)
    again.load_state_dict(layer.state_dict())
    with pytest.raises(qdsl.Error, match="no weights yet"):
        again(torch.ones(1, K, dtype=torch.float16))


def test_other_activation_types_are_other_kernels():
    layer, patterns = filled(FLATQUANT)
    assert agrees(layer.to(torch.bfloat16), patterns) and layer.dtype == torch.bfloat16


# ---- CUDA --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(nvcc() is None, reason="needs the headers of CUDA, which come with nvcc")
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_kernels_of_a_gpu(file, tmp_path):
    """Emulated: every step from x to y, as an artifact for the CPU; the last variant is the portable one, or for any m."""
    scheme, goal, level = qdsl.load(file), target("cuda", "sm_80"), cpu_levels()[0]
    planned = plan(scheme, goal)
    planned = replace(planned, variants=planned.variants[-1:])
    steps = [s.function for s in planned.variants[0].steps]
    assert steps[: len(passes(scheme.activation().transforms))] == [
        f"transform_{at}" for at, _ in enumerate(passes(scheme.activation().transforms), 1)
    ]
    functions = {n: f for n, f in pipeline.lower(planned, steps).items() if n in steps}
    library = built(host.emit(functions, goal), tmp_path / "kernel.so")
    manifest = Manifest(
        scheme.name, scheme.text, plain_params(scheme), "cpu", {level: library.name}, {level: planned.buffers}, {level: {"": planned.variants}},
        {level: {"": only(planned.variants[0].name)}}, planned.precision, None, (), {}, {library.name: hashlib.sha256(library.read_bytes()).hexdigest()}, scheme.bound,
    )  # fmt: skip
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    for k in (K, 16):
        layer, patterns = filled(file, k, artifact=tmp_path)
        assert layer.manifest.digest == scheme.bound
        assert agrees(layer, patterns)


def test_verify_leaves_out_what_no_transform_takes():
    assert verify(qdsl.load(SCHEMES / "rotated.q")).passed
