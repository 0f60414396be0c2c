"""Memory of packed weights on huge pages, where the CPU looks up one address for 2 MiB instead of 512.

One token reads every weight once, and with pages of 4 KiB it waits for page tables.  Linux gives huge pages to aligned
memory for which it is asked before the first write; it need not, and then the memory is as any other.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

HUGE = 2 << 20  # bytes of a huge page


def zeros(shape: Sequence[int], kind: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """As torch.zeros; on a CPU what fills a huge page, or most of one, lies there."""
    size = math.prod(shape) * kind.itemsize
    pages = (size + HUGE // 2) // HUGE  # what is beyond the last one may be less than half of another
    real = type(torch.empty(0, device=device)) is torch.Tensor  # and not a fake one
    if not pages or not real or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=kind, device=device)
    # Private: shared anonymous memory is a file to Linux, and huge pages for files are another setting.
    memory = mmap.mmap(-1, max(size, pages * HUGE) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(kind).reshape(tuple(shape))


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that will be read often: itself, or a copy where that can lie on huge pages and it does not.

    Memory that processes share stays what it is.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < HUGE // 2 or tensor.data_ptr() % HUGE == 0 or tensor.is_shared():
        return tensor
    return zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
