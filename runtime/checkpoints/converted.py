"""What `qdsl convert` and `save_pretrained` write: the state_dict of a model whose quantized layers are in kernel layout.

    config.json          quantization_config: {"quant_method": "qdsl", "format": 1}
    *.safetensors        <module>.<declared name> for every buffer, and <module>._extra_state: the tag that says what they
                         hold (`qdsl.runtime.state`). Dense tensors are as they were.
                         <module>.weight, of no elements: nobody can take the module for a dense one
    their metadata       "qdsl": JSON of the schemes by name and parameters, each with its text, and the kind of device

Whatever layout the buffers are in, the layer that takes them repacks them where its kernels want another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qdsl.diagnostic import CheckpointError, Error
from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import parts
from qdsl.runtime.resolve import parsed
from qdsl.runtime.state import EXTRA, Tag

METHOD = "qdsl"
FORMAT = 1
GUARD = "weight"  # torch's name for what a dense layer has


def settings() -> dict[str, Any]:
    """The `quantization_config` of such a checkpoint."""
    return {"quant_method": METHOD, "format": FORMAT}


def guarded(module: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a quantized module by full name, from its state_dict."""
    named = {f"{module}.{name}": tensor for name, tensor in state.items()}
    return {f"{module}.{GUARD}": torch.empty(0, dtype=torch.uint8), **named}


def metadata(tags: Iterable[Tag]) -> dict[str, str]:
    """Of a file that holds layers of these tags."""
    tags = list(tags)
    schemes = {tag.scheme: {"params": dict(tag.params), "text": tag.text} for tag in tags}
    kinds = sorted({tag.kind for tag in tags})
    return {"format": "pt", METHOD: json.dumps({"format": FORMAT, "kinds": kinds, "schemes": schemes})}


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    if config.get("format") != FORMAT:
        found.problems.append(f"format {config.get('format')!r} of qdsl's own checkpoints; this version reads {FORMAT}")
        return found
    for name, module in modules.items():
        if f"{name}.{EXTRA}" in stored:
            try:
                found.choices[name] = _choice(name, module, stored, read)
            except Error as problem:
                found.problems.append(f"`{name}`: {problem}")
        elif (guard := stored.get(f"{name}.{GUARD}")) is not None and not guard.numel() and module.n * module.k:
            found.problems.append(
                f"`{name}.{EXTRA}` is missing: without it nobody knows the layout of the tensors beside it"
            )
    return found


def _choice(name: str, module: Module, stored: Headers, read: Read) -> Choice:
    tag = Tag.from_tensor(read(f"{name}.{EXTRA}"))
    if not tag.loaded:
        raise CheckpointError("it was saved before it had weights")
    if (needed := f"n = {module.n}, k = {module.k}") != tag.meaning[0]:
        raise CheckpointError(f"the saved layer has {tag.meaning[0]}, the model's {needed}")
    scheme = parsed(tag.text, tag.scheme.partition("(")[0], tuple(tag.params.items()))
    held = [buffer.tensor for buffer in tag.buffers]
    bias = any(scheme.tensor(each).role == "bias" for each in held)
    if bias != module.bias:
        saved, model = ("with a bias", "none") if bias else ("without a bias", "one")
        raise CheckpointError(f"the layer was saved {saved}, and the model has {model}")
    tensors = parts(name, (*held, EXTRA), stored)
    unread = () if GUARD in held or f"{name}.{GUARD}" not in stored else (f"{name}.{GUARD}",)
    return Choice(scheme, {}, "", bias, tensors, unread=unread, why=f"saved for {tag.kind}", tag=tag)
