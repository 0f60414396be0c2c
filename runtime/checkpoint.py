"""load_quantized: a quantized checkpoint into a model whose nn.Linears it replaces.

Everything that can be wrong is looked for first, in file headers alone: every tensor of the checkpoint must find its
place and every module its tensors.  Then the quantized layers are made and filled beside the model, and only when all
of them exist does the model change.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error
from qdsl.runtime.checkpoints import FORMATS, Choice, Module, Plan
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.parallel import Joint, Parts, meets, parts_of
from qdsl.runtime.resolve import check_layer, misfits, resolved
from qdsl.runtime.shard import Part, cut
from qdsl.runtime.stored import Stored, opened, some

# Stored by some tools, derived by every model that uses them.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_EXPERTS = re.compile(r"\.experts\.")
_LISTED = 8  # parameters that are in no file, of which each has a line


def load_quantized(
    model: nn.Module, directory: str | Path, *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, compile: str = "auto", batch_invariant: bool = False, phase: str = "",
    settings: Mapping[str, Any] | None = None, shard: tuple[int, int] | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> nn.Module:  # fmt: skip
    """Load a quantized checkpoint into a model of its architecture; returns the model.

    model      such as AutoModelForCausalLM.from_config(config); its weights are replaced, so they may be on "meta"
    directory  config and safetensors as the quantizing tool wrote them, or a GGUF file
    device     where to put the model; by default each parameter stays where it is (meta ones go to the CPU)
    dtype      type of activations and dense weights; by default the model's own
    compile    as for QuantLinear, and so is `batch_invariant`
    phase      the role of this copy of the model, such as "prefill" or "decode", for layers whose scheme has phases
    settings   in place of those that the checkpoint has, where it is labelled wrong: {"checkpoint_format": "gptq_v2"}
    shard      (rank, world): load this rank's part of every linear that the model's plan for tensor parallelism splits
    tp_plan    in place of the model's own (`config.base_model_tp_plan`): {"model.layers.*.mlp.up_proj": "colwise", ...}

    Linears that the checkpoint stores quantized become `QuantLinear`s, every other parameter is loaded as it is.  A tied
    head stays tied unless the checkpoint stores it quantized.  Of a sharded model, layers that are split by rows or whose
    outputs are gathered speak with the other ranks through torch.distributed, once that is initialized.  Raises
    CheckpointError, listing all that is wrong and naming file and tensor, before the model changes.
    """
    directory = Path(directory)
    if shard is None and tp_plan is not None:
        raise ValueError("tp_plan says what to split, and without shard = (rank, world) nothing is")
    if shard is not None:
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard is (rank, world) with 0 <= rank < world, not {shard}")
        meets(*shard)
    found = examine(model, directory, phase, settings, shard, tp_plan)
    for notice in found.notices:
        warnings.warn(f"{directory}: {notice}", stacklevel=2)
    problems, layers = [*found.problems, *_without_memory(model, found.dense)], {}
    choices = found.plan.choices
    for name, choice in () if problems else choices.items():
        options = {"compile": compile, "batch_invariant": batch_invariant, "phase": _phase(choice, phase)}
        try:
            layers[name] = _layer(model.get_submodule(name), choice, found.parts.get(name), device, dtype, options)
        except (Error, TypeError) as problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError(f"{directory} can't be loaded:\n" + "\n".join(f"- {problem}" for problem in problems))
    for name in _progress(choices, "loading quantized layers"):
        _fill(layers[name], name, choices[name], found)
    values = {key: _floats(key, source, found) for key, (_, source) in found.dense.items()}
    _install(model, layers, found.dense, values, device, dtype)
    for name, (part, _) in found.parts.items():
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear):
            linear.in_features, linear.out_features = part.k, part.n
            linear.bias = linear.bias if part.has_bias else None
        Joint(part).join(linear)
    return model


# ---- what a checkpoint holds for a model -------------------------------------------------------------------------
@dataclass(frozen=True)
class Examination:
    """What a checkpoint holds for a model, as its settings and its headers say.

    method    the format's name; `source` the file of its settings
    plan      what its format makes of the quantized modules
    dense     every parameter and persistent buffer that stays: its first name -> (the tensor, the stored one's name)
    problems  that forbid loading, each with the file it is about before it
    notices   for the user
    parts     of a sharded model: what the rank has of every linear that is split, and the parameters of its scheme
    """

    method: str
    source: str
    plan: Plan
    files: Stored
    dense: dict[str, tuple[torch.Tensor, str]]
    problems: list[str]
    notices: list[str]
    parts: Parts = field(default_factory=dict)


def examine(
    model: nn.Module, directory: Path, phase: str = "", settings: Mapping[str, Any] | None = None,
    shard: tuple[int, int] | None = None, tp_plan: Mapping[str, str] | None = None,
) -> Examination:  # fmt: skip
    """Match a checkpoint with a model, whose parameters may be on the meta device; makes no layer and reads no weights.

    Raises CheckpointError where files or settings can't be read at all.
    """
    config, source, method, files = opened(directory, settings or {})
    modules = {name: _module(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    try:
        plan = FORMATS[method](config, modules, files.headers, files.__getitem__)
    except CheckpointError as problem:  # a setting of the wrong type, or a file that can't be read after all
        raise CheckpointError(f"{directory} can't be loaded:\n- {source}: {problem}") from None
    problems = [_placed(problem, source, files) for problem in plan.problems]
    dense = _dense(model, plan.choices, files.headers)
    if (
        not problems or plan.choices
    ):  # of a format that we do not read, that its tensors have no place says nothing more
        refused = _refused(plan, modules)
        dense = {name: entry for name, entry in dense.items() if not name.startswith(refused)}
        taken = {name for choice in plan.choices.values() for name in (*choice.tensors, *choice.unread)}
        taken |= plan.skipped | {source for _, source in dense.values()}
        taken |= {name for name in files if name.startswith(refused)}
        problems += _check_dense(
            dense, {**files.headers, **{name: made.header for name, made in plan.dense.items()}}, files
        ) + _unplaced(model, files, taken, dense)
        for name, choice in plan.choices.items():
            problems += [
                f"{_where(choice, files)}: {name}: {p}" for p in _misfits(name, modules[name], choice, files, phase)
            ]
    if phase and not any(resolved(c.scheme, c.params, None).phases for c in plan.choices.values()):
        problems.append(f"no layer of it has phases, and phase = {phase!r} was asked for")
    parts: Parts = {}
    if shard is not None and not problems:
        parts, problems = parts_of(model, plan.choices, phase, shard, tp_plan)
    return Examination(method, source, plan, files, dense, problems, _notices(plan), parts)


def _notices(plan: Plan) -> list[str]:
    if not plan.contradictions:
        return plan.notices
    more = len(plan.contradictions) - 8
    together = "; ".join([*plan.contradictions[:8], *([f"and {more} more"] if more > 0 else [])])
    return [*plan.notices, f"configuration and tensors disagree, and the tensors count: {together}"]


def _refused(plan: Plan, modules: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the tensors of modules for which the plan's problems say why they can't be read."""
    named = {name for problem in plan.problems for name in re.findall(r"`([^`]+)`", problem)}
    return tuple(
        f"{name}."
        for name in modules
        if name not in plan.choices and any(other == name or other.startswith(f"{name}.") for other in named)
    )


def _placed(problem: str, source: str, files: Stored) -> str:
    """A problem with the files it is about before it: those of the tensors it names, or of what is stored beside them, or
    else the configuration's."""
    about: set[str] = set()
    for name in re.findall(r"`([^`]+)`", problem):
        beside = (f"{name}.", f"{name.rpartition('.')[0] or name}.")
        stored = [name] if name in files else [other for other in files if other.startswith(beside)]
        about |= {files.file[other].name for other in stored}
    return f"{', '.join(sorted(about)) or source}: {problem}"


def _module(linear: nn.Linear) -> Module:
    return Module(linear.out_features, linear.in_features, linear.bias is not None)


def _dense(
    model: nn.Module, choices: Mapping[str, Choice], stored: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, str]]:
    """Every parameter and persistent buffer that stays: its first name -> (the tensor, the stored tensor's name).

    Tied parameters are one entry; whichever of their names the checkpoint has is taken.
    """
    quantized = tuple(f"{name}." for name in choices)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if isinstance(tensor, torch.Tensor) and not name.startswith(quantized):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return {
        known[0]: (tensors[key], next((name for name in known if name in stored), known[0]))
        for key, known in names.items()
    }


