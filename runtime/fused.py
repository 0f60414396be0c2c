"""QuantFused: a linear layer of the model that a checkpoint stores as several, each quantized in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from qdsl.runtime.linear import QuantLinear


class QuantFused(nn.Module):
    """y of several layers of the same x, side by side: the rows of W are those of one layer after those of another.

    Each part keeps its scales; equal calls of the parts give equal bits.
    """

    replaces = "weight"  # the first parameter of an nn.Linear, in whose place it stands

    def __init__(self, parts: Mapping[str, QuantLinear]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def projections(self) -> dict[str, QuantLinear]:
        return {name: part for name, part in self.named_children() if isinstance(part, QuantLinear)}

    @property
    def in_features(self) -> int:
        return next(iter(self.projections.values())).in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.projections.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.projections.values()], -1)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K], as `QuantLinear.dequantize` gives that of each part."""
        return torch.cat([part.dequantize(dtype) for part in self.projections.values()])

    @property
    def bias(self) -> torch.Tensor | None:
        biases = [part.bias for part in self.projections.values()]
        return None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
