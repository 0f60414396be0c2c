"""QuantLinear under torch.compile, torch.export and the operator checks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl import reference
from qdsl.runtime import QuantLinear, op

K, N = 96, 64
OPERATOR = torch.ops.qdsl.linear.default


def filled(scheme="awq4", k=K, n=N, seed=0, **options):
    layer = QuantLinear(scheme, k, n, True, dtype=torch.float32, **options)
    return layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(seed), n, k))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("scheme", ["awq4", "w8a8_dynamic", "gptq_actorder"])
def test_one_graph_for_every_number_of_rows(scheme):
    layer, counter = filled(scheme), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for m in (1, 2, 7, 64, 5, 9, 33, 128, 3, 17):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count <= 2
    assert compiled(torch.empty(0, K)).shape == (0, N)


def test_marking_rows_dynamic_gives_one_graph():
    layer, counter = filled(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m in (3, 7, 64):
        x = torch.randn(m, K)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = filled(), filled(k=N, n=K, group=32)
        self.a, self.b = nn.Linear(K, 4, False), nn.Linear(4, K, False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.b(self.a(x))


def test_inductor_forward_and_backward_beside_trained_layers():
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for shape in ((3, K), (2, 5, K)):
        grads = []
        for run in (block, compiled):
            x = torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape).requires_grad_()
            block.zero_grad()
            y = run(x)
            y.square().sum().backward()
            grads.append((y.detach(), x.grad, block.a.weight.grad, block.b.weight.grad))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-4)


def test_autocast_inside_a_graph():
    layer = filled()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        found = compiled(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_a_graph_sees_new_weights():
    layer = filled()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, K)
    before = compiled(x)
    layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(9), N, K))
    after = compiled(x)
    assert not torch.equal(before, after) and torch.equal(after, layer(x))


def test_export():
    layer = filled()
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(layer, (torch.randn(3, K),), dynamic_shapes=({0: rows},))
    for m in (1, 8):
        x = torch.randn(m, K)
        assert torch.equal(program.module()(x), layer(x))


def test_the_operator_passes_torchs_own_checks():
    layer = filled()
    operands = [layer.get_buffer(name) for name in layer._operands[torch.float32]]
    for x in (torch.randn(3, K), torch.randn(2, 3, K), torch.randn(3, K, requires_grad=True)):
        torch.library.opcheck(OPERATOR, (x, operands, N, layer.kernel.key))


def test_buffers_may_be_swapped_functionally():
    layer, other = filled(), filled(seed=5)
    x = torch.randn(3, K)
    state = dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(layer, state, (x,)), other(x))
    assert not torch.equal(layer(x), other(x))


def test_fake_tensors_have_the_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = filled()
    operands = [layer.get_buffer(name) for name in layer._operands[torch.float32]]
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = op.linear(torch.empty(2, 5, K), operands, N, layer.kernel.key)
    assert y.shape == (2, 5, N) and y.dtype == torch.float32


# ---- who sees the operator ---------------------------------------------------------------------------------------
class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        self.calls.append(called)
        return called(*args, **(kwargs or {}))


class Mine(torch.Tensor):
    seen: list = []

    @classmethod
    def __torch_function__(cls, called, types, args=(), kwargs=None):
        cls.seen.append(called)
        return super().__torch_function__(called, types, args, kwargs)


def test_modes_transforms_tracers_and_profilers_see_the_operator():
    layer, x = filled("w8a8_dynamic"), torch.randn(2, K)
    y = layer(x)
    with Seen() as mode:
        layer(x)
    assert mode.calls == [OPERATOR]
    with torch.profiler.profile() as profile:
        assert torch.equal(layer(x), y)
    assert "qdsl::linear" in {event.key for event in profile.key_averages()}
    graph = make_fx(layer)(x)
    assert OPERATOR in {node.target for node in graph.graph.nodes}
    assert torch.equal(layer(x.as_subclass(Mine)), y) and OPERATOR in Mine.seen
    with pytest.raises(RuntimeError, match="qdsl::linear"):
        torch.vmap(layer)(x)


def test_nobody_looking_the_kernel_is_called_at_once(monkeypatch):
    layer, x = filled(), torch.randn(2, K)
    wanted = layer(x)
    monkeypatch.setattr(torch.ops.qdsl.linear, "default", None)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(layer(x), wanted)
    with torch.no_grad():
        assert torch.equal(layer(x.clone().requires_grad_()), wanted)
        assert torch.equal(layer(nn.Parameter(x).data), wanted)
    with pytest.raises(TypeError, match="not callable"):
        layer(x.requires_grad_())


def test_calls_for_one_token_share_their_room_and_nothing_else():
    one, two = filled("w8a8_dynamic"), filled("w8a8_dynamic", seed=1)
    x = torch.randn(3, K)
    with torch.inference_mode():
        apart = [layer(row[None]) for layer in (one, two) for row in x]
    together = [row[None] for layer in (one, two) for row in layer(x)]
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda at: (one, two)[at // 3](x[at % 3][None]), [*range(6)] * 50))
    assert all(torch.equal(a, b) for a, b in zip(again, together * 50, strict=True))