def _floats(name: str, source: str, found: Examination) -> torch.Tensor:
    """A stored tensor as the model holds it, or the rank's part of it."""
    made, module = found.plan.dense.get(source), name.rpartition(".")[0]
    part = found.parts[module][0] if module in found.parts else None
    cut = (part.rows, part.columns)[: len(found.dense[name][0].shape)] if part else ()
    if made is not None:
        return made.make({name: found.files[name] for name in made.sources})[cut]
    return found.files.part(source, cut) if cut else found.files[source]


def _check_dense(
    dense: Mapping[str, tuple[torch.Tensor, str]], headers: Mapping[str, torch.Tensor], files: Stored
) -> list[str]:
    problems = []
    for tensor, source in dense.values():
        header = headers.get(source)
        if header is None:
            continue
        if header.shape != tensor.shape:
            problems.append(
                f"{files.file[source].name}: `{source}` is {list(header.shape)}, the model needs {list(tensor.shape)}"
            )
        elif header.is_floating_point() != tensor.is_floating_point():
            problems.append(f"{files.file[source].name}: `{source}` is {header.dtype}, the model holds {tensor.dtype}")
    return problems


def _unplaced(
    model: nn.Module, files: Stored, taken: set[str], dense: dict[str, tuple[torch.Tensor, str]]
) -> list[str]:
    """Tensors without a place and parameters without a tensor; drops from `dense` what the model says may be absent.

    Two tied names that are both stored must hold the same numbers.
    """
    optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    surplus = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    missing, problems, astray = [], [], {}
    for name, (tensor, source) in list(dense.items()):
        if source in files:
            continue
        if not isinstance(tensor, nn.Parameter) and any(p.search(name) for p in optional):
            del dense[name]
            continue
        quantized = [other for other in files if other.startswith(name.rsplit(".", 1)[0] + ".")]
        beside = f" (only {some(quantized)})" if quantized else ""
        if under := next((other for other in files if other.endswith(f".{source}")), None):
            beside = f" (but `{under}` is: the model's names lack a prefix, or it is a part of the one that was stored)"
        missing.append(f"`{source}` is in no file{beside}, and the model needs it")
    aliases = _aliases(model)
    for name in files:
        if name in taken or _DERIVED.search(name) or any(p.search(name) for p in surplus):
            continue
        tied = aliases.get(name)
        if tied in taken:
            if tied is not None and not torch.equal(files[name], files[tied]):
                problems.append(f"{files.file[name].name}: `{name}` differs from `{tied}`, to which the model ties it")
            continue
        astray.setdefault(files.file[name].name, []).append(name)
    if len(missing) > _LISTED:
        missing[_LISTED:] = [f"{len(missing) - _LISTED} more that the model needs are in no file"]
    for file, names in astray.items():
        stacks = "; stacks of experts are not loaded yet" if any(_EXPERTS.search(name) for name in names) else ""
        problems.append(f"{file}: {some(names)} {'has' if len(names) == 1 else 'have'} no place in the model{stacks}")
    return missing + problems


