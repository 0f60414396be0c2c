"""load_quantized: a quantized checkpoint, or a float one and a scheme, into a model whose nn.Linears it replaces.

Everything that can be wrong is looked for first, in file headers alone: every tensor of the checkpoint must find its
place and every module its tensors.  Then the quantized layers are made and filled beside the model, and only when all
of them exist does the model change.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error
from qdsl.order import Inputs
from qdsl.runtime.buffer import stored_shape, torch_type
from qdsl.runtime.checkpoints import FORMATS, Choice, Module, Plan, unquantized
from qdsl.runtime.checkpoints import experts as of_experts
from qdsl.runtime.checkpoints.experts import Projection, Stacks, spellings
from qdsl.runtime.checkpoints.unquantized import Wish
from qdsl.runtime.experts import ListedExperts, QuantExperts, StackedExperts, lists_of, stacks_of
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.resolve import check_layer, free_names, kept_tensors, misfits, resolved
from qdsl.runtime.stack import QuantStack
from qdsl.runtime.state import Tag
from qdsl.runtime.stored import Stored, Unstacked, opened, opened_floats, some
from qdsl.scheme import Scheme, Tensor

# Stored by some tools, derived by every model that uses them.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LISTED = 8  # parameters that are in no file, of which each has a line


def load_quantized(
    model: nn.Module, directory: str | Path, *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, compile: str = "auto", batch_invariant: bool = False, phase: str = "",
    settings: Mapping[str, Any] | None = None, scheme: str | Path | Scheme | None = None,
    params: Mapping[str, Any] | None = None, skip: Sequence[str] | None = None,
) -> nn.Module:  # fmt: skip
    """Load a quantized checkpoint into a model of its architecture, or quantize a float one; returns the model.

    model      such as AutoModelForCausalLM.from_config(config); its weights are replaced, so they may be on "meta"
    directory  config and safetensors as the quantizing tool wrote them, or a GGUF file
    device     where to put the model; by default each parameter stays where it is (meta ones go to the CPU)
    dtype      type of activations and dense weights; by default the model's own
    compile    as for QuantLinear, and so is `batch_invariant`
    phase      the role of this copy of the model, such as "prefill" or "decode", for layers whose scheme has phases
    settings   in place of those that the checkpoint has, where it is labelled wrong: {"checkpoint_format": "gptq_v2"}
    scheme     of a float checkpoint: its linears are quantized one by one, by the scheme's `quantize` block
    params     the scheme's parameters, such as {"group": 64}; that of activations is the layers' `dtype`
    skip       linears that stay as they are: names, last components of names, or modules around them.  By default the
               head alone; an empty list leaves none out

    Linears that the checkpoint stores quantized, or of which the scheme makes codes, become `QuantLinear`s, the experts of a
    layer, be they 3-D parameters or lists of linears, `QuantExperts`; every other parameter is loaded as it is.  A tied head
    stays tied unless it is one of them.  Raises CheckpointError, listing all that is wrong and
    naming file and tensor, before the model changes.
    """
    directory = Path(directory)
    found = examine(model, directory, phase, settings, wish(model, scheme, params, skip))
    for notice in found.notices:
        warnings.warn(f"{directory}: {notice}", stacklevel=2)
    refuse(directory, [*found.problems, *_without_memory(model, found.dense)])
    options = {"compile": compile, "batch_invariant": batch_invariant, "phase": phase}
    layers = empty_layers(model, directory, found, device, dtype, options)
    for name in progress(layers, "loading quantized layers" if scheme is None else "quantizing layers"):
        layers[name] = filled(layers[name], name, found, _home(_like(model.get_submodule(name)), device, dtype)[1])
    values = {}
    for key, (old, source) in found.dense.items():  # one by one, so that no two copies of all of them are there
        place, kind = _home(old, device, dtype)
        values[key] = floats(source, found).to(place, kind)
    _install(model, layers, found.dense, values, device)
    return model


def refuse(directory: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError with all problems, if there are any."""
    if problems:
        raise CheckpointError(f"{directory} can't be loaded:\n" + "\n".join(f"- {problem}" for problem in problems))


def empty_layers(
    model: nn.Module, directory: Path, found: Examination, device: torch.device | str | None,
    dtype: torch.dtype | None, options: Mapping[str, Any],
) -> dict[str, QuantLinear | QuantExperts]:  # fmt: skip
    """Layers without numbers for every module that is replaced, made beside the model; raises CheckpointError with all that
    is wrong.  `options` are those of QuantLinear's constructor."""
    layers, problems = {}, []
    for name in found.quantized:
        try:
            layers[name] = empty_layer(name, model.get_submodule(name), found, device, dtype, options)
        except (Error, TypeError) as problem:
            problems.append(f"{name}: {problem}")
    refuse(directory, problems)
    return layers


