"""A layer's buffers: what they hold, whether two hold the same, and how they move.  A `Buffer` says what the bits mean.

patterns, as declared --order of inputs--> patterns, as kernels see k --layout--> buffer
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from qdsl.dtype import DType
from qdsl.layout import Layout, plain
from qdsl.manifest import Buffer
from qdsl.order import Inputs, interleaved, separated
from qdsl.runtime import repack
from qdsl.scheme import Scheme, Tensor


def torch_type(buffer: Buffer) -> torch.dtype:
    return getattr(torch, buffer.dtype)


def spelled(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def float_format(buffer: Buffer) -> DType:
    found = repack.format_of(torch_type(buffer))
    assert found is not None, "only floats are kept in a type of their own"
    return found


def plain_buffer(declared: Tensor, kind: str) -> Buffer:
    """Elements in declared order, in their own torch type."""
    bits = getattr(torch, kind).itemsize * 8
    return Buffer(declared.name, kind, plain(len(declared.index), bits))


def unordered(declared: Tensor, like: Buffer) -> Buffer:
    """The same elements in declared order, each in a word of its own."""
    word = torch_type(like).itemsize * 8 if declared.dtype.bits > 8 else 8
    kind = like.dtype if declared.dtype.bits > 8 else "uint8"
    return Buffer(like.tensor, kind, plain(len(declared.index), declared.dtype.bits, word))


def inputs_of(scheme: Scheme, given: Mapping[str, tuple[Buffer, torch.Tensor]], k: int) -> Inputs:
    """The inputs of a layer whose buffers are given; those of index tensors name their groups."""
    groups = {}
    for t in scheme.weight.tensors:
        if t.role == "index" and t.name in given:
            buffer, tensor = given[t.name]
            groups[t.name] = buffer.layout.unpack(repack.bits_of(tensor), (k,))
    return Inputs(k, groups)


def stored_shape(buffer: Buffer, declared: Tensor, shape: tuple[int, ...], inputs: Inputs) -> tuple[int, ...]:
    """Of the buffer of a tensor of a shape."""
    return tuple(buffer.layout.stored_shape(_kernel_shape(buffer, declared, shape, inputs)))


def _kernel_shape(buffer: Buffer, declared: Tensor, shape: tuple[int, ...], inputs: Inputs) -> tuple[int, ...]:
    """Of the patterns in the order of the buffer."""
    if buffer.parts > 1:  # whole blocks of 16
        rows = 16 // buffer.parts
        shape = (-(-shape[0] // buffer.parts // rows) * 16, *shape[1:])
    return buffer.order.runs(inputs).shape(declared, shape) if buffer.order else shape


def packed(buffer: Buffer, declared: Tensor, patterns: np.ndarray, inputs: Inputs) -> torch.Tensor:
    """What the buffer holds for a tensor's bit patterns."""
    patterns = buffer.order.runs(inputs).ordered(declared, patterns) if buffer.order else patterns
    return repack.tensor_of(buffer.layout.pack(interleaved(patterns, buffer.parts)), torch_type(buffer))


def unpacked(
    buffer: Buffer, declared: Tensor, tensor: torch.Tensor, shape: tuple[int, ...], inputs: Inputs
) -> np.ndarray:
    """The inverse: bit patterns of the shape."""
    found = buffer.layout.unpack(repack.bits_of(tensor), _kernel_shape(buffer, declared, shape, inputs))
    found = separated(found, buffer.parts, shape[0]) if buffer.parts > 1 else found
    return buffer.order.runs(inputs).restored(declared, found) if buffer.order else found


def same_bits(held: Buffer, wanted: Buffer) -> bool:
    """Whether two buffers hold the same bits in the same places."""
    if (held.dtype, held.order, held.parts) != (wanted.dtype, wanted.order, wanted.parts):
        return False
    return held.layout == wanted.layout or (_is_plain(held.layout) and _is_plain(wanted.layout))


def _is_plain(layout: Layout) -> bool:
    names = [tuple(d.name for d in dim) for dim in layout.dims]
    return (
        layout.bits == layout.word
        and names == [axis.digits for axis in layout.axes]
        and not any(a.runs for a in layout.axes)
    )


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """Unsigned words as signed ones of the same bits: torch's pickles of CUDA tensors know only the latter (2.11)."""
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


def moved(tensor: torch.Tensor, fn) -> torch.Tensor:
    """fn of a tensor's bytes, so that only what fn does to the device takes effect."""
    raw = tensor.reshape(-1).view(torch.uint8)
    result = fn(raw)
    if result.dtype != raw.dtype:  # module.type(…) casts integers too
        result = raw.to(result.device)
    if result.device == tensor.device and (result.is_meta or result.data_ptr() == raw.data_ptr()):
        return tensor
    return result.view(tensor.dtype).reshape(tensor.shape)


def repacked(
    tensor: torch.Tensor, held: Buffer, wanted: Buffer, declared: Tensor, shape: tuple[int, ...], inputs: Inputs,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """The same elements in another layout on another device, bit for bit."""
    if device.type == "meta":
        return torch.empty(stored_shape(wanted, declared, shape, inputs), dtype=torch_type(wanted), device=device)
    if same_bits(held, wanted):
        return tensor.to(device)
    return packed(wanted, declared, unpacked(held, declared, tensor, shape, inputs), inputs).to(device)
