"""What a checkpoint holds for a model: every tensor finds its place and every module its tensors, or it is said why not.

File headers and settings are read and no weights; nothing is made and the model does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error
from qdsl.order import Inputs
from qdsl.runtime import repack
from qdsl.runtime.buffer import stored_shape, torch_type
from qdsl.runtime.checkpoints import FORMATS, Choice, Module, Plan, unquantized
from qdsl.runtime.checkpoints import experts as of_experts
from qdsl.runtime.checkpoints import fused as of_fused
from qdsl.runtime.checkpoints.experts import Projection, Stacks, spellings
from qdsl.runtime.checkpoints.fused import Arrangement, arranged
from qdsl.runtime.checkpoints.unquantized import Wish
from qdsl.runtime.experts import lists_of, stacks_of
from qdsl.runtime.parallel import Parts, parts_of
from qdsl.runtime.resolve import check_layer, free_names, kept_tensors, misfits, resolved
from qdsl.runtime.shard import rows_of
from qdsl.runtime.state import Tag
from qdsl.runtime.stored import Renamed, Stored, Under, Unstacked, opened, opened_floats, some, without
from qdsl.scheme import Scheme, Tensor

# Stored by some tools, derived by every model that uses them.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LARGEST = 6 * 448  # weights: e2m1 codes times e4m3 scales are up to this by themselves
_LISTED = 8  # parameters that are in no file, of which each has a line
_SAID = 20  # problems that an error lists: those of one cause are about every layer


def refuse(directory: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError with the first problems, if there are any."""
    if problems:
        lines = [f"- {problem}" for problem in problems[:_SAID]]
        if more := len(problems) - len(lines):
            lines.append(f"- and {more} more")
        raise CheckpointError(f"{directory} can't be loaded:\n" + "\n".join(lines))


def wish(
    model: nn.Module, scheme: str | Path | Scheme | None, params: Mapping[str, Any] | None, skip: Sequence[str] | None
) -> Wish | None:
    """What `load_quantized` is asked to make of floats; None when it is not."""
    found = scheme_for_floats(scheme, params, skip)
    return None if found is None else Wish(found, heads(model) if skip is None else tuple(skip))


def scheme_for_floats(
    scheme: str | Path | Scheme | None, params: Mapping[str, Any] | None, skip: Sequence[str] | None
) -> Scheme | None:
    """The scheme that is asked for, with its parameters; raises Error where the three do not go together."""
    if isinstance(skip, str):
        raise CheckpointError(f"skip is a list of names, not {skip!r}; write [{skip!r}]")
    if scheme is None:
        for name, value in (("params", params), ("skip", skip)):
            if value is not None:
                raise CheckpointError(f"{name} says how to quantize a float checkpoint, and no scheme is given")
        return None
    if "act" in (params or {}):
        raise CheckpointError("params: `act` is the layers' dtype, so give `dtype`, or leave it to the model")
    return resolved(scheme, params or {}, None)


