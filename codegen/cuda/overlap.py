"""Overlapping a kernel with the one before it on its stream: programmatic dependent launch, from sm_90 on.

A kernel launched so (`host`) may start while its predecessor's last CTAs still run: its own CTAs move in as room gets
free, set up barriers and shared memory, and wait. In a chain of such kernels each pays about a microsecond less. What
the predecessor wrote, weights included, is visible after the wait only, so nothing is read before it.
"""

from __future__ import annotations

from qdsl.codegen.cuda.builder import ptx


def wait():
    """Wait for the predecessor, whole, and then let the successor's CTAs in."""
    ptx("griddepcontrol.wait")
    ptx("griddepcontrol.launch_dependents")
