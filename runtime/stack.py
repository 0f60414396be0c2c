"""QuantStack: linear layers of one scheme and one size, such as the experts of a layer, their tensors stacked.

Buffers carry the declared names and a first axis more than a `QuantLinear`'s: [e, …].  How a tensor is stored, moved and
run is known to one QuantLinear, which is shown the tensors of one member after another, as views of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.diagnostic import CheckpointError
from qdsl.manifest import Buffer
from qdsl.runtime import pages
from qdsl.runtime.artifact import ALIGNMENT
from qdsl.runtime.buffer import signed, torch_type
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.op import linear
from qdsl.runtime.state import EXTRA, Tag
from qdsl.scheme import Scheme, expert_name


class QuantStack(nn.Module):
    """y = x·W[e]ᵀ + b[e] for one of several weights that are stored in the same way.

    count     how many there are; the other arguments are those of a QuantLinear, which each of them is
    """

    _one: QuantLinear  # knows the members; its buffers are those of the first

    def __init__(
        self, count: int, scheme: str | Path | Scheme, in_features: int, out_features: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any,
    ):  # fmt: skip
        super().__init__()
        if count < 1:
            raise ValueError(f"a stack has at least one member, not {count}")
        self.count = count
        self._know(QuantLinear(scheme, in_features, out_features, bias, device, dtype, **options))
        for name, one in self._one._buffers.items():
            assert one is not None
            fresh = pages.zeros((count, *one.shape), one.dtype, one.device)
            self.register_buffer(name, fresh, persistent=name in self._one._wanted)
        self._know(self._one)

    def _know(self, one: QuantLinear) -> None:
        object.__setattr__(self, "_one", one)  # no submodule: its tensors are the stack's
        if self._buffers:
            one._buffers = {name: stack[0] for name, stack in self._buffers.items()}
        # Small ones of which a member's share begins where no kernel may read.
        self._loose = {name for name, first in one._buffers.items() if first is not None and first.nbytes % ALIGNMENT}

    # ---- what the stack is --------------------------------------------------------------------------------------
    @property
    def scheme(self) -> Scheme:
        return self._one.scheme

    @property
    def in_features(self) -> int:
        return self._one.in_features

    @property
    def out_features(self) -> int:
        return self._one.out_features

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations the stack is made for."""
        return self._one.dtype

    @property
    def device(self) -> torch.device:
        return self._one.device

    def extra_repr(self) -> str:
        return f"{self.count} x ({self._one.extra_repr()})"

    # ---- its members ---------------------------------------------------------------------------------------------
    def member(self, e: int) -> QuantLinear:
        """The layer of one member; its buffers are views of the stack, so it must not be moved or loaded."""
        one = QuantLinear.__new__(QuantLinear)
        one.__dict__.update({k: v.copy() if isinstance(v, dict | set) else v for k, v in self._one.__dict__.items()})
        one._buffers = {name: stack[e] for name, stack in self._buffers.items()}
        return one

    def change(self, changed: Callable[[int, QuantLinear], object]) -> None:
        """Show every member to a call that may give it other tensors, all of one shape, and adopt these.

        What does not change its place is written in place.  Raises CheckpointError where members come to differ.
        """
        stacks = dict(self._buffers)
        one = self._one
        for e in range(self.count):
            one = self.member(e)
            shown = dict(one._buffers)
            changed(e, one)
            for name, tensor in one._buffers.items():
                assert tensor is not None
                moved = tensor is not shown.get(name)
                if e == 0 and moved:
                    stacks[name] = pages.zeros((self.count, *tensor.shape), tensor.dtype, tensor.device)
                stack = stacks[name]
                if stack.shape[1:] != tensor.shape or stack.dtype != tensor.dtype or stack.device != tensor.device:
                    raise CheckpointError(
                        f"`{name}` of member {e} is {list(tensor.shape)} as kernels want it, that of member 0 is "
                        f"{list(stack.shape[1:])}: groups of inputs of a stack must be of the same sizes in all members"
                    )
                if moved or stack is not self._buffers.get(name):
                    stack[e].copy_(tensor)
        self._buffers = {name: stacks[name] for name in one._buffers}
        self._non_persistent_buffers_set = set(one._derived_names)
        self._know(one)

    def load(self, tensors: Mapping[str, torch.Tensor], prefix: str = "", layout: str | None = None) -> QuantStack:
        """Take all members' tensors from a checkpoint, as `QuantLinear.load` does one layer's.

        prefix   with {e} for the number of a member, such as "model.layers.0.mlp.experts.{e}.up_proj."
        """
        return self.fill(lambda e, one: one.load(tensors, expert_name(prefix, e), layout))

    def fill(self, give: Callable[[int, QuantLinear], object]) -> QuantStack:
        """Give every member its numbers by a call; a stack of which a call failed has no numbers and refuses to run."""
        self._one._loaded = False
        self.change(give)
        return self

    def dequantize(self, e: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K] of a member, as `QuantLinear.dequantize` gives it."""
        return self.member(e).dequantize(dtype)

    # ---- running ------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """y [..., N] for x [..., K] by member e."""
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        one = self._one
        key = one._keys.get(x.dtype)
        if key is None or not one._loaded or x.dim() == 0 or x.shape[-1] != one.in_features:
            self.change(lambda e, each: each._explain(x))
            key = self._one._keys[x.dtype]
        operands = [
            self._buffers[name][e].clone() if name in self._loose else self._buffers[name][e]
            for name in self._one._operands[x.dtype]
        ]
        if operands[0].device != x.device:
            raise ValueError(f"x is on {x.device}, the stack on {self.device}; move one of them with .to()")
        return linear(x, operands, self._one.width, key)

    def prepare(self, device: torch.device | str | None = None) -> QuantStack:
        """Compile or find, and load, every kernel the stack needs, after moving it to `device` if given."""
        if device is not None:
            self.to(device)
        self._one.prepare()
        return self

    # ---- moving, copying, saving --------------------------------------------------------------------------------
    def _apply(self, fn, recurse=True):
        """As a QuantLinear: what is packed is moved and never cast."""
        self.change(lambda e, one: one._apply(fn))
        own = {name: self._buffers.pop(name) for name in (*self._one._wanted, *self._one._derived_names)}
        try:
            super()._apply(fn, recurse)  # whatever else was registered on the stack
        finally:
            self._buffers.update(own)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        one = self.member(0)
        one._buffers = {name: buffer.clone() for name, buffer in one._buffers.items()}  # not a view of all the others
        state["_one"] = one
        state["_held"] = dict(one._held)
        state["_buffers"] = {name: signed(self._buffers[name]) for name in one._wanted}
        state["_non_persistent_buffers_set"] = set()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        held, one = state.pop("_held"), state.pop("_one")
        super().__setstate__(state)
        self._buffers = {name: pages.settled(b.view(torch_type(held[name]))) for name, b in self._buffers.items()}
        self._know(one)
        device = self._buffers[next(iter(held))].device

        def settle(e: int, one: QuantLinear) -> None:
            one._derived_names = set()
            given = {name: (held[name], one._buffers[name]) for name in one._wanted}
            one._settle(one.scheme, device, given, one._loaded)

        self.change(settle)

    def state_for(self, buffers: Sequence[Buffer], kind: str) -> dict[str, torch.Tensor]:
        """The state_dict of the stack as kernels of another target take it, as `QuantLinear.state_for` gives a layer's."""
        state: dict[str, torch.Tensor] = {}
        for e in range(self.count):
            own = self.member(e).state_for(buffers, kind)
            told = Tag.from_tensor(own.pop(EXTRA))
            for name, tensor in own.items():
                stack = state.setdefault(name, torch.empty((self.count, *tensor.shape), dtype=tensor.dtype))
                if stack.shape[1:] != tensor.shape:
                    raise CheckpointError(
                        f"`{name}` of member {e} is {list(tensor.shape)} for {kind}, that of member 0 is "
                        f"{list(stack.shape[1:])}: groups of inputs of a stack must be of the same sizes in all members"
                    )
                stack[e].copy_(tensor)
        return {**state, EXTRA: self._stacked(told).to_tensor()}

    @property
    def tag(self) -> Tag:
        """What the buffers of a state_dict mean."""
        return self._stacked(self._one.tag)

    def _stacked(self, found: Tag) -> Tag:
        return replace(found, meaning=[f"e = {self.count}", *found.meaning])

    def get_extra_state(self) -> torch.Tensor:
        """What the buffers of a state_dict mean, as bytes (`qdsl.runtime.state`)."""
        return self.tag.to_tensor()

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Done by `_load_from_state_dict`, which must know the tag before it reads a buffer."""

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Take saved buffers member by member; the tag of the stack is checked first."""
        given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        stacked, place = {prefix + name for name in self._one._wanted}, prefix.rstrip(".") or "the stack"
        if prefix + EXTRA in given:
            try:
                saved = Tag.from_tensor(given[prefix + EXTRA])
            except CheckpointError as problem:
                error_msgs.append(f"{place}: {problem}")
                return
            if problem := self.tag.disagreement(saved):
                error_msgs.append(f"{place}: {problem}")
                return
            given[prefix + EXTRA] = replace(saved, meaning=list(saved.meaning)[1:]).to_tensor()
        for key in stacked & given.keys():
            if given[key].dim() == 0 or given[key].shape[0] != self.count:
                error_msgs.append(f"{place}: {key} is {list(given[key].shape)}, not a stack of {self.count}")
                return
        wrong: list[str] = []

        def take(e: int, one: QuantLinear) -> None:
            part = {key: value[e] if key in stacked else value for key, value in given.items()}
            missing, unexpected = (missing_keys, unexpected_keys) if e == 0 else ([], [])
            if not wrong:
                one._load_from_state_dict(part, prefix, local_metadata, strict, missing, unexpected, wrong)

        self.change(take)
        error_msgs += wrong
