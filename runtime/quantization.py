"""From a checkpoint of floats to a quantized one, in a layout that the readers of its format know: `qdsl quantize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error
from qdsl.manifest import plain_params
from qdsl.runtime import repack
from qdsl.runtime.checkpoint import floats
from qdsl.runtime.checkpoints import FORMATS, Choice, Module
from qdsl.runtime.checkpoints.modules import groups_of
from qdsl.runtime.checkpoints.written import Written, all_writable, known_as, writable, written
from qdsl.runtime.examination import Examination, examine, linears, refuse, wish
from qdsl.runtime.inspection import empty_model
from qdsl.runtime.resolve import follows, misfits, resolved, with_dtype
from qdsl.runtime.weight import quantized
from qdsl.runtime.writing import PART, check_free, in_files, sources, write
from qdsl.scheme import Scheme, Storage


def quantize(
    checkpoint: str | Path, out: str | Path, scheme: str | Path | Scheme, params: Mapping[str, Any] | None = None, *,
    layout: str | None = None, skip: Sequence[str] | None = None, model: nn.Module | None = None, part: int = PART,
) -> Path:  # fmt: skip
    """Quantize a checkpoint layer by layer; returns `out`, which holds the numbers that load_quantized(scheme=…) gives.

    checkpoint   a directory of config.json and safetensors with floats
    scheme       with a `quantize` block; `params` and `skip` are as for load_quantized
    layout       of the scheme, by default the first for which a format has a configuration
    model        of its architecture, whose parameters may be on "meta"; by default transformers builds it from config.json
    part         bytes of floats that go into one file of the result, which has at least one module

    config.json gets the `quantization_config` of the layout's format; the tokenizer and what else belongs to the model
    (`writing.BESIDE`) go along.  At most one file of the result is in memory at a time.  Raises CheckpointError as
    load_quantized does, before anything is written, and Error where `out` is there already, or no configuration would
    say what is written.  A scale of which the layout stores the reciprocal is rounded once more than loading does.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    check_free(out)
    model = empty_model(checkpoint) if model is None else model
    asked = wish(model, scheme, params, skip)
    assert asked is not None, "there is a scheme"
    storage, shipped = _storage(asked.scheme, layout)
    found = examine(model, checkpoint, asked=asked)
    refuse(checkpoint, [*found.problems, *found.notices])  # no configuration says that experts are left out
    if other := [*found.fused.joined, *found.fused.rows]:
        refuse(
            checkpoint, [f"`{other[0]}` of the model is stored in other linears, and what is written has their names"]
        )
    choices = found.plan.choices
    modules = linears(model)
    said = written(shipped, storage.name, [name for name in modules if name not in choices])
    assert said is not None, "its layout is writable"
    refuse(checkpoint, [p for name in choices for p in _unlike(name, modules[name], storage, said, found)])

    def tensors(name: str) -> Mapping[str, torch.Tensor]:
        if name not in choices:
            return {name: floats(name, found)}
        try:
            return _stored(name, modules[name], choices[name], storage, said, found)
        except Error as problem:
            raise CheckpointError(f"{checkpoint}: {name}: {problem}") from None

    _check_reading(out, modules, shipped, storage, said, found)
    journal = {
        "source": sources(found),
        "scheme": asked.scheme.text,
        "params": plain_params(asked.scheme),
        "layout": storage.name,
    }
    parts = in_files(model, found, part)
    return write(out, checkpoint, parts, tensors, said.settings, journal=journal, what="quantizing layers")


# ---- the layout --------------------------------------------------------------------------------------------------
def _storage(scheme: Scheme, layout: str | None) -> tuple[Storage, Scheme]:
    """(the layout, the shipped scheme that means the same in it)."""
    known = writable(scheme)
    if layout is not None and layout not in scheme.layouts:
        raise Error(f"{scheme.bound}: no layout `{layout}` (it has: {', '.join(scheme.layouts) or 'none'})")
    if not known:
        others = "; ".join(f"{name}: {', '.join(layouts)}" for name, layouts in all_writable())
        has = f"its layouts ({', '.join(scheme.layouts)}) are" if scheme.layouts else "it has no layouts, so it is"
        raise Error(
            f"{scheme.bound}: {has} of no format whose configuration qdsl writes: `qdsl convert --scheme` quantizes by any; "
            f"schemes and layouts that have one: {others}"
        )
    if layout is not None and layout not in known:
        raise Error(
            f"{scheme.bound}: layout `{layout}` is of no format whose configuration qdsl writes; take {' or '.join(known)}"
        )
    chosen = layout or known[0]
    shipped = known_as(scheme, chosen)
    assert shipped is not None, "it is writable"
    return scheme.layouts[chosen], shipped


