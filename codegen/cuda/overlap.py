"""Overlapping a kernel with the one before it on its stream: programmatic dependent launch, from sm_90 on.

A kernel launched so (`host`) may start while its predecessor's last CTAs still run: its own CTAs move in as room gets
free, set up barriers and shared memory, fill their rings with codes, scales and zeros, and wait. In a chain of such kernels
each pays a microsecond or two less, and the memory is not idle while one ends and the next begins.

What the predecessor wrote is visible after `wait` only: x, what the epilogue adds, and what y overwrites is not touched
before. Weights are: they do not change between products, and whoever changes them waits until that is done
(`QuantLinear`). A kernel lets its successor in only after its own `wait`, so that whatever ran before its predecessor has
ended, for everyone.
"""

from __future__ import annotations

from qdsl.codegen.cuda.builder import ptx


def wait():
    """Wait for the predecessor, whole."""
    ptx("griddepcontrol.wait")


def let_in():
    """Let the successor's CTAs in, once every CTA has said so; after `wait`."""
    ptx("griddepcontrol.launch_dependents")
