"""QuantExperts: the experts of a layer, each projection of them a stack, in place of 3-D parameters or a list of modules.

Routing and activation are those of the module replaced.  Of 3-D parameters, transformers' own classes say how they lie and
which `_apply_gate` stands between the projections, and that method is called here.  The modules of a list stay, and run
their own forward with members of stacks for linears.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from qdsl.runtime.checkpoints import Headers, Module
from qdsl.runtime.checkpoints.experts import Experts, Names, Projection, StoredExperts, saved_stacks
from qdsl.runtime.fused import QuantFused
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.stack import QuantStack

_SORTED = "Llama4TextExperts"


def experts_of(module: nn.Module) -> Experts | str | None:
    """What a module of 3-D parameters is as experts; why it can't be replaced; None for any other module.

    transformers marks classes that it may run by other means (`use_experts_implementation`): is_transposed, has_gate,
    has_bias, is_concatenated.  Llama-4's class has no marks, and takes tokens that are sorted by expert.
    """
    own = dict(module._parameters)
    first, down = own.get("gate_up_proj", own.get("up_proj")), own.get("down_proj")
    if first is None or down is None or first.dim() != 3 or down.dim() != 3 or len(first) != len(down):
        return None
    kind, gated = type(module).__name__, "gate_up_proj" in own
    marked = all(hasattr(module, mark) for mark in ("is_transposed", "has_gate", "has_bias", "is_concatenated"))
    takes = list(inspect.signature(module.forward).parameters)
    if len(takes) != 3 if marked else kind != _SORTED:
        return f"{kind}, whose forward takes {', '.join(takes)}, is none of the classes that transformers 5 marks as experts"
    transposed = bool(module.is_transposed) if marked else True
    hidden, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
    wide = inner * (2 if gated else 1)
    if tuple(first.shape[1:]) != ((hidden, wide) if transposed else (wide, hidden)):
        return f"{kind} has projections of {list(first.shape)} and {list(down.shape)}, which do not follow each other"
    names = ["gate_up_proj" if gated else "up_proj", "down_proj"]
    bias = bool(module.has_bias) if marked else False
    expected = {*names, *(f"{name}_bias" for name in names if bias)}
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if held != expected or getattr(module, "has_post_expert_norm", False):
        more = ", ".join(sorted(held - expected)) or "a norm after its experts"
        return f"{kind} has {more} beside its projections, which is not supported"
    interleaved = marked and not module.is_concatenated
    return Experts(len(down), hidden, inner, bias, gated, interleaved, transposed, routed=marked)


def stacks_of(model: nn.Module, stored: Headers) -> tuple[dict[str, tuple[Experts, StoredExperts]], dict[str, str]]:
    """(a model's stacks of experts by name, with how they are stored; of those that can't be replaced but would have to be,
    what is wrong)."""
    names = Names(stored)
    found: dict[str, tuple[Experts, StoredExperts]] = {}
    unknown: dict[str, str] = {}
    for name, module in model.named_modules():
        experts = experts_of(module)
        if isinstance(experts, Experts):
            found[name] = experts, names.experts(name, experts)
        elif experts is not None and (beside := names.beside(name)):
            unknown[name] = f"`{name}` can't hold the experts that are stored as `{beside}`: {experts}"
    return found, unknown


def lists_of(model: nn.Module, stored: Headers) -> dict[str, tuple[Projection, ...]]:
    """A model's lists of experts that have the same linears, by name: a projection for each linear, under its name."""
    found: dict[str, tuple[Projection, ...]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name.rpartition(".")[2] != "experts" or not len(module):
            continue
        own = [
            {n: Module(m.out_features, m.in_features, m.bias is not None, name) for n, m in item.named_children()
             if isinstance(m, nn.Linear)} for item in module
        ]  # fmt: skip
        if own[0] and all(linears == own[0] for linears in own):
            each = [Projection(n, one, tuple(f"{name}.{e}.{n}" for e in range(len(own)))) for n, one in own[0].items()]
            saved = saved_stacks(name, own[0], stored)
            found[name] = tuple(p.saved(name) if saved else p for p in each)
    return found


def parts_of(layer: QuantLinear | QuantFused | QuantExperts) -> dict[str, QuantLinear | QuantStack]:
    """The modules that hold a layer's tensors, by what stands before the names of these within the layer."""
    if isinstance(layer, QuantLinear):
        return {"": layer}
    return {f"{name}.": stack for name, stack in layer.projections.items()}


class QuantExperts(nn.Module):
    """The experts of a layer, each projection of them a `QuantStack`, a submodule of the projection's name."""

    def __init__(self, replaced: nn.Module, projections: Mapping[str, QuantStack]):
        super().__init__()
        for name, stack in projections.items():
            self.add_module(name, stack)
        self.replaced = replaced

    @property
    def replaces(self) -> str:
        """The first parameter of the module replaced, by its name there."""
        raise NotImplementedError

    @property
    def projections(self) -> dict[str, QuantStack]:
        return {name: stack for name, stack in self.named_children() if isinstance(stack, QuantStack)}

    @property
    def num_experts(self) -> int:
        return next(iter(self.projections.values())).count


class ListedExperts(QuantExperts):
    """In place of a list of experts, which the model routes itself: experts[e](x).

    listed        the list; its modules keep all but their linears
    projections   by the names of these linears
    """

    replaced: nn.ModuleList

    def __init__(self, listed: nn.ModuleList, projections: Mapping[str, QuantStack]):
        bare = nn.ModuleList()
        for e, module in enumerate(listed):
            one = copy.copy(module)
            own = {name: _Member(stack, e) for name, stack in projections.items()}
            one.__dict__ = {**module.__dict__, "_modules": {**module._modules, **own}}
            bare.append(one)
        super().__init__(bare, projections)

    @property
    def replaces(self) -> str:
        return f"0.{next(iter(self.projections))}.weight"

    def __len__(self) -> int:
        return self.num_experts

    def __getitem__(self, e: int) -> nn.Module:
        return self.replaced[e]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.replaced)


