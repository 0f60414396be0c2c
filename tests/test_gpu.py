"""QuantLinear on CUDA: numbers, graphs, streams, devices, copies between devices.

Needs a GPU, and no compiler where QDSL_ARTIFACTS names a folder of prebuilt artifacts: `python tests/test_gpu.py DIR
[ARCH…]` makes one on any machine with an nvcc, for all schemes and types used here.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference
from qdsl.runtime import QuantLinear, load_quantized

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parent / "data"
N, K = 256, 512
HALF, BF16 = torch.float16, torch.bfloat16
# scheme, parameters: what the tests below run
USED = [
    *(("awq4", {"act": act}) for act in ("f16", "bf16", "f32")),
    ("awq4", {"act": "f16", "group": "k"}),
    ("gptq", {"bits": 3, "act": "f16"}),
    ("gptq_actorder", {"act": "f16"}),
    ("w8a8_dynamic", {"act": "bf16"}),
    ("fp8_block", {"act": "bf16"}),
    ("nvfp4", {"act": "bf16"}),
    ("q4_1", {"act": "f16"}),
    ("fp8a16_block", {"act": "bf16"}),
    ("w4a4_flatquant", {"act": "f16"}),
    *(
        (str(Path(__file__).parent / "schemes" / f"{name}.q"), {"act": "bf16"})
        for name in ("fresh", "gate_up_channel", "gate_up_actorder", "smoothing", "phases")
    ),
]
TYPES = {"f16": HALF, "bf16": BF16, "f32": torch.float32}
MANY = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 513]


def filled(scheme="awq4", n=N, k=K, *, seed=0, device="cuda", **options):
    options.setdefault("bias", any(t.role == "bias" for t in qdsl.load(scheme).output.tensors))
    layer = QuantLinear(scheme, k, n, device=device, **options)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(seed), n, k)
    if not options["bias"]:
        patterns = {name: p for name, p in patterns.items() if layer.scheme.tensor(name).role != "bias"}
    return layer.set_patterns(patterns), patterns


def inputs(layer, m, seed=1):
    return torch.randn(m, layer.in_features, generator=torch.Generator().manual_seed(seed)).to(
        layer.device, layer.dtype
    )


def check(layer, patterns, x, y):
    expected = reference.linear(
        layer.scheme,
        x.double().cpu().numpy(),
        patterns,
        layer.out_features,
        precision=layer.manifest.precision,
    )
    assert (np.abs(y.double().cpu().numpy() - expected.y) <= expected.bound).all()


@pytest.mark.parametrize(
    ("scheme", "params"), USED, ids=lambda v: Path(v).stem if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_any_number_of_rows(scheme, params):
    layer, patterns = filled(scheme, **params)
    assert layer.dtype == TYPES[params["act"]]
    for m in (*MANY, *reversed(MANY)):
        x = inputs(layer, m)
        check(layer, patterns, x, layer(x))


@pytest.mark.parametrize(("n", "k"), [(1, 128), (7, 136), (40, 192), (80, 320), (320, 1344), (64, 4304)])
def test_awkward_sizes(n, k):
    layer, patterns = filled(n=n, k=k)
    for m in (1, 5, 17, 130):
        x = inputs(layer, m)
        check(layer, patterns, x, layer(x))


def test_one_hot_rows_read_the_weights_back():
    layer, _ = filled(bias=False)
    y = layer(torch.eye(K, dtype=HALF, device="cuda"))
    assert torch.equal(y.T, layer.dequantize(HALF))


def test_no_rows_and_then_some():
    layer, _ = filled()
    assert layer(torch.empty(0, K, dtype=HALF, device="cuda")).shape == (0, N)
    assert layer(torch.empty(2, 0, K, dtype=HALF, device="cuda")).shape == (2, 0, N)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum() == 3


def test_views():
    layer, _ = filled()
    big = torch.randn(64, 2 * K, device="cuda").half()
    for view in (big[::2, :K], big[:, ::2], big[3:4, :K], big.as_strided((1, K), (999, 1)), big.view(-1)[1 : K + 1]):
        assert torch.equal(layer(view), layer(view.contiguous().clone()))


def test_zero_input_returns_the_bias():
    for kind in (HALF, BF16):
        layer, _ = filled(dtype=kind)
        for m in (1, 16, 300):
            assert torch.equal(layer(torch.zeros(m, K, dtype=kind, device="cuda")), layer.bias.to(kind).expand(m, N))


def test_changing_the_type_keeps_the_bits():
    layer, patterns = filled(bias=False)
    x = inputs(layer, 5)
    y, weight = layer(x), layer.dequantize()
    layer.bfloat16()
    assert torch.equal(layer.dequantize(), weight)
    check(layer, patterns, x.bfloat16(), layer(x.bfloat16()))
    assert torch.equal(layer.half()(x), y)
    with torch.autocast("cuda", BF16):
        assert layer(x.float()).dtype == BF16


# ---- bits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "k"), [(N, K), (40, 192), (320, 1344), (64, 4304), (4096, 4096), (1024, 14336)])
@pytest.mark.parametrize("kind", [HALF, BF16])
def test_batch_invariant_rows_have_the_bits_they_have_alone(kind, n, k):
    layer, _ = filled(n=n, k=k, dtype=kind, batch_invariant=True)
    x = inputs(layer, 300)
    alone = torch.cat([layer(row[None]) for row in x])
    for m in range(1, 301):
        assert torch.equal(layer(x[:m]), alone[:m]), m
    x[::2] = 100
    assert torch.equal(layer(x)[1::2], alone[1::2])


@pytest.mark.parametrize(("scheme", "params"), [u for u in USED if u[1]["act"] != "f32"], ids=str)
def test_every_scheme_can_be_batch_invariant(scheme, params):
    layer, _ = filled(scheme, batch_invariant=True, **params)
    x = inputs(layer, 257)
    alone = torch.cat([layer(row[None]) for row in x])
    for m in (m for m in MANY if m <= 257):
        assert torch.equal(layer(x[:m]), alone[:m]), m


@pytest.mark.parametrize("params", [{"act": "f16"}, {"act": "bf16"}, {"act": "f16", "group": "k"}], ids=str)
def test_variants_of_equal_order_give_equal_bits(params):
    """What `Variant.order` promises, for every kernel in the artifact."""
    for n, k in ((N, K), (80, 320), (320, 1344), (512, 4096)):
        layer, _ = filled(n=n, k=k, **params)
        legal = layer.kernel.variants(k)
        variants = layer.manifest.variants[layer.kernel.arch][layer.kernel.phase]
        orders = {v.name: v.order for v in variants if v.name in legal and v.order is not None}
        for m in (1, 7, 33, 130):
            x, found = inputs(layer, m), {}
            for name, order in orders.items():
                y = torch.full((m, n), float("nan"), dtype=layer.dtype, device="cuda")
                layer.run_into(x, y, variant=name)
                assert torch.equal(y, found.setdefault(order, y)), (name, order, m, n, k)


def test_every_variant_is_right():
    layer, patterns = filled(n=80, k=320)
    for name in layer.kernel.variants(320):
        for m in (1, 5, 17, 130):
            x, y = inputs(layer, m), torch.full((m, 80), float("nan"), dtype=HALF, device="cuda")
            layer.run_into(x, y, variant=name)
            check(layer, patterns, x, y)


@pytest.mark.parametrize(("m", "k"), [(2, 4096), (40, 4096), (300, 4096), (130, 4352)])
def test_every_variant_gives_the_same_bits_again_and_again(m, k):
    """Enough parts for every SM, and rings that go around many times: a slot read too early or filled too early shows.

    K = 4352 is an odd number of stages of 256: the next part begins where a team has had one more than the other.
    """
    n = 14336
    torch.manual_seed(0)
    random = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=HALF)
    layer = QuantLinear.from_float(random, "awq4")
    x = torch.randn(m, k, dtype=HALF, device="cuda")
    truth = x.double() @ layer.dequantize(torch.float64).cuda().t()
    for name in layer.kernel.variants(k):
        first, y = (torch.empty(m, n, dtype=HALF, device="cuda") for _ in range(2))
        layer.run_into(x, first, variant=name)
        assert (first.double() - truth).norm() < 2e-3 * truth.norm(), name
        for _ in range(30):
            y.fill_(float("nan"))
            layer.run_into(x, y, variant=name)
            assert torch.equal(first, y), name


@pytest.mark.parametrize("m", [1, 40, 257])
def test_the_last_step_multiplies_what_the_first_has_left(m):
    layers = [filled("w8a8_dynamic", seed=seed, act="bf16")[0] for seed in (0, 1)]
    x = inputs(layers[0], m)
    right, y = [layer(x) for layer in layers], torch.empty(m, N, dtype=BF16, device="cuda")
    last = layers[0].last_step(x, y)
    x.zero_()  # nothing is quantized any more
    for layer, expected in reversed([*zip(layers, right)]):
        last(layer)
        assert torch.equal(y, expected)


def test_by_default_equal_calls_give_equal_bits():
    layer, _ = filled(n=4096, k=4096)
    for m in (1, 4, 16, 64, 257):
        x = inputs(layer, m)
        y = layer(x)
        assert all(torch.equal(layer(x), y) for _ in range(50))


# ---- graphs and streams ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("m", [1, 4, 64, 300])
def test_a_captured_graph_replays_what_eager_computes(m):
    layer, _ = filled()
    layer.prepare()
    x = inputs(layer, m)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    other = inputs(layer, m, seed=7)
    eager = layer(other)
    for given, wanted in ((x.clone(), expected), (other, eager)):
        x.copy_(given)
        graph.replay()
        assert torch.equal(y, wanted)
    # new weights go where the old ones were, so the graph sees them
    layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(5), N, K))
    graph.replay()
    assert torch.equal(y, layer(x))


def test_the_first_call_of_all_inside_a_capture_is_a_clear_error():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_gpu, torch, qdsl\n"
        "layer, _ = test_gpu.filled()\n"
        "x = test_gpu.inputs(layer, 4)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "try:\n"
        "    with torch.cuda.graph(graph):\n"
        "        layer(x)\n"
        "except qdsl.Error as problem:\n"
        "    assert 'prepare()' in str(problem)\n"
        "    sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, Path(__file__).parent], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,  # in the repository's root, Python would take the folder qdsl/ for the package
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


def test_work_goes_to_the_current_stream():
    layer, _ = filled()
    x = inputs(layer, 16)
    expected = layer(x)
    slow = torch.randn(4096, 4096, device="cuda")
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            slow = slow @ slow * 1e-3
        late.copy_(x)  # only after the slow work; a launch on another stream would read zeros
        y = layer(late)
    side.synchronize()
    assert torch.equal(y, expected)


# ---- devices -----------------------------------------------------------------------------------------------------
def test_moving_between_devices_is_lossless():
    layer, patterns = filled(dtype=HALF)
    x = inputs(layer, 9)
    y, exact = layer(x), layer.dequantize().cpu()
    layer.cpu()
    assert layer.q.device.type == "cpu" and layer.manifest.kind == "cpu"
    assert torch.equal(layer.dequantize(), exact)
    check(layer, patterns, x.cpu(), layer(x.cpu()))
    layer.cuda()
    assert torch.equal(layer(x), y)
    with pytest.raises(ValueError, match="x is on cpu, the layer on cuda"):
        layer(x.cpu())


def test_copies():
    layer, _ = filled()
    x = inputs(layer, 5)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    on_cpu = QuantLinear("awq4", K, N, True, dtype=HALF)
    on_cpu.load_state_dict(layer.state_dict())  # another layout: repacked
    assert torch.equal(on_cpu.dequantize(), layer.dequantize().cpu())
    back = QuantLinear("awq4", K, N, True, device="cuda")
    back.load_state_dict(on_cpu.state_dict())
    assert torch.equal(back(x), y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_on_the_second_device():
    layer, _ = filled()
    x = inputs(layer, 5)
    y = layer(x)
    other = copy.deepcopy(layer).to("cuda:1")
    assert torch.cuda.current_device() == 0
    z = other(x.to("cuda:1"))
    assert z.device == torch.device("cuda:1") and torch.equal(z.cpu(), y.cpu())
    assert torch.equal(other.to("cuda:0")(x), y)
    with pytest.raises(ValueError, match="cuda:1"):
        layer(x.to("cuda:1"))


# ---- torch -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [HALF, BF16])
def test_the_gradient_is_that_of_the_dequantized_layer(kind):
    layer, _ = filled(dtype=kind)
    x = inputs(layer, 40).requires_grad_()
    upstream = torch.randn(40, N, device="cuda").to(kind)
    layer(x).backward(upstream)
    expected = upstream.double() @ layer.dequantize()
    scale = upstream.double().abs() @ layer.dequantize().abs()
    assert ((x.grad.double() - expected).abs() <= 2 * torch.finfo(kind).eps * scale).all()


def test_torch_compile_with_dynamic_rows():
    torch._dynamo.reset()
    layer, _ = filled()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 7, 64, 300):
        x = inputs(layer, m)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("name", ["awq_g128", "awq_gemv_g128"])
def test_a_checkpoint_on_the_gpu_agrees_with_the_cpu(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(DATA / name)

    def model(device, kind):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
        return load_quantized(made, DATA / name, device=device)

    tokens = torch.arange(24)[None] * 19 % 512
    with torch.inference_mode():
        expected = model("cpu", torch.float32)(tokens).logits
        found = model("cuda", HALF)(tokens.cuda()).logits.float().cpu()
    # everything between the layers is in f16 too: single logits move further than their norm
    assert (found - expected).norm() <= 2e-3 * expected.norm()


# ---- index range -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "n", "k"), [(32768, 65536, 128), (65537, 128, 128), (1, 250880, 128)])
def test_large_indices(m, n, k):
    """m * n reaches 2^31, m passes the limit of a grid's second axis, n is a large vocabulary."""
    if torch.cuda.mem_get_info()[0] < 3 * 2 * (m * n + m * k):
        pytest.skip("needs more GPU memory")
    layer, patterns = filled(n=n, k=k, bias=False)
    x = inputs(layer, m)
    y = layer(x)
    rows = [0, m // 2, m - 1]
    check(layer, patterns, x[rows], y[rows])


def prebuild(directory: Path, archs: list[str]) -> None:
    """Compile what this file uses, for CUDA and for the CPU it compares with."""
    for scheme, params in (*USED, ("w8a16", {})):  # the last for test_gpu_sizes.py
        loaded = qdsl.load(scheme, **params)
        name = "-".join(map(str, [Path(scheme).stem, *params.values()]))
        qdsl.compile(loaded, "cuda", archs, out=directory / f"{name}-cuda")
    for params in ({"act": "f16"}, {"act": "f32"}):
        qdsl.compile(qdsl.load("awq4", **params), "cpu", out=directory / f"awq4-{params['act']}-cpu")


if __name__ == "__main__":
    prebuild(Path(sys.argv[1]), sys.argv[2:] or ["sm_80", "sm_90a"])