def _unlike(name: str, module: Module, storage: Storage, said: Written, found: Examination) -> list[str]:
    """What keeps a module from being stored so."""
    problems = []
    for size, unit, axis in ((module.n, said.multiples[0], "n"), (module.k, said.multiples[1], "k")):
        if size % unit:
            problems.append(
                f"{name}: {axis} = {size} is no multiple of {unit}, as readers of layout `{storage.name}` need; choose "
                "other groups, or leave it out by `skip`"
            )
    bias = [t.name for t in resolved(found.plan.choices[name].scheme, {}, None).output.tensors if t.role == "bias"]
    if module.bias and not any(b.tensor in bias for b in storage.bindings):
        problems.append(f"{name}: it has a bias, and layout `{storage.name}` stores none; leave it out by `skip`")
    return problems


# ---- one module --------------------------------------------------------------------------------------------------
def _stored(
    name: str, module: Module, choice: Choice, storage: Storage, said: Written, found: Examination
) -> dict[str, torch.Tensor]:
    """What is stored of a module, by full name."""
    stored = {short: found.files[full] for full, short in choice.tensors.items()}
    scheme = _of_type(choice, stored["weight"].dtype)
    patterns: dict[str, np.ndarray] = quantized(scheme, stored["weight"])
    kept = {}
    for binding in storage.bindings:
        declared = scheme.tensor(binding.tensor)
        if declared.role == "bias" and module.bias:
            if follows(scheme, declared):  # kept as it is, whatever float it is
                kept[binding.source] = stored["bias"]
            else:
                patterns[declared.name] = declared.dtype.encode(stored["bias"].double().numpy())
    own = repack.write(scheme, scheme.layouts[storage.name], patterns) | kept | said.beside(module.n, module.k)
    return {f"{name}.{short}": tensor.view(said.kinds.get(short, tensor.dtype)) for short, tensor in own.items()}


def _of_type(choice: Choice, kind: torch.dtype) -> Scheme:
    """The scheme for activations of a type, where it has a choice."""
    scheme = resolved(choice.scheme, choice.params, None)
    return with_dtype(scheme, kind) if "act" in scheme.params else scheme


# ---- what the readers will make of it ----------------------------------------------------------------------------
def _check_reading(
    out: Path, modules: Mapping[str, Module], shipped: Scheme, storage: Storage, said: Written, found: Examination
) -> None:
    """The configuration must say what is written: read by headers alone, it gives the scheme and the layout back."""
    headers: dict[str, torch.Tensor] = {name: tensor for name, (tensor, _) in found.dense.items()}
    beside: dict[str, torch.Tensor] = {}
    for name, choice in found.plan.choices.items():
        module, scheme = modules[name], _of_type(choice, found.files.headers[next(iter(choice.tensors))].dtype)
        own = said.beside(module.n, module.k)
        beside |= {f"{name}.{short}": tensor for short, tensor in own.items()}
        headers |= {f"{name}.{short}": tensor.to("meta") for short, tensor in own.items()}
        sizes = {"e": 1, "m": 1, "n": module.n, "k": module.k}
        for binding in scheme.layouts[storage.name].bindings:
            declared = scheme.tensor(binding.tensor)
            if declared.role != "bias" or module.bias:
                shape = binding.layout.least_shape(declared.shape(sizes, scheme))
                kind = said.kinds.get(binding.source, repack.stored_type(binding.stored))
                headers[f"{name}.{binding.source}"] = torch.empty(shape, dtype=kind, device="meta")
    method = said.settings["quant_method"]
    plan = FORMATS[method](said.settings, modules, headers, beside.__getitem__)
    problems = [*plan.problems, *plan.contradictions]
    for name, module in modules.items():
        choice = plan.choices.get(name)
        if (choice is None) != (name not in found.plan.choices):
            problems.append(f"`{name}` would {'not ' if choice is None else ''}be read as quantized")
        elif choice is not None:
            read, wanted = resolved(choice.scheme, choice.params, None), plain_params(shipped)
            if isinstance(wanted.get("group"), int):
                wanted["group"] = groups_of(wanted["group"], module.k)[0]
            same = resolved(shipped.name, {**wanted, "act": str(read.params["act"])}, None)
            own = {short: headers[full] for full, short in choice.tensors.items()}
            unfit = misfits(read, storage, module.n, module.k, module.bias, "", own, "")
            if read.bound != same.bound or choice.layout != storage.name or unfit:
                problems.append(f"`{name}` would be read as {read.bound}, layout {choice.layout}")
    if problems:
        raise Error(f"{out}: the settings of {method} can't say what would be written: {'; '.join(problems[:4])}")
