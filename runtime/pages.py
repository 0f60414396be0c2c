"""Memory of packed weights on huge pages, where the CPU looks up one address for 2 MiB instead of 512.

One token reads every weight once, and with pages of 4 KiB it waits for page tables.  Linux gives huge pages to aligned
memory for which it is asked before the first write; it need not, and then the memory is as any other.  What fills less than
half of a huge page shares one with what is made next: layers of small models are as many as they are small.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

HUGE = 2 << 20  # bytes of a huge page
SMALL = 4 << 10  # and of any other: what is less stays with torch
ALIGNMENT = 64  # of tensors that share a page, as kernels want it


class _Page:
    """The huge page that is being filled.  It goes back to the system with the last tensor on it."""

    def __init__(self) -> None:
        self.lock, self.left = threading.Lock(), 0
        self.known: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address

    def take(self, size: int) -> torch.Tensor:
        """Bytes of it, of zeros; of a new one where it has not so many left."""
        with self.lock:
            if size > self.left:
                self.memory, self.start = _mapped(HUGE, HUGE)
                self.known[torch.frombuffer(self.memory, dtype=torch.uint8, offset=self.start).data_ptr()] = self.memory
                self.left = HUGE
            offset = self.start + HUGE - self.left
            self.left = max(0, self.left - -(-size // ALIGNMENT) * ALIGNMENT)
            return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)


def zeros(shape: Sequence[int], kind: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """As torch.zeros; on a CPU what fills a page lies on a huge one, alone or with others."""
    size = math.prod(shape) * kind.itemsize
    real = type(torch.empty(0, device=device)) is torch.Tensor  # and not a fake one
    if size < SMALL or not real or torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=kind, device=device)
    if size < HUGE // 2:
        taken = _page.take(size)
    else:
        pages = (size + HUGE // 2) // HUGE  # what is beyond the last one may be less than half of another
        memory, start = _mapped(max(size, pages * HUGE), pages * HUGE)
        taken = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    return taken.view(kind).reshape(tuple(shape))


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that will be read often: itself, or a copy where that can lie on huge pages and it does not.

    Memory that processes share stays what it is.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < SMALL or _lies_there(tensor) or tensor.is_shared():
        return tensor
    return zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _lies_there(tensor: torch.Tensor) -> bool:
    at = tensor.data_ptr()
    return at % HUGE == 0 if tensor.nbytes >= HUGE // 2 else at // HUGE * HUGE in _page.known


def _mapped(size: int, huge: int) -> tuple[mmap.mmap, int]:
    """Memory with room for `size` bytes from an aligned place on, which comes with it; the first `huge` on huge pages."""
    # Private: shared anonymous memory is a file to Linux, and huge pages for files are another setting.
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memory, start


_page = _Page()
