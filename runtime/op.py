"""The torch operator behind every layer: qdsl::linear(x, buffers, n, key) -> y, and its gradient to x.

Registered with torch.library.Library and an Autograd function of its own; the `custom_op` decorator costs three times as
much per call.  A key names a kernel of this process (`qdsl.runtime.artifact`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch.autograd import profiler

from qdsl.diagnostic import Error
from qdsl.order import SOURCE
from qdsl.runtime.artifact import ALIGNMENT, Kernel, kernel
from qdsl.scheme import Scheme
from qdsl.slope import in_units_of_the_model, is_affine

_LIBRARY = torch.library.Library("qdsl", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor[] buffers, SymInt n, str key) -> Tensor")
_LIBRARY.define("input_grad(Tensor grad, Tensor[] buffers, SymInt k, str key) -> Tensor")

_CHUNK = 1 << 24  # weights dequantized at a time for a gradient


def rows(x: torch.Tensor) -> torch.Tensor:
    """x as the [m, k] that kernels take: contiguous, aligned, with the strides of its shape even where a size is 1."""
    shape = x.shape
    k = shape[-1]
    if len(shape) != 2:
        x = x.reshape(-1, k)
    if x.stride() != (k, 1):
        x = x.contiguous()
        if x.stride() != (k, 1):  # torch calls any stride of a size-1 axis contiguous
            x = x.as_strided(x.shape, (k, 1))
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _linear(x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int, key: str) -> torch.Tensor:
    return multiplied(kernel(key), x, buffers, n)


def multiplied(known: Kernel, x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """y [..., n] for x [..., k], whatever its strides, by a kernel."""
    shape = x.shape
    if 0 in shape:
        return x.new_empty((*shape[:-1], n))
    y = known(rows(x), buffers, n)
    return y if len(shape) == 2 else y.view((*shape[:-1], n))


def _input_grad(grad: torch.Tensor, buffers: Sequence[torch.Tensor], k: int, key: str) -> torch.Tensor:
    """dX = dY·W with the dequantized W, in float32 sums, rounded once to the type of dY."""
    known, n = kernel(key), grad.shape[-1]
    flat = grad.reshape(-1, n)
    if flat.shape[0] == 0:
        return grad.new_zeros((*grad.shape[:-1], k))
    quick = grad.is_cuda and not known.scheme.activations and in_units_of_the_model(known.scheme) is known.scheme
    part = _weight_through_kernel if quick else _weight_on_host
    out = grad.new_empty((flat.shape[0], k))
    for start, weight in part(known, buffers, n, k, grad):  # weight: columns from `start`, [n, some of k]
        out[:, start : start + weight.shape[1]] = flat @ weight
    return out.view(*grad.shape[:-1], k)


def _weight_through_kernel(known: Kernel, buffers: Sequence[torch.Tensor], n: int, k: int, like: torch.Tensor):
    """The layer's answer to unit vectors is its weight, rounded once: no copy to the host, no second decoder."""
    given = [
        torch.zeros_like(b) if name != SOURCE and known.scheme.tensor(name).role == "bias" else b
        for name, b in zip(known.names, buffers)
    ]
    step = max(1, min(k, _CHUNK // max(n, k)))
    for start in range(0, k, step):
        count = min(step, k - start)
        unit = like.new_zeros((count, k))
        unit[torch.arange(count, device=like.device), torch.arange(start, start + count, device=like.device)] = 1
        yield start, known(unit, given, n).T


def _weight_on_host(known: Kernel, buffers: Sequence[torch.Tensor], n: int, k: int, like: torch.Tensor):
    from qdsl.runtime.weight import decoded, patterns

    scheme = in_units_of_the_model(known.scheme)
    exact = decoded(scheme, patterns(scheme, dict(zip(known.names, buffers)), known.buffers, n, k), n, k)
    yield 0, torch.from_numpy(exact).to(like.device, like.dtype)


def bent(scheme: Scheme) -> str:
    """Why a layer of this scheme is not y = x·Wᵀ + bias, apart from rounding, so that dX = dY·W is not its gradient; empty
    where it is.

    Rounding of activations passes the gradient straight through, as is usual in training with quantized activations.
    """
    if scheme.experts:
        return "it has experts"
    if not is_affine(scheme.output.value, "acc") or any(t.role == "residual" for t in scheme.output.tensors):
        return f"its output is `{scheme.output.value}`, which is not `acc` times something plus something"
    if any(a.transforms for a in scheme.activations):
        return "it transforms x before quantizing"
    return ""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffers, n, key):
        scheme = kernel(key).scheme
        if reason := bent(scheme):
            raise Error(f"{scheme.bound} can't pass a gradient to x yet: {reason}; call it under torch.no_grad()")
        ctx.buffers, ctx.k, ctx.key = buffers, x.shape[-1], key
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.qdsl.linear(x, buffers, n, key)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.qdsl.input_grad(grad, ctx.buffers, ctx.k, ctx.key), None, None, None


# What is left of a dispatch below autograd when nothing but the device's own kernel is to come.
_PLAIN = {torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)}


