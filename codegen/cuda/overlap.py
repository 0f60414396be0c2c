"""Overlapping a kernel with the one before it on its stream: programmatic dependent launch, from sm_90 on.

A kernel launched so (`host`) may start while its predecessor's last CTAs still run: its own CTAs move in as room gets
free, set up barriers and shared memory, and wait. In a chain of such kernels each pays about a microsecond less. What
the predecessor wrote, weights included, is visible after the wait only, so nothing is read before it. But a CTA that
found room may ask for its first weights in the L2 cache: that delivers nothing, so it can't deliver anything stale, and
the memory is busy while the predecessor ends.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import ptx, when, wide
from qdsl.codegen.cuda.kernel import Kernel


def prefetch(k: Kernel, tiles: int):
    """Ask for that many k tiles of the CTA's codes, from the first of its share on: one request for 16 features."""
    first, end = k.share[0], tirx.min(k.share[1], k.k_tiles)
    with when(tirx.all(k.thread < k.tile.features // 16, k.o0 + k.thread < k.o_tiles, first < end)):
        source = k.q.ptr_to([wide(k.o0 + k.thread), wide(first), T.int64(0), T.int64(0)])
        size = T.cast(tirx.min(end - first, tiles) * 512, "uint32")
        ptx("cp.async.bulk.prefetch.L2.global", source, size)


def wait():
    """Wait for the predecessor, whole, and then let the successor's CTAs in."""
    ptx("griddepcontrol.wait")
    ptx("griddepcontrol.launch_dependents")
