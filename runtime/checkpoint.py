"""load_quantized: a quantized checkpoint, or a float one and a scheme, into a model whose nn.Linears it replaces.

Everything that can be wrong is looked for first, in file headers alone (`qdsl.runtime.examination`).  Then the quantized
layers are made and filled beside the model, and only when all of them exist does the model change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error
from qdsl.runtime.examination import Examination, examine, refuse, role, where, wish
from qdsl.runtime.experts import ListedExperts, QuantExperts, StackedExperts
from qdsl.runtime.fused import QuantFused
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.parallel import Joint, meets
from qdsl.runtime.resolve import resolved
from qdsl.runtime.shard import cut, cut_patterns
from qdsl.runtime.stack import QuantStack
from qdsl.runtime.stored import Renamed, Stored, Unstacked, some
from qdsl.runtime.weight import quantized
from qdsl.scheme import Scheme

Layer = QuantLinear | QuantFused | QuantExperts  # what stands in a module's place


def load_quantized(
    model: nn.Module, directory: str | Path, *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, compile: str = "auto", batch_invariant: bool = False, phase: str = "",
    settings: Mapping[str, Any] | None = None, scheme: str | Path | Scheme | None = None,
    params: Mapping[str, Any] | None = None, skip: Sequence[str] | None = None, shard: tuple[int, int] | None = None,
    tp_plan: Mapping[str, str] | None = None, prefix: str = "",
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
    shard      (rank, world): load this rank's part of every linear that the model's plan for tensor parallelism splits
    tp_plan    in place of the model's own (`config.base_model_tp_plan`): {"model.layers.*.mlp.up_proj": "colwise", ...}
    prefix     what the names of the model's tensors begin with in the checkpoint, such as "language_model.": the model is a
               part of the one that was stored, whose other tensors are left out

    Linears that the checkpoint stores quantized, or of which the scheme makes codes, become `QuantLinear`s, the experts of a
    layer, be they 3-D parameters or lists of linears, `QuantExperts`; every other parameter is loaded as it is.  A tied head
    stays tied unless it is one of them.  Of a sharded model, layers that are split by rows or whose outputs are gathered
    speak with the other ranks through torch.distributed, once that is initialized.  Raises CheckpointError, listing all
    that is wrong and naming file and tensor, before the model changes.
    """
    directory = Path(directory)
    if shard is None and tp_plan is not None:
        raise ValueError("tp_plan says what to split, and without shard = (rank, world) nothing is")
    if shard is not None:
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard is (rank, world) with 0 <= rank < world, not {shard}")
        meets(*shard)
    found = examine(model, directory, phase, settings, wish(model, scheme, params, skip), shard, tp_plan, prefix)
    for notice in found.notices:
        warnings.warn(f"{directory}: {notice}", stacklevel=2)
    refuse(directory, [*found.problems, *_without_memory(model, found.dense)])
    options = {"compile": compile, "batch_invariant": batch_invariant, "phase": phase}
    layers = empty_layers(model, directory, found, device, dtype, options)
    for name in progress(layers, "loading quantized layers" if scheme is None else "quantizing layers"):
        layers[name] = filled(layers[name], name, found, _home(_like(model.get_submodule(name)), device, dtype)[1])
    values = {}
    for name, (old, _) in found.dense.items():  # one by one, so that no two copies of all of them are there
        place, kind = _home(old, device, dtype)
        values[name] = floats(name, found).to(place, kind)
    _install(model, layers, found.dense, values, device)
    for name, (part, _) in found.parts.items():
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear):
            linear.in_features, linear.out_features = part.k, part.n
            linear.bias = linear.bias if part.has_bias else None
        if part.world > 1:
            Joint(part).join(linear)
    return model


# ---- layers ------------------------------------------------------------------------------------------------------
def empty_layers(
    model: nn.Module, directory: Path, found: Examination, device: torch.device | str | None,
    dtype: torch.dtype | None, options: Mapping[str, Any],
) -> dict[str, Layer]:  # fmt: skip
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


