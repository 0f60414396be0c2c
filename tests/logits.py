"""How far the logits of a quantized model may be from those of its dequantized form, derived from its layers' bounds.

The model runs twice, all but the quantized layers in float64. Kernels compute it, and it is computed exactly: a layer of
float activations is then its dequantized weight, and one that quantizes activations is its scheme's equations, for the
x that reached the kernel, so that codes next to a tie are those of the kernel. What reaches such a layer in the exact run
is compared as logits are: then the kernel's codes are right for it, too.

With b the bound of a layer's output and J the derivatives by it, what comes after is off by no more than the sum of
|J|·b over the layers, to the first order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from qdsl import reference
from qdsl.runtime import QuantLinear, QuantStack
from qdsl.runtime.buffer import float_format, unpacked
from qdsl.runtime.repack import format_of

SECOND_ORDER = 0.01  # of the first; `_bends` sees less
AT_ONCE = 512  # rows of derivatives

Layers = dict[str, QuantLinear | QuantStack]
Call = tuple  # (a layer's name,), or with the number of an expert


def quantized(model: torch.nn.Module) -> Layers:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear | QuantStack)}


def held(layer: QuantLinear) -> dict[str, np.ndarray]:
    """The bit patterns of every tensor of a layer, in its declared type."""
    found = {}
    for name, declared in layer._wanted.items():
        buffer = layer._held[name]
        found[name] = unpacked(buffer, declared, layer._buffers[name], layer._shape(name), layer._inputs)
        if layer._follows(declared):
            found[name] = declared.dtype.encode(float_format(buffer).decode(found[name]))
    return found


def shares_of_bounds(model: torch.nn.Module, tokens: torch.Tensor) -> dict[Call, float]:
    """The largest error over bound, of ("logits",) and of what reaches each call of a layer that quantizes it; a right
    model has none above 1.

    The model's parameters are float64 from then on, except the quantized ones.
    """
    layers = quantized(model)
    model.set_attn_implementation("eager")  # the derivatives of others do not come in batches
    for module in set(model.modules()) - set(layers.values()):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.double()
    with _Double():
        inputs: dict[Call, torch.Tensor] = {}
        with torch.no_grad(), _calling(layers, lambda name, layer: _recorded(name, layer, layer.forward, inputs)):
            found = model(tokens, use_cache=False).logits
        exact = _Exact(inputs)
        with _calling(layers, exact.layer):
            logits = model(tokens, use_cache=False).logits
            limit, corner = exact.reach(logits)
            bends = _bends(exact.moved(model, tokens, corner) - logits.detach(), limit)
            assert bends < SECOND_ORDER, f"the bounds of the layers are too large for a first order: {bends}"
    shares = {call: _share(inputs[call] - x, exact.reach(x)[0] + _rounding(x)) for call, x in exact.quantized.items()}
    return shares | {("logits",): _share(found - logits, limit)}


def _share(error: torch.Tensor, bound: torch.Tensor) -> float:
    return float((error.detach().abs() / ((1 + SECOND_ORDER) * bound)).max())


def _bends(moved: torch.Tensor, limit: torch.Tensor) -> float:
    """How far the logit of the largest bound is from it, as a part of it, where all outputs are moved to make it so."""
    at = limit.argmax()
    return float((moved.flatten()[at] / limit.flatten()[at] - 1).abs())


def _rounding(x: torch.Tensor) -> torch.Tensor:
    """Of float64 to the type of a layer's x."""
    return format_of(torch.float32).unit * x.detach().abs()