def _without_memory(model: nn.Module, dense: Mapping[str, tuple[torch.Tensor, str]]) -> list[str]:
    """Buffers on the meta device that nothing will fill."""
    meta = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in dense]
    if not meta:
        return []
    return [
        f"the model's {some(meta)} on the meta device come from no checkpoint; build it with real buffers "
        "(accelerate's init_empty_weights keeps them), or on the CPU"
    ]


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter -> the stored name that `_dense` would take for it is among these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: known[0] for known in names.values() if len(known) > 1 for name in known[1:]}


def _misfits(name: str, module: Module, choice: Choice, files: Stored, phase: str) -> list[str]:
    """What keeps a module's tensors from being read as its choice says."""
    try:
        scheme, role = resolved(choice.scheme, choice.params, None), _phase(choice, phase)
        check_layer(scheme, module.n, module.k, choice.bias, role)
    except Error as problem:
        return [str(problem)]
    storage = scheme.layouts[choice.layout]
    others = {**choice.given, **{short: made.header for short, made in choice.made.items()}}
    headers = _Renamed(files.headers, name, choice, others)
    found = misfits(scheme, storage, module.n, module.k, choice.bias, role, headers, f"{name}.")
    read = {b.source for b in storage.bindings} | {s for made in choice.made.values() for s in made.sources}
    surplus = [
        f"`{full}` is stored, but a module of {choice.why or choice.scheme} has no such tensor"
        for full, short in choice.tensors.items()
        if short not in read
    ]
    return [*map(str, found), *surplus]


