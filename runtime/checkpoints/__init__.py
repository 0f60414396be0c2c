"""Formats of quantized checkpoints: from a configuration to a scheme, its parameters and a layout for each module.

One module per format.  Its `plan` looks at the configuration, the model's linears and the headers of all stored
tensors, decides what every stored quantized module is, and lists what it finds wrong.  It reads no weights, only what
headers can't tell: names of groups, zero points that ought to be constant, records of shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qdsl.runtime.state import Tag
from qdsl.scheme import Scheme

Headers = Mapping[str, torch.Tensor]  # of all stored tensors, on the meta device
Read = Callable[[str], torch.Tensor]  # the numbers of a stored tensor


@dataclass(frozen=True)
class Module:
    """One nn.Linear of the model, or one of a stack of experts, which must all be stored alike.

    stack   what the names of its stack begin with; empty where it is in none
    count   how many of them qdsl saved in one; 0 where it is by itself
    """

    n: int
    k: int
    bias: bool
    stack: str = ""
    count: int = 0


@dataclass(frozen=True)
class Made:
    """A tensor of a layout that is stored in another form.

    header    of the tensor, on the meta device
    sources   the stored tensors that it is made from, by their names within the module
    make      from the module's stored tensors, by those names; raises ValueError where they make none
    """

    header: torch.Tensor
    sources: tuple[str, ...]
    make: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """How one module is stored.

    scheme    a shipped name, or a scheme with its parameters
    layout    empty where floats are stored, of which the scheme's `quantize` block makes codes
    tensors   full stored name -> the name that the layout uses
    leading   for stored tensors that are padded: the shape of the part that means something
    given     tensors that the format implies and does not store
    made      tensors that are stored in another form than the layout's
    unread    full names of stored tensors that say nothing more: constants and shapes that were checked
    why       what decided, in a few words
    tag       of a module that qdsl saved in kernel layout: what its tensors hold; there is no `layout` then
    """

    scheme: str | Scheme
    params: Mapping[str, Any]
    layout: str
    bias: bool
    tensors: Mapping[str, str]
    leading: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    why: str = ""
    tag: Tag | None = None


@dataclass
class Plan:
    """What a format makes of a checkpoint.

    choices          by module name
    problems         that forbid loading
    notices          for the user
    contradictions   between configuration and tensors about what is quantized, in which the tensors count
    skipped          stored tensors that no linear layer has a use for
    dense            by the stored name: floats of the model that are stored in another form
    """

    choices: dict[str, Choice] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    dense: dict[str, Made] = field(default_factory=dict)


from qdsl.runtime.checkpoints import (  # noqa: E402  (the formats need the classes above)
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    converted,
    fp8,
    gguf,
    gptq,
    modelopt,
    modelslim,
    mxfp4,
)

FORMATS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Module], Headers, Read], Plan]] = {
    "awq": awq.plan,
    "gptq": gptq.plan,
    "auto-round": auto_round.plan,
    "intel/auto-round": auto_round.plan,
    "compressed-tensors": compressed_tensors.plan,
    "fp8": fp8.plan,
    "fbgemm-fp8": fp8.plan,
    "modelopt": modelopt.plan,
    "modelopt-fp4": modelopt.plan,
    "modelopt-mxfp8": modelopt.plan,
    "modelopt-mixed": modelopt.plan,
    "modelslim": modelslim.plan,
    "mxfp4": mxfp4.plan,
    "bitsandbytes": bitsandbytes.plan,
    "gguf": gguf.plan,
    "qdsl": converted.plan,
}
# Formats of one file with its settings in it, by its ending: the format's name, and what opens it.
FILES = {".gguf": ("gguf", gguf.GgufTensors)}
# Files of settings beside config.json, in the order in which they count.
SETTINGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quant_model_description.json")


def unnamed(config: Mapping[str, Any], source: str) -> str | None:
    """The format of a configuration that does not name one, told by its file and its words."""
    if source == "quant_config.json" and "w_bit" in config:  # old AutoAWQ
        return "awq"
    if source == "quantize_config.json" and "bits" in config and "desc_act" in config:  # AutoGPTQ
        return "gptq"
    if source == "quant_model_description.json":
        return "modelslim"
    producer = config.get("producer")
    if isinstance(producer, Mapping) and str(producer.get("name")).lower() == "modelopt":
        return "modelopt"
    return None
