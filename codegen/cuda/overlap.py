"""Overlapping a kernel with the one before it on its stream: programmatic dependent launch, from sm_90 on.

A kernel launched so (`host`) may start while its predecessor's last CTAs still run: its own CTAs move in as room gets
free, set up barriers and shared memory, fill their rings with codes, scales and zeros, and wait. In a chain of such kernels
each pays a microsecond or two less, and the memory is not idle while one ends and the next begins.

What the predecessor wrote is visible after `wait` only: x, what the epilogue adds, and what y overwrites is not touched
before. Weights are: they do not change between products, and whoever changes them waits until that is done
(`QuantLinear`). Every CTA waits, and a kernel has ended when all of its CTAs have: so whoever has waited for its predecessor
has waited for all that ran before. A product lets its successor in after its own `wait`, when it has all the room it needs.
What prepares x for a product is small, and lets it in before: so the product asks for its weights while the product before
still runs.
"""

from __future__ import annotations

from qdsl.codegen.cuda.builder import ptx


def wait():
    """Wait for the predecessor, whole."""
    ptx("griddepcontrol.wait")


def let_in():
    """Let the successor's CTAs in, once every CTA has said so."""
    ptx("griddepcontrol.launch_dependents")
