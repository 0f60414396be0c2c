"""A layer's buffers: what they hold, whether two hold the same, and how they move.  A `Buffer` says what the bits mean."""

from __future__ import annotations

import torch

from qdsl.dtype import DType
from qdsl.layout import Layout, plain
from qdsl.manifest import Buffer
from qdsl.runtime import repack
from qdsl.scheme import Tensor


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


def same_bits(held: Buffer, wanted: Buffer) -> bool:
    """Whether two buffers hold the same bits in the same places."""
    if held.dtype != wanted.dtype:
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
    tensor: torch.Tensor, held: Buffer, wanted: Buffer, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The same elements in another layout on another device, bit for bit."""
    if device.type == "meta":
        return torch.empty(wanted.layout.stored_shape(shape), dtype=torch_type(wanted), device=device)
    if same_bits(held, wanted):
        return tensor.to(device)
    patterns = held.layout.unpack(repack.bits_of(tensor), shape)
    return repack.tensor_of(wanted.layout.pack(patterns), torch_type(wanted)).to(device)
