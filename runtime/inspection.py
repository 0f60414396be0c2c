"""What a checkpoint holds, module by module, before anything of it is loaded: `qdsl inspect`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.diagnostic import CheckpointError
from qdsl.runtime.checkpoints import Choice, Module
from qdsl.runtime.examination import Examination, examine
from qdsl.runtime.resolve import resolved
from qdsl.scheme import Binding, Scheme


@dataclass(frozen=True)
class Row:
    """One linear layer, or one projection of all the experts of a layer.

    experts  how many weights it has; 0 where it is no stack of experts
    scheme   its name and parameters, without the type of activations, which the model decides; empty for a dense layer
    weight   the scheme's equation
    zero     of the zero points, how they are read from what is stored; empty where the equation has none
    scale    the same of the scales
    why      what decided
    """

    module: str
    experts: int
    n: int
    k: int
    scheme: str
    layout: str
    weight: str
    zero: str
    scale: str
    why: str


@dataclass(frozen=True)
class Inspection:
    """The rows of a checkpoint, in the order of its model, and what is wrong with it."""

    checkpoint: str
    format: str
    settings: str
    modules: tuple[Row, ...]
    problems: tuple[str, ...]
    notices: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        counts = [_share("linears", [row for row in self.modules if not row.experts])]
        if stacks := [row for row in self.modules if row.experts]:
            counts.append(_share("projections of experts", stacks))
        lines = [f"{self.checkpoint}: {self.format} by {self.settings}, {', '.join(counts)} quantized"]
        head = ("module", "n x k", "scheme", "layout", "w", "zero", "scale", "why")
        cells = [
            (
                r.module,
                f"{r.experts} x " * bool(r.experts) + f"{r.n} x {r.k}",
                r.scheme or "dense",
                r.layout,
                r.weight,
                r.zero,
                r.scale,
                r.why,
            )
            for r in self.modules
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *cells)]
        lines += [f"notice: {notice}" for notice in self.notices]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def inspect(directory: str | Path, model: nn.Module | None = None) -> Inspection:
    """Look at a checkpoint's settings and headers, and at no weights.

    model   of its architecture; by default transformers builds one from config.json, without memory for its parameters

    Raises CheckpointError where files or settings can't be read at all.
    """
    directory = Path(directory)
    model = empty_model(directory.parent if directory.is_file() else directory) if model is None else model
    found = examine(model, directory)
    rows: list[Row] = []
    listed = {
        one for name in found.stacks if name not in found.experts for p in found.stacks[name] for one in p.modules
    }
    for name, m in model.named_modules():
        if name in found.stacks:
            for p in found.stacks[name]:
                rows.append(_row(f"{name}.{p.name}", p.one, p.modules[0], len(p.modules), found))
        elif name in found.experts:  # as the model has them
            experts = found.experts[name][0]
            for own in m._parameters:
                if not own.endswith("_bias"):
                    one = experts.projection(own, name)
                    rows.append(_row(f"{name}.{own}", one, f"{name}.{own}", experts.count, found))
        elif name in found.fused.joined and name in found.quantized:
            for part in found.fused.joined[name]:
                rows.append(_row(f"{name}.{part.rpartition('.')[2]}", found.fused.modules[part], part, 0, found))
        elif isinstance(m, nn.Linear) and name not in listed:
            rows.append(_row(name, Module(m.out_features, m.in_features, m.bias is not None), name, 0, found))
    return Inspection(
        str(directory), found.method, found.source, tuple(rows), tuple(found.problems), tuple(found.notices)
    )


def empty_model(directory: Path) -> nn.Module:
    """A model of the architecture that config.json names, on the meta device."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{directory}: transformers builds the model whose layers are looked at; install it, or give `inspect` a model"
        ) from None
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such file or directory")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: no config.json, which says what model this is")
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        for part in (config, getattr(config, "text_config", None)):
            if hasattr(part, "quantization_config"):
                del part.quantization_config  # or transformers would look for a quantizer
        names = [getattr(transformers, name, None) for name in config.architectures or ()]
        with torch.device("meta"):
            if names and names[0] is not None:
                return names[0]._from_config(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as problem:  # of many kinds: transformers reads the file as its model's author wished
        said = str(problem).strip().split("\n")[0]
        raise CheckpointError(f"{directory / 'config.json'}: transformers can't build this model ({said})") from None


def _share(what: str, rows: list[Row]) -> str:
    return f"{sum(bool(row.scheme) for row in rows)} of {len(rows)} {what}"


def _row(name: str, module: Module, planned: str, experts: int, found: Examination) -> Row:
    """Of the module that the plan knows as `planned`."""
    choice = found.plan.choices.get(planned)
    if choice is None:
        return Row(name, experts, module.n, module.k, "", "", "", "", "", _dense(name, planned, found))
    scheme = resolved(choice.scheme, choice.params, None)
    zero, scale = (_convention(scheme, choice, role) for role in ("zero", "scale"))
    decode, bound = str(scheme.weight.decode), _bound(scheme)
    return Row(name, experts, module.n, module.k, bound, choice.layout or "kernel", decode, zero, scale, choice.why)


def _dense(name: str, planned: str, found: Examination) -> str:
    """How a module is stored that is not quantized."""
    made = found.plan.dense.get(planned)
    if (rows := found.plan.dense.get(f"{planned}.weight")) is not None:
        return f"stored as {str(rows.header.dtype).removeprefix('torch.')}, in {', '.join(rows.sources)}"
    header = found.files.headers.get(f"{planned}.weight", found.files.headers.get(planned))
    header = made.header if made is not None else header
    if header is None:
        return _tied(name, found)
    return f"stored as {str(header.dtype).removeprefix('torch.')}" + ", expert by expert" * (made is not None)


def _tied(name: str, found: Examination) -> str:
    """Of a layer that has no weight of its own: whose it shares."""
    source = next((source for first, (_, source) in found.dense.items() if f"{name}.weight" in (first, source)), None)
    return f"tied to {source}" if source is not None and source in found.files else "tied, or in no file"


def _bound(scheme: Scheme) -> str:
    params = ", ".join(f"{name}={value}" for name, value in scheme.params.items() if name != "act")
    return f"{scheme.name}({params})" if params else scheme.name


def _convention(scheme: Scheme, choice: Choice, role: str) -> str:
    """How the weight's tensors of a role are read from what is stored."""
    names = [t.name for t in scheme.weight.loaded if t.role == role]
    if choice.tag is not None:
        return ", ".join(f'{name} = "{name}"' for name in names)
    bindings = {b.tensor: b for b in scheme.layouts[choice.layout].bindings}
    made: dict[str, Any] = dict(choice.made)
    return ", ".join(
        f"{name} = {_read_as(bindings[name])}" + (" (made)" if bindings[name].source in made else "") for name in names
    )


def _read_as(binding: Binding) -> str:
    source = f'"{binding.source}"'
    if binding.words:
        return f"words({source} + {binding.words:#010x})"
    return str(binding.value).replace("stored", source)