@contextmanager
def _calling(layers: Layers, forward_of: Callable) -> Iterator[None]:
    known = {name: layer.__dict__.get("forward") for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.forward = forward_of(name, layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            del layer.forward
            if known[name] is not None:
                layer.forward = known[name]


def _recorded(name: str, layer: QuantLinear | QuantStack, run: Callable, inputs: dict[Call, torch.Tensor]) -> Callable:
    def forward(x: torch.Tensor, *e: int) -> torch.Tensor:
        x = x.type(layer.dtype)
        inputs[name, *e] = x.type(torch.float64)
        return run(x, *e).type(torch.float64)

    return forward


class _Exact:
    """The exact run, and what its results may be off by.

    inputs      what reached the kernels
    quantized   what reaches, in this run, the layers that quantize it
    outputs     of every call: what is added to it, and its bound
    """

    def __init__(self, inputs: dict[Call, torch.Tensor]):
        self.inputs = inputs
        self.quantized: dict[Call, torch.Tensor] = {}
        self.outputs: dict[Call, tuple[torch.Tensor, torch.Tensor]] = {}
        self.results: dict[Call, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}

    def layer(self, name: str, layer: QuantLinear | QuantStack) -> Callable:
        def forward(x: torch.Tensor, *e: int) -> torch.Tensor:
            call, one = (name, *e), layer.member(*e) if e else layer
            if call not in self.results:
                self.results[call] = _result(one, self.inputs[call])
            y, weight, bound = self.results[call]
            if weight is None:
                self.quantized.setdefault(call, x)
            else:
                y = y + (x - self.inputs[call]) @ weight.T
            move, _ = self.outputs.setdefault(call, (torch.zeros_like(y, requires_grad=True), bound))
            return y + move

        return forward

    def reach(self, out: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(the sum of |J|·b for each element, the moves within b that shift the one of the largest sum by it)."""
        moves, bounds = zip(*self.outputs.values())
        flat, total = out.flatten(), torch.zeros(out.numel(), dtype=torch.float64)
        corner = [torch.zeros_like(bound) for bound in bounds]
        if not out.requires_grad:
            return total.reshape(out.shape), corner
        for rows in torch.eye(len(flat), dtype=torch.float64).split(AT_ONCE):
            slopes = torch.autograd.grad(flat, moves, rows, retain_graph=True, is_grads_batched=True, allow_unused=True)
            at = rows.argmax(1)
            for slope, bound in zip(slopes, bounds):
                if slope is not None:
                    total[at] += slope.abs().flatten(1) @ bound.flatten()
            if total[at].max() == total.max():
                most = total[at].argmax()
                corner = [
                    torch.zeros_like(bound) if slope is None else slope[most].sign() * bound
                    for slope, bound in zip(slopes, bounds)
                ]
        return total.reshape(out.shape), corner

    @torch.no_grad()
    def moved(self, model: torch.nn.Module, tokens: torch.Tensor, moves: list[torch.Tensor]) -> torch.Tensor:
        """The logits where every output of a layer is moved."""
        for (move, _), value in zip(self.outputs.values(), moves):
            move.copy_(value)
        logits = model(tokens, use_cache=False).logits
        for move, _ in self.outputs.values():
            move.zero_()
        return logits


def _result(layer: QuantLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, the weight if y is linear in x, how far a kernel may be from y)."""
    patterns, rows = held(layer), x.flatten(0, -2).numpy()
    expected = reference.linear(layer.scheme, rows, patterns, layer.out_features, phase=layer.phase)
    y, bound = (torch.from_numpy(a).reshape(*x.shape[:-1], -1) for a in (expected.y, expected.bound))
    if layer.scheme.in_phase(layer.phase).activation() is not None:
        return y, None, bound
    weight = torch.from_numpy(reference.decode_weight(layer.scheme, patterns, layer.out_features, x.shape[-1]).copy())
    return y, weight, bound + _rounding(x) @ weight.abs().T


class _Double(TorchFunctionMode):
    """Keeps float64 where a model asks for float32, as norms and softmax do."""

    NARROWING = (torch.Tensor.to, torch.Tensor.float, torch.softmax, torch.nn.functional.softmax)

    def __torch_function__(self, function, types, given=(), named=None):
        named = named or {}
        if function in self.NARROWING:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            given = tuple(torch.float64 if a is torch.float32 else a for a in given)
            named = {name: torch.float64 if a is torch.float32 else a for name, a in named.items()}
        return function(*given, **named)
