"""What joins the parts of a layer that several ranks have: hooks around a layer of a part, and torch.distributed.

Gradients are those of the whole layer: where every rank has the same x, the ranks' gradients to it are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from qdsl.diagnostic import Error
from qdsl.runtime.shard import COLUMNS, Part


@dataclass(frozen=True)
class Joint:
    """One rank's layer among those of the others.

    colwise                x whole -> the rank's features of y
    colwise_gather_output  x whole -> y whole
    rowwise                the rank's inputs of x -> y whole
    rowwise_split_input    x whole -> y whole
    """

    part: Part

    def join(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.after)

    def before(self, layer: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, part = given[0], self.part
        if part.style != "rowwise" and x.requires_grad and self._meets():
            x = _Same.apply(x)
        if part.style == "rowwise_split_input":
            x = x[..., part.columns.start + part.before : part.columns.stop]
        if part.style not in COLUMNS and part.before:
            x = nn.functional.pad(x, (part.before, 0))
        return (x, *given[1:])

    def after(self, layer: nn.Module, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
        part = self.part
        if part.style in COLUMNS:
            y = y[..., part.before :] if part.before else y
            return self._gathered(y) if part.style == "colwise_gather_output" else y
        if self._meets():
            dist.all_reduce(y.detach())  # in place: the gradient to each rank's share is that to y
        return y

    def _gathered(self, y: torch.Tensor) -> torch.Tensor:
        if self.part.world == 1:
            return y
        if not self._meets():
            raise Error(
                f"y of all {self.part.world} ranks is needed (colwise_gather_output); initialize torch.distributed"
            )
        own = y.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.part.world)]
        dist.all_gather(parts, own.detach())
        parts[self.part.rank] = own  # with its gradient
        return torch.cat(parts, -1)

    def _meets(self) -> bool:
        """Whether there are other ranks to speak with; without torch.distributed, a rank's result is its own part."""
        return self.part.world > 1 and meets(self.part.rank, self.part.world)


def meets(rank: int, world: int) -> bool:
    """Whether torch.distributed is initialized; raises Error where this process is another rank of it."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if (here := (dist.get_rank(), dist.get_world_size())) != (rank, world):
        raise Error(f"shard = {(rank, world)}, but this process is rank {here[0]} of {here[1]} of torch.distributed")
    return True


class _Same(torch.autograd.Function):
    """x, which is the same on all ranks: the gradient to it is the sum of what all of them find."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total