def empty_layer(
    name: str, old: nn.Module, found: Examination, device: torch.device | str | None, dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> Layer:  # fmt: skip
    """A layer without numbers for a module, or for a rank's part of it; raises what the layer's constructor does."""
    place, wanted = _home(_like(old), device, dtype)

    def made(kind, module: str, n: int, k: int, *count: int):
        choice = found.plan.choices[module]
        bias, params = choice.bias, choice.params
        if module in found.parts:
            part, params = found.parts[module]
            n, k, bias = part.n, part.k, bias and part.has_bias
        own = {**options, "phase": role(choice, options["phase"]), **params}
        given = None if choice.tag is not None else wanted  # None: as it was saved; `filled` casts it
        return kind(*count, choice.scheme, k, n, bias, place, given, **own)

    if name not in found.stacks:
        assert isinstance(old, nn.Linear), "plans name linears of the model, and experts"
        if name in found.fused.joined:
            own = {part: found.fused.modules[part] for part in found.fused.joined[name]}
            return QuantFused({p.rpartition(".")[2]: made(QuantLinear, p, one.n, one.k) for p, one in own.items()})
        return made(QuantLinear, name, old.out_features, old.in_features)
    stacks = {p.name: made(QuantStack, p.modules[0], p.one.n, p.one.k, len(p.modules)) for p in found.stacks[name]}
    if isinstance(old, nn.ModuleList):
        return ListedExperts(old, stacks)
    return StackedExperts(old, found.experts[name][0], stacks)


def _like(old: nn.Module) -> torch.Tensor:
    """The parameter whose type and device a layer takes over."""
    return next(old.parameters())


def filled(layer: Layer, name: str, found: Examination, dtype: torch.dtype) -> Layer:
    """The layer, which now has the numbers of a module; `dtype` is the type of its activations."""
    choices, files = found.plan.choices, found.files
    if isinstance(layer, QuantLinear):
        _give(layer, name, found, files, dtype)
        return layer
    if isinstance(layer, QuantFused):
        for own, part in zip(layer.projections.values(), found.fused.joined[name], strict=True):
            _give(own, part, found, files, dtype)
        return layer
    for p in found.stacks[name]:
        stack = layer.projections[p.name]
        if choices[p.modules[0]].tag is not None:
            _give(stack, p.modules[0], found, files, dtype)
            continue
        stack.fill(
            lambda e, one, p=p: _give(
                one, p.modules[e], found, files.member(e) if isinstance(files, Unstacked) else files, dtype
            )
        )
    return layer


def _give(layer: QuantLinear | QuantStack, name: str, found: Examination, files: Stored, dtype: torch.dtype) -> None:
    choice = found.plan.choices[name]
    try:
        if choice.tag is not None:  # cloned: the memory of a reader is not aligned as kernels want it
            layer.load_state_dict({short: files[full].clone() for full, short in choice.tensors.items()})
            layer.to(dtype)
            return
        if not choice.layout:
            _quantize(layer, name, found, {short: files[full] for full, short in choice.tensors.items()})
            return
        stored = Renamed(files, name, replace(choice, leading={}), {})
        own = {full.removeprefix(f"{name}."): stored[full] for full in stored} if choice.made else {}
        others = {**choice.given, **{short: made.make(own) for short, made in choice.made.items()}}
        tensors: Mapping[str, torch.Tensor] = Renamed(files, name, choice, others)
        if name in found.parts:
            tensors = _cut(layer.phase, name, found, others)
        layer.load(tensors, f"{name}.", choice.layout)
    except (Error, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{where(choice, files)}: {name}: {problem}") from None


def _quantize(layer: QuantLinear, name: str, found: Examination, stored: dict[str, torch.Tensor]) -> None:
    """With the scales of the whole layer, also where a part of it is loaded.  Takes the floats out of `stored`, so that
    nothing holds them when codes are packed."""
    choice, bias = found.plan.choices[name], stored.pop("bias", None)
    whole = resolved(choice.scheme, choice.params, layer.dtype)
    patterns = quantized(whole, stored.pop("weight"))
    if name in found.parts:
        part, _ = found.parts[name]
        patterns = cut_patterns(whole, layer.scheme, part, patterns)
        if bias is not None:
            bias = bias[part.rows] if part.has_bias else torch.zeros_like(bias)
    layer.set_weight(patterns, bias)


def _cut(phase: str, name: str, found: Examination, others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rank's part of a module's tensors."""
    choice, (part, params) = found.plan.choices[name], found.parts[name]
    whole, own = (resolved(choice.scheme, given, None) for given in (choice.params, params))
    headers = Renamed(found.files.headers, name, choice, others)

    def read(full: str, at: tuple[slice, ...]) -> torch.Tensor:
        made = headers.others.get(full)
        return found.files.part(headers.stored[full], at) if made is None else made[at]

    return cut(whole, own, choice.layout, part, phase, choice.bias, headers, f"{name}.", read)


def floats(name: str, found: Examination) -> torch.Tensor:
    """The numbers of a dense tensor, or of the rank's part of it, in the type they are stored in."""
    old, source = found.dense[name]
    made, module = found.plan.dense.get(source), name.rpartition(".")[0]
    own = found.parts.get(module)
    at = (own[0].rows, own[0].columns)[: old.dim()] if own else ()
    if made is not None:
        return made.make({name: found.files[name] for name in made.sources})[at]
    return found.files.part(source, at) if at else found.files[source]


def _without_memory(model: nn.Module, dense: Mapping[str, tuple[torch.Tensor, str]]) -> list[str]:
    """Buffers on the meta device that nothing will fill."""
    meta = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in dense]
    if not meta:
        return []
    return [
        f"the model's {some(meta)} on the meta device come from no checkpoint; build it with real buffers "
        "(accelerate's init_empty_weights keeps them), or on the CPU"
    ]


def _home(
    old: torch.Tensor, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Where the value of a dense tensor goes, and in what type."""
    kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
    return torch.device(device) if device is not None else torch.device("cpu") if old.is_meta else old.device, kind


def _install(
    model: nn.Module, layers: Mapping[str, Layer], dense: Mapping[str, tuple[torch.Tensor, str]],
    values: Mapping[str, torch.Tensor], device: torch.device | str | None,
) -> None:  # fmt: skip
    """Change the model, at last."""
    for name, layer in layers.items():
        put(model, name, layer)
    new: dict[int, torch.Tensor] = {}
    for name, (old, _) in dense.items():
        value = values[name]
        if value.device == old.device and value.dtype == old.dtype and value.shape == old.shape:
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