def wish(
    model: nn.Module, scheme: str | Path | Scheme | None, params: Mapping[str, Any] | None, skip: Sequence[str] | None
) -> Wish | None:
    """What `load_quantized` is asked to make of floats; None when it is not."""
    if scheme is None:
        for name, value in (("params", params), ("skip", skip)):
            if value is not None:
                raise CheckpointError(f"{name} says how to quantize a float checkpoint, and no scheme is given")
        return None
    if "act" in (params or {}):
        raise CheckpointError("params: `act` is the layers' dtype, so give `dtype`, or leave it to the model")
    return Wish(resolved(scheme, params or {}, None), heads(model) if skip is None else tuple(skip))


def heads(model: nn.Module) -> tuple[str, ...]:
    """The linears that make logits, which tools leave as they are."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return tuple(name for name, m in linears.items() if m is output or name.rpartition(".")[2] == "lm_head")


# ---- what a checkpoint holds for a model -------------------------------------------------------------------------
@dataclass(frozen=True)
class Examination:
    """What a checkpoint holds for a model, as its settings and its headers say.

    method    the format's name; `source` the file of its settings
    plan      what its format makes of the quantized modules; those of one expert go by the checkpoint's names
    experts   the model's 3-D parameters of experts, by name: what they are, and how they are stored
    stacks    the experts that are replaced, by name: their projections
    quantized the modules of the model that are replaced
    dense     every parameter and persistent buffer that stays: its first name -> (the tensor, the stored one's name)
    problems  that forbid loading, each with the file it is about before it
    notices   for the user
    """

    method: str
    source: str
    plan: Plan
    experts: Stacks
    stacks: dict[str, tuple[Projection, ...]]
    quantized: tuple[str, ...]
    files: Stored
    dense: dict[str, tuple[torch.Tensor, str]]
    problems: list[str]
    notices: list[str]


def examine(
    model: nn.Module, directory: Path, phase: str = "", settings: Mapping[str, Any] | None = None,
    asked: Wish | None = None,
) -> Examination:  # fmt: skip
    """Match a checkpoint with a model, whose parameters may be on the meta device; makes no layer and reads no weights.

    asked   what to make of a checkpoint of floats

    Raises CheckpointError where files or settings can't be read at all, or are not of the kind that was asked for.
    """
    config: Mapping[str, Any] = {}
    if asked is not None:
        source, method, files = opened_floats(directory, settings or {})
    else:
        config, source, method, files = opened(directory, settings or {})
    experts, unknown = stacks_of(model, files.headers)
    parts = {name: part for _, stored in experts.values() for name, part in stored.parts.items()}
    files = Unstacked(files, parts) if parts else files
    own, lists = linears(model), lists_of(model, files.headers)
    of_lists, of_one = (
        {name: p.one for projections in each for p in projections for name in p.modules}
        for each in (lists.values(), (stored.projections for _, stored in experts.values()))
    )
    modules = {**own, **of_lists, **of_one}
    try:
        if asked is not None:
            plan = unquantized.plan(asked, own, _weights(model, files.headers), files.headers, phase)
        else:
            plan = FORMATS[method](config, modules, files.headers, files.__getitem__)
    except CheckpointError as problem:  # a setting of the wrong type, or a file that can't be read after all
        raise CheckpointError(f"{directory} can't be loaded:\n- {source}: {problem}") from None
    stacks, apart = of_experts.quantized(experts, plan, files.headers)
    stacks |= {name: projections for name, projections in lists.items() if of_experts.alike(projections, plan)}
    plan.problems += [*unknown.values(), *apart]
    stacked = {name for projections in stacks.values() for p in projections for name in p.modules}
    quantized = (*(name for name in own if name in plan.choices and name not in stacked), *stacks)
    problems = [_placed(problem, source, files) for problem in plan.problems]
    dense = _dense(model, quantized, files.headers)
    if (
        not problems or plan.choices
    ):  # of a format that we do not read, that its tensors have no place says nothing more
        refused = (*_refused(plan, modules), *of_experts.refused(plan, experts, unknown))
        dense = {name: entry for name, entry in dense.items() if not name.startswith(refused)}
        taken = {name for choice in plan.choices.values() for name in (*choice.tensors, *choice.unread)}
        taken |= plan.skipped | {source for _, source in dense.values()}
        taken |= {source for _, name in dense.values() if name in plan.dense for source in plan.dense[name].sources}
        taken |= {name for name in files if name.startswith(refused)}
        problems += _check_dense(dense, plan, files) + _unplaced(model, files, taken, dense, plan)
        for name, choice in plan.choices.items():
            problems += [
                f"{_where(choice, files)}: {name}: {p}" for p in _misfits(name, modules[name], choice, files, phase)
            ]
    if phase and not any(resolved(c.scheme, c.params, None).phases for c in plan.choices.values()):
        problems.append(f"no layer of it has phases, and phase = {phase!r} was asked for")
    problems = of_experts.together([of_experts.as_stored(problem, experts) for problem in problems])
    notices = [of_experts.as_stored(notice, experts) for notice in _notices(plan)]
    return Examination(method, source, plan, experts, stacks, quantized, files, dense, problems, notices)


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


def floats(source: str, found: Examination) -> torch.Tensor:
    """The numbers of a dense tensor by its stored name, in the type they are stored in."""
    made = found.plan.dense.get(source)
    return found.files[source] if made is None else made.make({name: found.files[name] for name in made.sources})


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
        problems.append(f"{file}: {some(names)} {'has' if len(names) == 1 else 'have'} no place in the model")
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
    if choice.tag is not None:
        return _unlike_tag(name, scheme, module, choice.tag, kept_tensors(scheme, choice.bias, role), files)
    if not choice.layout:
        return unquantized.misfits(name, module, choice, files.headers)
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


def _where(choice: Choice, files: Stored) -> str:
    """The files that hold a module."""
    return ", ".join(sorted({files.file[stored].name for stored in choice.tensors if stored in files.file}))


# ---- layers ------------------------------------------------------------------------------------------------------
def empty_layer(
    name: str, old: nn.Module, found: Examination, device: torch.device | str | None, dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> QuantLinear | QuantExperts:  # fmt: skip
    """A layer without numbers for a module; raises what the layer's constructor does."""
    place, wanted = _home(_like(old), device, dtype)

    def made(kind, module: str, one: Module, *count: int):
        choice = found.plan.choices[module]
        own = {**options, "phase": _phase(choice, options["phase"]), **choice.params}
        given = None if choice.tag is not None else wanted  # None: as it was saved; `filled` casts it
        return kind(*count, choice.scheme, one.k, one.n, choice.bias, place, given, **own)

    if name not in found.stacks:
        assert isinstance(old, nn.Linear), "plans name linears of the model, and experts"
        return made(QuantLinear, name, Module(old.out_features, old.in_features, old.bias is not None))
    stacks = {p.name: made(QuantStack, p.modules[0], p.one, len(p.modules)) for p in found.stacks[name]}
    if isinstance(old, nn.ModuleList):
        return ListedExperts(old, stacks)
    return StackedExperts(old, found.experts[name][0], stacks)


def _like(old: nn.Module) -> torch.Tensor:
    """The parameter whose type and device a layer takes over."""
    return next(old.parameters())


def _phase(choice: Choice, phase: str) -> str:
    return phase if resolved(choice.scheme, choice.params, None).phases else ""


def filled(
    layer: QuantLinear | QuantExperts, name: str, found: Examination, dtype: torch.dtype
) -> QuantLinear | QuantExperts:
    """The layer, which now has the numbers of a module; `dtype` is the type of its activations."""
    choices, files = found.plan.choices, found.files
    if isinstance(layer, QuantLinear):
        _give(layer, name, choices[name], files, dtype)
        return layer
    for p in found.stacks[name]:
        stack = layer.projections[p.name]
        if choices[p.modules[0]].tag is not None:
            _give(stack, p.modules[0], choices[p.modules[0]], files, dtype)
            continue
        stack.fill(
            lambda e, one, p=p: _give(
                one,
                p.modules[e],
                choices[p.modules[e]],
                files.member(e) if isinstance(files, Unstacked) else files,
                dtype,
            )
        )
    return layer


def _give(layer: QuantLinear | QuantStack, name: str, choice: Choice, files: Stored, dtype: torch.dtype) -> None:
    try:
        if choice.tag is not None:  # cloned: the memory of a reader is not aligned as kernels want it
            layer.load_state_dict({short: files[full].clone() for full, short in choice.tensors.items()})
            layer.to(dtype)
            return
        if not choice.layout:
            given = {short: files[full] for full, short in choice.tensors.items()}
            layer.quantize(given["weight"], given.get("bias"))
            return
        stored = _Renamed(files, name, replace(choice, leading={}), {})
        own = {full.removeprefix(f"{name}."): stored[full] for full in stored} if choice.made else {}
        made = {short: made.make(own) for short, made in choice.made.items()}
        layer.load(_Renamed(files, name, choice, {**choice.given, **made}), f"{name}.", choice.layout)
    except (Error, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{_where(choice, files)}: {name}: {problem}") from None


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


def _home(
    old: torch.Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Where the value of a dense tensor goes, and in what type."""
    kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
    return torch.device(device) if device is not None else torch.device("cpu") if old.is_meta else old.device, kind


def _install(
    model: nn.Module, layers: Mapping[str, QuantLinear | QuantExperts], dense: Mapping[str, tuple[torch.Tensor, str]],
    values: Mapping[str, torch.Tensor], device: torch.device | str | None,
) -> None:  # fmt: skip
    """Change the model, at last."""
    for name, layer in layers.items():
        put(model, name, layer)
    new: dict[int, torch.Tensor] = {}
    for name, (old, _) in dense.items():
        value = values[name]
        if value.device == old.device and value.dtype == old.dtype:
            old.data.copy_(value)
            continue
        new[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, old in table.items():
                if id(old) in new:
                    table[name] = new[id(old)]
    if device is not None:
        model.to(device)  # buffers that no checkpoint holds


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of a module of the model."""
    parent, _, last = name.rpartition(".")
    layer.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), last, layer)


def progress(names: Iterable[str], what: str) -> Iterable[str]:
    """The names, with a bar when going through them takes longer than a second."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return names
    return tqdm(names, what, delay=1, leave=False)