def _where(choice: Choice, files: Stored) -> str:
    """The files that hold a module."""
    return ", ".join(sorted({files.file[stored].name for stored in choice.tensors if stored in files.file}))


# ---- layers ------------------------------------------------------------------------------------------------------
def _layer(
    old: nn.Module, choice: Choice, own: tuple[Part, Mapping[str, Any]] | None, device, dtype,
    options: Mapping[str, Any],
) -> QuantLinear:  # fmt: skip
    """An empty layer for a module, or for a rank's part of it; raises what the layer's constructor does."""
    assert isinstance(old, nn.Linear), "plans name linears of the model"
    place = torch.device(device) if device is not None else old.weight.device
    n, k, bias, params = old.out_features, old.in_features, choice.bias, choice.params
    if own is not None:
        part, params = own
        n, k, bias = part.n, part.k, bias and part.has_bias
    return QuantLinear(
        choice.scheme, k, n, bias, "cpu" if place.type == "meta" else place, dtype or old.weight.dtype, **options,
        **params,
    )  # fmt: skip


def _phase(choice: Choice, phase: str) -> str:
    return phase if resolved(choice.scheme, choice.params, None).phases else ""


def _fill(layer: QuantLinear, name: str, choice: Choice, found: Examination) -> None:
    files = found.files
    try:
        stored = _Renamed(files, name, replace(choice, leading={}), {})
        own = {full.removeprefix(f"{name}."): stored[full] for full in stored} if choice.made else {}
        others = {**choice.given, **{short: made.make(own) for short, made in choice.made.items()}}
        if name in found.parts:
            tensors: Mapping[str, torch.Tensor] = _cut(layer, name, choice, found, others)
        else:
            tensors = _Renamed(files, name, choice, others)
        layer.load(tensors, f"{name}.", choice.layout)
    except (CheckpointError, ValueError) as problem:
        raise CheckpointError(f"{_where(choice, files)}: {name}: {problem}") from None


def _cut(
    layer: QuantLinear, name: str, choice: Choice, found: Examination, others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The rank's part of a module's tensors."""
    part, params = found.parts[name]
    whole, own = (resolved(choice.scheme, given, None) for given in (choice.params, params))
    headers = _Renamed(found.files.headers, name, choice, others)

    def read(full: str, at: tuple[slice, ...]) -> torch.Tensor:
        made = headers.others.get(full)
        return found.files.part(headers.stored[full], at) if made is None else made[at]

    return cut(whole, own, choice.layout, part, layer.phase, choice.bias, headers, f"{name}.", read)


class _Renamed(Mapping[str, torch.Tensor]):
    """A module's tensors under the names its layout uses, each cut to its meaningful part.

    others   those that no file holds as the layout wants them, by their names within the module
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], module: str, choice: Choice, others: Mapping[str, torch.Tensor]
    ):
        self.tensors, self.choice = tensors, choice
        self.stored = {f"{module}.{short}": stored for stored, short in choice.tensors.items()}
        self.others = {f"{module}.{short}": tensor for short, tensor in others.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.others:
            return self.others[name]
        stored = self.stored[name]
        tensor = self.tensors[stored]
        for at, size in enumerate(self.choice.leading.get(self.choice.tensors[stored], ())):
            tensor = tensor.narrow(at, 0, size)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter({**self.stored, **self.others})

    def __len__(self) -> int:
        return len({**self.stored, **self.others})


def _install(
    model: nn.Module, layers: Mapping[str, QuantLinear], dense: Mapping[str, tuple[torch.Tensor, str]],
    values: Mapping[str, torch.Tensor], device, dtype,
) -> None:  # fmt: skip
    """Change the model, at last."""
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        layer.train(model.get_submodule(name).training)
        setattr(model.get_submodule(parent), last, layer)
    new: dict[int, torch.Tensor] = {}
    for name, (old, _) in dense.items():
        kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
        place = torch.device(device) if device is not None else torch.device("cpu") if old.is_meta else old.device
        if place == old.device and kind == old.dtype and values[name].shape == old.shape:
            old.data.copy_(values[name])
            continue
        value = values[name].to(place, kind)
        new[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, old in table.items():
                if id(old) in new:
                    table[name] = new[id(old)]
    if device is not None:
        model.to(device)  # buffers that no checkpoint holds


def _progress(names: Iterable[str], what: str) -> Iterable[str]:
    """The names, with a bar when going through them takes longer than a second."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return names
    return tqdm(names, what, delay=1, leave=False)