def heads(model: nn.Module) -> tuple[str, ...]:
    """The linears that make logits, which tools leave as they are."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return tuple(name for name, m in linears.items() if m is output or name.rpartition(".")[2] == "lm_head")


# ---- the checkpoint and the model -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Examination:
    """What a checkpoint holds for a model, as its settings and its headers say.

    method    the format's name; `source` the file of its settings
    plan      what its format makes of the quantized modules; those of one expert go by the checkpoint's names
    experts   the model's 3-D parameters of experts, by name: what they are, and how they are stored
    stacks    the experts that are replaced, by name: their projections
    fused     which linears are stored as several, or as rows of a larger one
    quantized the modules of the model that are replaced
    dense     every parameter and persistent buffer that stays: its first name -> (the tensor, the stored one's name)
    problems  that forbid loading, each with the file it is about before it
    notices   for the user
    parts     of linears of which not all that is stored is read, because a rank has a part or they are rows of a larger one:
              which part, and the parameters of its scheme
    """

    method: str
    source: str
    plan: Plan
    experts: Stacks
    stacks: dict[str, tuple[Projection, ...]]
    fused: Arrangement
    quantized: tuple[str, ...]
    files: Stored
    dense: dict[str, tuple[torch.Tensor, str]]
    problems: list[str]
    notices: list[str]
    parts: Parts = field(default_factory=dict)


def examine(
    model: nn.Module, directory: Path, phase: str = "", settings: Mapping[str, Any] | None = None,
    asked: Wish | None = None, shard: tuple[int, int] | None = None, tp_plan: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Examination:  # fmt: skip
    """Match a checkpoint with a model, whose parameters may be on the meta device; makes no layer and reads no weights.

    asked   what to make of a checkpoint of floats
    shard   (rank, world): what this rank has of the linears that the plan for tensor parallelism splits
    prefix  what the names of the model's tensors begin with in the checkpoint; others are left out

    Raises CheckpointError where files or settings can't be read at all, or are not of the kind that was asked for.
    """
    config: Mapping[str, Any] = {}
    if asked is not None:
        source, method, files = opened_floats(directory, settings or {})
    else:
        config, source, method, files = opened(directory, settings or {})
    everything = files
    if prefix:
        prefix = f"{prefix.removesuffix('.')}."
        config, files = without(prefix, config), Under(files, prefix)
        if not files:
            starts = sorted({name.partition(".")[0] for name in everything})
            raise CheckpointError(
                f"{directory}: no tensor's name begins with `{prefix}`; they begin with {some(starts)}"
            )
    experts, unknown = stacks_of(model, files.headers)
    of_all = {name: part for _, stored in experts.values() for name, part in stored.parts.items()}
    files = Unstacked(files, of_all) if of_all else files
    own, lists = linears(model), lists_of(model, files.headers)
    of_lists, of_one = (
        {name: p.one for projections in each for p in projections for name in p.modules}
        for each in (lists.values(), (stored.projections for _, stored in experts.values()))
    )
    fused = arranged({n: m for n, m in own.items() if n not in of_lists}, files.headers, getattr(model, "config", None))
    single = {**fused.modules, **{name: own[name] for name in own if name in of_lists}}
    modules = {**single, **of_lists, **of_one}
    try:
        if asked is not None:
            weights = {**{name: f"{name}.weight" for name in single}, **_weights(model, files.headers)}
            plan = unquantized.plan(asked, single, weights, files.headers, phase)
        else:
            plan = FORMATS[method](config, modules, files.headers, files.__getitem__)
    except CheckpointError as problem:  # a setting of the wrong type, or a file that can't be read after all
        raise CheckpointError(f"{directory} can't be loaded:\n- {source}: {problem}") from None
    stacks, apart = of_experts.quantized(experts, plan, files.headers)
    stacks |= {name: projections for name, projections in lists.items() if of_experts.alike(projections, plan)}
    made, mixed = of_fused.floats(fused, plan, files.headers)
    plan.dense |= made
    plan.problems += [*unknown.values(), *apart, *fused.problems, *([] if plan.problems else mixed)]
    stacked = {name for projections in stacks.values() for p in projections for name in p.modules}
    layers = (n for n in own if n not in stacked and all(each in plan.choices for each in fused.stored(n)))
    quantized = (*layers, *stacks)
    problems = [_placed(problem, source, files) for problem in plan.problems]
    dense = _dense(model, quantized, files.headers)
    if (
        not problems or plan.choices
    ):  # of a format that we do not read, that its tensors have no place says nothing more
        refused = (*_refused(plan, (*modules, *fused.joined)), *of_experts.refused(plan, experts, unknown))
        dense = {name: entry for name, entry in dense.items() if not name.startswith(refused)}
        taken = {name for choice in plan.choices.values() for name in (*choice.tensors, *choice.unread)}
        taken |= plan.skipped | {source for _, source in dense.values()}
        taken |= {source for _, name in dense.values() if name in plan.dense for source in plan.dense[name].sources}
        taken |= {name for name in files if name.startswith(refused)}
        problems += _check_dense(dense, plan, files) + _unplaced(model, files, taken, dense, plan)
        for name, choice in plan.choices.items():
            problems += [
                f"{where(choice, files)}: {name}: {p}" for p in _misfits(name, modules[name], choice, files, phase)
            ]
    if phase and not any(resolved(c.scheme, c.params, None).phases for c in plan.choices.values()):
        problems.append(f"no layer of it has phases, and phase = {phase!r} was asked for")
    large = [] if problems else _too_large(plan, modules, files)
    parts: Parts = {}
    for name, (larger, rows) in () if problems else fused.rows.items():
        if larger in plan.choices:
            plan.choices[name] = plan.choices[larger]
            try:
                parts[name] = rows_of(plan.choices[name], rows, modules[larger].n, modules[larger].k)
            except Error as problem:
                problems.append(f"{where(plan.choices[name], files)}: `{name}` is stored in `{larger}`: {problem}")
    if shard is not None and not problems:
        whole = (*fused.joined, *fused.rows)
        split, problems = parts_of(model, plan.choices, (*experts, *stacks), whole, phase, shard, tp_plan)
        parts |= split
    problems = of_experts.together([of_experts.as_stored(problem, experts) for problem in problems])
    notices = [of_experts.as_stored(notice, experts) for notice in _notices(plan)]
    notices += large
    if left := [name for name in everything if prefix and not name.startswith(prefix)]:
        notices.append(f"{len(left)} tensors whose names do not begin with `{prefix}` are left out: {some(left)}")
    return Examination(method, source, plan, experts, stacks, fused, quantized, files, dense, problems, notices, parts)


def _notices(plan: Plan) -> list[str]:
    if not plan.contradictions:
        return plan.notices
    more = len(plan.contradictions) - 8
    together = "; ".join([*plan.contradictions[:8], *([f"and {more} more"] if more > 0 else [])])
    return [*plan.notices, f"configuration and tensors disagree, and the tensors count: {together}"]


def _too_large(plan: Plan, modules: Mapping[str, Module], files: Stored) -> list[str]:
    """Tells of scales of whole tensors by which weights may be larger than those of any model: shapes and types are the
    same where a tool stores the reciprocal."""
    found: dict[str, float] = {}
    for name, choice in plan.choices.items():
        scheme, stored = resolved(choice.scheme, choice.params, None), {s: full for full, s in choice.tensors.items()}
        factors = [t for t in scheme.weight.loaded if t.role in ("code", "scale")]
        for t in factors if choice.layout else ():
            storage = scheme.layouts[choice.layout]
            binding = next(b for b in storage.bindings if b.tensor == t.name)
            full = stored.get(binding.source, "")
            if t.index or full not in files or files.headers[full].numel() != 1:
                continue
            sizes = {"e": 1, "m": 1, "n": modules[name].n, "k": modules[name].k}
            value = t.dtype.decode(repack.read(scheme, storage, binding, {binding.source: files[full]}, "", sizes))
            reach = float(np.abs(value)) * math.prod(other.dtype.max for other in factors if other is not t)
            if reach > _LARGEST:
                found[full] = reach
    if not found:
        return []
    return [
        f"by the scales of whole tensors weights reach {max(found.values()):.3g} ({some(found)}): some tools store what "
        "multiplies and others the reciprocal; is this the format of the tool that wrote it?"
    ]


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


def linears(model: nn.Module) -> dict[str, Module]:
    """The linear layers of a model by name."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: Module(m.out_features, m.in_features, m.bias is not None) for name, m in found.items()}


def _dense(
    model: nn.Module, replaced: Iterable[str], stored: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, str]]:
    """Every parameter and persistent buffer that stays: its first name -> (the tensor, the stored tensor's name).

    Tied parameters are one entry; whichever of their names the checkpoint has is taken.
    """
    quantized = tuple(f"{name}." for name in replaced)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if isinstance(tensor, torch.Tensor) and not name.startswith(quantized):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return {
        known[0]: (tensors[key], next((s for name in known for s in spellings(name) if s in stored), known[0]))
        for key, known in names.items()
    }


