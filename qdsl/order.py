"""The inputs in the order of their groups: how k reaches kernels whose every step of 16 inputs must be of one group.

    groups of 24     | 0 .. 23, 8 x nothing | 24 .. 47, 8 x nothing | ...        each group takes a run of 32
    act-order        | 0, 3, 4, 9, ...      | 1, 2, 5, ...          | ...        sorted by the group that `g[k]` names

A run is a group of the kernel: the codes of its inputs side by side, and a scale and a zero of its own. A group of more
inputs than a run has takes several. Where a run has no input, its codes are 0 and so is x, which a kernel brings into
this order before the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qdsl.scheme import Gather, Group, Scheme, Tensor, Var

SOURCE, ORDERED = (
    "x.source",
    "x.ordered",
)  # of every input in this order, where x has it; and x itself. No tensor is named so.


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer: how many, and by name of an index tensor, the group of each. Without the latter: k // group."""

    k: int
    groups: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Order:
    """Inputs sorted by group, in runs.

    index    the tensor that names the group of every input; None: input k is of group k // group
    group    inputs of a run, at most
    padded   inputs that a run takes in a kernel: the next multiple of 16
    """

    index: str | None
    group: int
    padded: int

    def __str__(self) -> str:
        by = f"sorted by {self.index}" if self.index else "in their order"
        padding = f", of {self.group} inputs" if self.group != self.padded else ""
        return f"inputs {by}, in runs of {self.padded}{padding}"

    def runs(self, inputs: Inputs) -> Runs:
        """The runs of a layer's inputs; a group without any has one all the same, which keeps its scale."""
        k, count = inputs.k, -(-inputs.k // self.group)
        of = np.arange(k) // self.group
        if self.index is not None and inputs.groups is not None:
            of = inputs.groups[self.index].astype(np.int64)
        members = np.bincount(of, minlength=count)
        runs = np.maximum(1, -(-members // self.group))
        by_group = np.argsort(of, kind="stable")
        rank = np.arange(k) - np.repeat(np.cumsum(members) - members, members)  # of an input in its group
        first = np.repeat(np.cumsum(runs) - runs, members) * self.padded
        source = np.full(int(runs.sum()) * self.padded, -1, np.int32)
        source[first + rank // self.group * self.padded + rank % self.group] = by_group
        return Runs(source, np.repeat(np.arange(len(runs)), runs))


def ordered(scheme: Scheme, order: Order) -> Scheme:
    """The scheme of a weight whose inputs are in that order: its groups along k are the runs."""

    def tensor(t: Tensor) -> Tensor:
        return replace(t, index=(*t.index[:-1], Group("k", order.padded))) if t.index and _grouped(t) else t

    tensors = tuple(tensor(t) for t in scheme.weight.tensors if t.role != "index")
    return replace(scheme, weight=replace(scheme.weight, tensors=tensors), layouts={})


def interleaved(patterns: np.ndarray, parts: int) -> np.ndarray:
    """Features in blocks of 16 rows, of which each part has as many: gate and up of a feature, say, are rows c and c + 8."""
    if parts == 1:
        return patterns
    rows = 16 // parts
    split = patterns.reshape(parts, -1, *patterns.shape[1:])
    padded = np.pad(split, [(0, 0), (0, -split.shape[1] % rows), *[(0, 0)] * (patterns.ndim - 1)])
    blocks = padded.reshape(parts, -1, rows, *patterns.shape[1:])
    return np.moveaxis(blocks, 0, 1).reshape(-1, *patterns.shape[1:])


def separated(patterns: np.ndarray, parts: int, features: int) -> np.ndarray:
    """The inverse, for so many features of all parts together."""
    if parts == 1:
        return patterns
    blocks = patterns.reshape(-1, parts, 16 // parts, *patterns.shape[1:])
    split = np.moveaxis(blocks, 1, 0).reshape(parts, -1, *patterns.shape[1:])
    return split[:, : features // parts].reshape(-1, *patterns.shape[1:])


@dataclass(frozen=True)
class Runs:
    """An order of k inputs.

    source   [places] the input that is there, -1 where there is none
    group    [runs] the group of each
    """

    source: np.ndarray
    group: np.ndarray

    def ordered(self, tensor: Tensor, patterns: np.ndarray) -> np.ndarray:
        """A tensor's bit patterns in this order: codes by input, scales and zeros by run."""
        if tensor.index[-1] == Var("k"):
            there = self.source >= 0
            result = np.zeros((*patterns.shape[:-1], len(self.source)), patterns.dtype)
            result[..., there] = patterns[..., self.source[there]]
            return result
        return patterns[..., self.group] if _grouped(tensor) else patterns

    def restored(self, tensor: Tensor, patterns: np.ndarray) -> np.ndarray:
        """The inverse."""
        if tensor.index[-1] == Var("k"):
            there = self.source >= 0
            result = np.zeros((*patterns.shape[:-1], int(there.sum())), patterns.dtype)
            result[..., self.source[there]] = patterns[..., there]
            return result
        first = np.flatnonzero(np.diff(self.group, prepend=-1))
        return patterns[..., first] if _grouped(tensor) else patterns

    def shape(self, tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of `ordered` patterns."""
        if tensor.index[-1] == Var("k"):
            return (*shape[:-1], len(self.source))
        return (*shape[:-1], len(self.group)) if _grouped(tensor) else shape


def _grouped(tensor: Tensor) -> bool:
    last = tensor.index[-1]
    return isinstance(last, Gather) or (isinstance(last, Group) and last.axis == "k" and last.size is not None)
