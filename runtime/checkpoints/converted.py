"""What `qdsl convert` and `save_pretrained` write: the state_dict of a model whose quantized layers are in kernel layout.

    config.json          quantization_config: {"quant_method": "qdsl", "format": 1}
    *.safetensors        <module>.<declared name> for every buffer, and <module>._extra_state: the tag that says what they
                         hold (`qdsl.runtime.state`). Dense tensors are as they were.
                         The stacks of a layer's experts are modules of that kind: <experts>.<projection>.
                         What a dense module's first parameter would be called is stored without elements: nobody can
                         take what is there for a dense module and leave its numbers to chance
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


def settings() -> dict[str, Any]:
    """The `quantization_config` of such a checkpoint."""
    return {"quant_method": METHOD, "format": FORMAT}


def guard(name: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is stored beside the tensors of a quantized module, `state`, for the first parameter of the dense one."""
    return {} if name in state else {name: torch.empty(0, dtype=torch.uint8)}


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
    guards = {name for name, header in stored.items() if header.dtype == torch.uint8 and not header.numel()}
    found.skipped |= guards
    stacks = tuple(f"{module.stack}." for module in modules.values() if module.count)
    for name, module in modules.items():
        if f"{name}.{EXTRA}" in stored:
            try:
                found.choices[name] = _choice(name, module, stored, read)
            except Error as problem:
                found.problems.append(f"`{name}`: {problem}")
        elif f"{name}.weight" in guards and not name.startswith(stacks):
            found.problems.append(
                f"`{name}.{EXTRA}` is missing: without it nobody knows the layout of the tensors beside it"
            )
    return found


def _choice(name: str, module: Module, stored: Headers, read: Read) -> Choice:
    tag = Tag.from_tensor(read(f"{name}.{EXTRA}"))
    if not tag.loaded:
        raise CheckpointError("it was saved before it had weights")
    needed = [*[f"e = {module.count}"] * bool(module.count), f"n = {module.n}, k = {module.k}"]
    if (saved := list(tag.meaning[: len(needed)])) != needed:
        raise CheckpointError(f"the saved layer has {', '.join(map(str, saved))}, the model's {', '.join(needed)}")
    scheme = parsed(tag.text, tag.scheme.partition("(")[0], tuple(tag.params.items()))
    held = [buffer.tensor for buffer in tag.buffers]
    optional = {t.name for t in scheme.tensors if t.role == "bias" and t.optional}  # others are part of the weight
    bias = not optional.isdisjoint(held)
    if optional and bias != module.bias:
        was, has = ("with a bias", "none") if bias else ("without a bias", "one")
        raise CheckpointError(f"the layer was saved {was}, and the model has {has}")
    tensors = parts(name, (*held, EXTRA), stored)
    return Choice(scheme, {}, "", bias, tensors, why=f"saved for {tag.kind}", tag=tag)