def _linear_autograd(keys, x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int, key: str) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _Linear.apply(x, buffers, n, key)
    rest = keys & torch._C._after_autograd_keyset
    if rest.raw_repr() in _PLAIN:  # no tracing, no fake tensors: a second dispatch would only cost its 5 µs
        return _linear(x, buffers, n, key)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.qdsl.linear.default.redispatch(rest, x, buffers, n, key)


def _input_grad_autograd(grad: torch.Tensor, buffers: Sequence[torch.Tensor], k: int, key: str) -> torch.Tensor:
    if grad.requires_grad and torch.is_grad_enabled():
        raise Error("a QuantLinear has no second derivative: its gradient can't itself be differentiated")
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.qdsl.input_grad.default(grad, buffers, k, key)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", _linear, _device)
    _LIBRARY.impl("input_grad", _input_grad, _device)
_LIBRARY.impl("linear", _linear_autograd, "Autograd", with_keyset=True)
_LIBRARY.impl("input_grad", _input_grad_autograd, "Autograd")


@torch.library.register_fake("qdsl::linear", lib=_LIBRARY)
def _linear_fake(x, buffers, n, key):
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("qdsl::input_grad", lib=_LIBRARY)
def _input_grad_fake(grad, buffers, k, key):
    return grad.new_empty((*grad.shape[:-1], k))


# Of a dense tensor on the CPU and a thread in which no mode, transform, subclass or tracer waits for calls of operators.
_UNSEEN = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()
        for key in ("CPU", "AutogradCPU", "AutocastCPU", "ADInplaceOrView", "BackendSelect")
    ),
)
_is_compiling, _keys_of = torch.compiler.is_compiling, torch._C._dispatch_keys
_keys_of_thread, _is_grad_enabled = torch._C._dispatch_tls_local_include_set, torch.is_grad_enabled


def unseen(x: torch.Tensor) -> bool:
    """Whether nobody but the kernel would see a call of the operator on the CPU, which torch takes 6 to 16 µs for.

    That is plain x and a plain thread: nothing is traced or profiled, and no gradient is wanted.  After weights have passed
    through the caches, each thing that torch is asked takes some 5 µs, so nothing is asked twice.
    """
    if _is_compiling() or type(x) is not torch.Tensor or (x.requires_grad and _is_grad_enabled()):
        return False
    seen = (_keys_of(x).raw_repr() | _keys_of_thread().raw_repr()) & ~_UNSEEN
    return not (seen or profiler._is_profiler_enabled)


def linear(x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int, key: str) -> torch.Tensor:
    """The operator; or what it comes to, at once, where nobody would see the call."""
    return _linear(x, buffers, n, key) if unseen(x) else torch.ops.qdsl.linear.default(x, buffers, n, key)
