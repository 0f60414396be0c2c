"""Formats of quantized checkpoints: from a configuration to a scheme, its parameters and a layout for each module.

One module per format.  Its `plan` looks at the configuration, the model's linears and the headers of all stored
tensors, decides what every stored quantized module is, and lists what it finds wrong; it reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Module:
    """One nn.Linear of the model."""

    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class Choice:
    """How one module is stored.

    tensors   full stored name -> the name that the layout uses
    leading   for stored tensors that are padded: the shape of the part that means something
    given     tensors that the format implies and does not store
    """

    scheme: str
    params: Mapping[str, Any]
    layout: str
    bias: bool
    tensors: Mapping[str, str]
    leading: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Plan:
    """choices by module name; problems that forbid loading; notices for the user."""

    choices: dict[str, Choice] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


from qdsl.runtime.checkpoints import awq  # noqa: E402  (the formats need the classes above)

FORMATS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Module], Mapping[str, torch.Tensor]], Plan]] = {
    "awq": awq.plan,
}


def unnamed(config: Mapping[str, Any], source: str) -> str | None:
    """The format of a configuration that does not name one: old AutoAWQ files, told by their own word for bits."""
    return "awq" if source == "quant_config.json" and "w_bit" in config else None