class _Member(nn.Module):
    """A linear of one expert; it has no tensors of its own."""

    def __init__(self, stack: QuantStack, e: int):
        super().__init__()
        object.__setattr__(self, "stack", stack)  # no submodule: the stack is one of the experts'
        self.e = e

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x, self.e)

    def extra_repr(self) -> str:
        return f"in_features={self.stack.in_features}, out_features={self.stack.out_features}"


class StackedExperts(QuantExperts):
    """In place of 3-D parameters: down(gate(up(x))) of the experts that a token is routed to, one expert after another.

    replaced      the module whose place it takes: of its class, `_apply_gate` (or `act_fn`) stays
    projections   "gate_proj" and "up_proj", or both in one "gate_up_proj", or "up_proj" alone; and "down_proj"
    """

    def __init__(self, replaced: nn.Module, experts: Experts, projections: Mapping[str, QuantStack]):
        bare = copy.copy(replaced)
        bare.__dict__ = {**replaced.__dict__, "_parameters": {}, "_modules": dict(replaced._modules)}
        super().__init__(bare, projections)
        self.experts = experts

    @property
    def replaces(self) -> str:
        return "gate_up_proj" if self.experts.gated else "up_proj"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """y [T, H] for x [T, H].

        top_k_index     [T, top_k], the experts of each token; `num_experts` stands for none
        top_k_weights   [T, top_k], the factor of each of their answers

        Without both, where the class replaced takes none: the tokens lie in equal parts, one for each expert in turn.
        """
        if not self.experts.routed and top_k_index is None and top_k_weights is None:
            parts = hidden_states.reshape(self.num_experts, -1, self.experts.hidden)
            return torch.cat([self.expert(x, e) for e, x in enumerate(parts)])
        if top_k_index is None or top_k_weights is None or top_k_index.shape != top_k_weights.shape:
            shapes = [None if t is None else list(t.shape) for t in (top_k_index, top_k_weights)]
            raise ValueError(f"experts and weights of each token are needed, both [T, top_k]; given are {shapes}")
        if hidden_states.dim() != 2 or len(hidden_states) != len(top_k_index):
            raise ValueError(f"x is {list(hidden_states.shape)}, and routed are {len(top_k_index)} tokens")
        chosen, top_k = top_k_index.reshape(-1), top_k_index.shape[-1]
        counts = torch.bincount(chosen, minlength=self.num_experts + 1).tolist()
        if len(counts) > self.num_experts + 1:
            raise ValueError(f"a token is routed to expert {len(counts) - 1} of {self.num_experts}")
        factors = top_k_weights.reshape(-1, 1)
        kind = torch.result_type(hidden_states, factors)
        sums = torch.zeros(hidden_states.shape, dtype=kind, device=hidden_states.device)
        for e, slots in enumerate(chosen.argsort(stable=True).split(counts)[: self.num_experts]):
            if len(slots):
                tokens = slots // top_k
                y = self.expert(hidden_states[tokens], e) * factors[slots]
                sums = sums.index_add(0, tokens, y.to(sums.dtype))
        return sums.to(hidden_states.dtype)

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """y [..., H] for x [..., H] by one expert."""
        stacks = self._modules
        if not self.experts.gated:
            return stacks["down_proj"](self.replaced.act_fn(stacks["up_proj"](x, e)), e)
        if "gate_up_proj" in stacks:
            wide = stacks["gate_up_proj"](x, e)
        else:
            both = stacks["gate_proj"](x, e), stacks["up_proj"](x, e)
            wide = torch.stack(both, -1).flatten(-2) if self.experts.interleaved else torch.cat(both, -1)
        return stacks["down_proj"](self._gate(wide), e)

    def _gate(self, wide: torch.Tensor) -> torch.Tensor:
        if hasattr(self.replaced, "_apply_gate"):
            return self.replaced._apply_gate(wide)
        gate, up = wide.chunk(2, dim=-1)
        return up * self.replaced.act_fn(gate)
