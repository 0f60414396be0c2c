"""Linears of a model on several ranks: which are split and how, and what joins their parts again.

A part is a layer as any other, with hooks around it that cut x and speak with the other ranks through torch.distributed.
Gradients are those of the whole layer: where every rank has the same x, the ranks' gradients to it are summed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qdsl.diagnostic import Error
from qdsl.runtime.checkpoints import Choice
from qdsl.runtime.shard import COLUMNS, ROWS, Part, part_of, quantized_part

# Styles of transformers' plans as those of a part; the others leave a linear whole.
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel")
_STYLES = {
    **{style: style for style in (*COLUMNS, *ROWS)},
    "colwise_rep": "colwise_gather_output",  # as transformers before 5 called them
    "rowwise_rep": "rowwise_split_input",
    **dict.fromkeys(_WHOLE, ""),
}


# ---- which linears are split -------------------------------------------------------------------------------------
def styles(model: nn.Module, plan: Mapping[str, str] | None, experts: Iterable[str], world: int) -> dict[str, str]:
    """The style of every linear that is split, by a plan of names in which `*` stands for a number.

    The plan is the model's own (`config.base_model_tp_plan` of transformers) unless one is given.  Raises Error where
    there is none, it names no linear or a layer's experts, a style is unknown, or heads can't be split.
    """
    config = getattr(model, "config", None)
    if plan is None:
        own = getattr(config, "base_model_tp_plan", None)
        if not own:
            raise Error(
                f"{type(model).__name__} has no plan for tensor parallelism (config.base_model_tp_plan); give one: "
                'tp_plan={"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"}, by the names of its linears'
            )
        prefix = getattr(model, "base_model_prefix", "")
        prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {prefix + name: style for name, style in own.items()}
    for name in experts:
        pattern = _any_number(name)
        if named := next((entry for entry in plan if f"{entry}.".startswith((f"{pattern}.", f"{name}."))), None):
            raise Error(
                f"{name}: experts can't be split over ranks, and the plan has `{named}`; give a tp_plan that does not name "
                "them, and every rank has all of them"
            )
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found: dict[str, str] = {}
    for name in linears:
        style = plan.get(_any_number(name), plan.get(name))
        if style is not None and style not in _STYLES:
            raise Error(f"{name}: the plan's style `{style}` is not supported for a linear ({', '.join(_STYLES)})")
        if style is not None and _STYLES[style]:
            found[name] = _STYLES[style]
    if not found:
        raise Error(f"the plan for tensor parallelism names no linear of the model: {', '.join(plan)}")
    _check_heads(config, found, world)
    return found


def _any_number(name: str) -> str:
    """As plans name a module."""
    return re.sub(r"\b\d+\b", "*", name)


def _check_heads(config: Any, found: Mapping[str, str], world: int) -> None:
    """A rank has whole heads, of the keys too."""
    if not any(style == "colwise" and re.search(r"attn|attention", name) for name, style in found.items()):
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for setting in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, setting, None)
        if isinstance(heads, int) and heads % world:
            raise Error(f"{heads} heads ({setting}) can't be split over {world} ranks")


Parts = dict[str, tuple[Part, Mapping[str, Any]]]  # by module: the rank's part, and the parameters of its scheme


def parts_of(
    model: nn.Module, choices: Mapping[str, Choice], experts: Iterable[str], whole: Collection[str], phase: str,
    shard: tuple[int, int],
    plan: Mapping[str, str] | None,
) -> tuple[Parts, list[str]]:  # fmt: skip
    """What a rank has of every linear that is split, and what keeps them from being split.

    experts   modules that hold the experts of a layer, which are not split
    whole     linears that can't be split
    """
    parts: Parts = {}
    problems: list[str] = []
    try:
        split = styles(model, plan, experts, shard[1])
    except Error as problem:
        return {}, [str(problem)]
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, style in split.items():
        linear, choice = model.get_submodule(name), choices.get(name)
        n, k = linear.out_features, linear.in_features
        try:
            if name in whole:
                raise Error("its rows are stored under other names, and of such a layer no part can be loaded")
            if choice is not None:
                parts[name] = quantized_part(choice, phase, style, *shard, n, k)
            elif uses[id(linear.weight)] > 1:
                raise Error("its weight is tied to another module's, which is not split")
            else:
                parts[name] = part_of(style, *shard, n, k), {}
        except Error as problem:
            problems.append(f"{name}: {problem}")
    return parts, problems


# ---- what joins the ranks ----------------------------------------------------------------------------------------
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