def _weights(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The stored name of every linear's weight."""
    names = {id(tensor): source for tensor, source in _dense(model, {}, stored).values()}
    return {name: names[id(m.weight)] for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def _check_dense(dense: Mapping[str, tuple[torch.Tensor, str]], plan: Plan, files: Stored) -> list[str]:
    headers = {**files.headers, **{name: made.header for name, made in plan.dense.items()}}
    problems = []
    for tensor, source in dense.values():
        header = headers.get(source)
        if header is None:
            continue
        file = files.file[source if source in files.file else plan.dense[source].sources[0]]
        if header.shape != tensor.shape:
            problems.append(f"{file.name}: `{source}` is {list(header.shape)}, the model needs {list(tensor.shape)}")
        elif header.is_floating_point() != tensor.is_floating_point():
            problems.append(f"{file.name}: `{source}` is {header.dtype}, the model holds {tensor.dtype}")
    return problems


def _unplaced(
    model: nn.Module, files: Stored, taken: set[str], dense: dict[str, tuple[torch.Tensor, str]], plan: Plan
) -> list[str]:
    """Tensors without a place and parameters without a tensor; drops from `dense` what the model says may be absent.

    Two tied names that are both stored must hold the same numbers.
    """
    optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    surplus = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    missing, problems, astray = [], [], {}
    for name, (tensor, source) in list(dense.items()):
        if source in files or source in plan.dense:
            continue
        if not isinstance(tensor, nn.Parameter) and any(p.search(name) for p in optional):
            del dense[name]
            continue
        quantized = [other for other in files if other.startswith(name.rsplit(".", 1)[0] + ".")]
        beside = f" (only {some(quantized)})" if quantized else ""
        if under := next((other for other in files if other.endswith(f".{source}")), None):
            beside = (
                f" (but `{under}` is: the model's names lack a prefix, or it is a part of the one that was stored; "
            )
            beside += f"prefix = {under.removesuffix(source)!r} loads that part)"
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
        problems.append(f"{file}: {some(names)} {'has' if len(names) == 1 else 'have'} no place in the model")
    return missing + problems


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter -> the stored name that `_dense` would take for it is among these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: known[0] for known in names.values() if len(known) > 1 for name in known[1:]}


def _misfits(name: str, module: Module, choice: Choice, files: Stored, phase: str) -> list[str]:
    """What keeps a module's tensors from being read as its choice says."""
    try:
        scheme, own = resolved(choice.scheme, choice.params, None), role(choice, phase)
        check_layer(scheme, module.n, module.k, choice.bias, own)
    except Error as problem:
        return [str(problem)]
    if choice.tag is not None:
        return _unlike_tag(name, scheme, module, choice.tag, kept_tensors(scheme, choice.bias, own), files)
    if not choice.layout:
        return unquantized.misfits(name, module, choice, files.headers)
    storage = scheme.layouts[choice.layout]
    others = {**choice.given, **{short: made.header for short, made in choice.made.items()}}
    headers = Renamed(files.headers, name, choice, others)
    found = misfits(scheme, storage, module.n, module.k, choice.bias, own, headers, f"{name}.")
    read = {b.source for b in storage.bindings} | {s for made in choice.made.values() for s in made.sources}
    surplus = [
        f"`{full}` is stored, but a module of {choice.why or choice.scheme} has no such tensor"
        for full, short in choice.tensors.items()
        if short not in read
    ]
    return [*map(str, found), *surplus]


def _unlike_tag(
    name: str, scheme: Scheme, module: Module, tag: Tag, wanted: Mapping[str, Tensor], files: Stored
) -> list[str]:
    """What keeps a module's saved tensors from being those of its tag, or those that the layer needs."""
    saved = {b.tensor: b for b in tag.buffers}
    problems = [
        f"`{each}` was not saved; save the model in the phase it is used in" for each in wanted if each not in saved
    ]
    problems += [f"`{each}` was saved, but a layer in this phase has none" for each in saved if each not in wanted]
    sizes = {"e": 1, "m": 1, "n": module.n, "k": module.k}
    for each, buffer in saved.items():
        header = files.headers.get(f"{name}.{each}")
        if header is None:
            problems.append(f"`{name}.{each}` is missing, though its tag is there")
            continue
        needed = list(header.shape)
        if each in wanted and not free_names({each: wanted[each]}) and not (buffer.order and buffer.order.index):
            shape = wanted[each].shape(sizes, scheme)  # the other shapes depend on numbers
            needed = [module.count] * bool(module.count)
            needed += stored_shape(buffer, wanted[each], shape, Inputs(module.k))
        if list(header.shape) != needed or header.dtype != torch_type(buffer):
            problems.append(
                f"`{name}.{each}` is {list(header.shape)} {header.dtype}, its tag says {needed} {buffer.dtype}"
            )
    return problems


def where(choice: Choice, files: Stored) -> str:
    """The files that hold a module."""
    return ", ".join(sorted({files.file[stored].name for stored in choice.tensors if stored in files.file}))


def role(choice: Choice, phase: str) -> str:
    """The phase that a module is loaded for; none where its scheme has none."""
    return phase if resolved(choice.scheme, choice.params, None).phases else ""
