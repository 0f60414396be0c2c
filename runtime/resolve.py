"""Which scheme a layer has, with which parameters, and whether a layer of its size can have it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qdsl
from qdsl import transform
from qdsl.diagnostic import Diagnostic, Error, SchemeError, error
from qdsl.dtype import DType
from qdsl.expr import Binary, Expr, Item, Ref, names, walk
from qdsl.manifest import plain_params
from qdsl.runtime import repack
from qdsl.scheme import Free, Scheme, Storage, Tensor, Var, shape_error


@functools.lru_cache(maxsize=256)
def parsed(text: str, path: str, params: tuple[tuple[str, int | str], ...]) -> Scheme:
    return qdsl.parse(text, path, **dict(params))


@functools.lru_cache(maxsize=256)
def _named(name: str, modified: int, params: tuple[tuple[str, Any], ...]) -> Scheme:
    return qdsl.load(name, **dict(params))


def resolved(scheme: str | Path | Scheme, params: Mapping[str, Any], dtype: torch.dtype | None) -> Scheme:
    """The scheme with its parameters, its activation type among them."""
    if isinstance(scheme, Scheme):
        found = _rebound(scheme, params) if params else scheme
    else:
        path = Path(scheme)
        modified = path.stat().st_mtime_ns if path.is_file() else 0
        found = _named(
            str(scheme), modified, tuple(sorted((k, str(v) if isinstance(v, DType) else v) for k, v in params.items()))
        )
    if repack.torch_dtype(found.output.dtype) is None:
        raise Error(f"{found.bound}: a layer's output is f16, bf16 or f32, not {found.output.dtype}")
    return found if dtype is None else with_dtype(found, dtype)


def _rebound(scheme: Scheme, params: Mapping[str, Any]) -> Scheme:
    plain_ = {name: str(v) if isinstance(v, DType) else v for name, v in params.items()}
    return parsed(scheme.text, scheme.name, tuple({**plain_params(scheme), **plain_}.items()))


def with_dtype(scheme: Scheme, kind: torch.dtype) -> Scheme:
    """The scheme with activations of a torch type; raises TypeError by name when it has none."""
    have = repack.torch_dtype(scheme.output.dtype)
    if kind == have:
        return scheme
    wanted = repack.format_of(kind)
    if wanted is None:
        raise TypeError(f"{scheme.bound}: activations are float16, bfloat16 or float32, not {kind}; cast x to {have}")
    if "act" not in scheme.params:
        raise TypeError(f"{scheme.bound} takes {have} only (it has no parameter `act`), not {kind}; cast x to {have}")
    try:
        found = _rebound(scheme, {"act": wanted})
    except SchemeError as problem:
        raise TypeError(f"{scheme.bound} can't take {kind}; cast x to {have}\n{problem}") from None
    if found.output.dtype != wanted:
        raise TypeError(f"{scheme.bound} gives {have} whatever `act` is, not {kind}; cast x to {have}")
    return found


def check_layer(scheme: Scheme, k: int, n: int, bias: bool, phase: str) -> None:
    """Raises Error when no layer of this size can have this scheme."""
    if scheme.experts:
        raise Error(f"{scheme.bound} declares a stack of experts; a QuantLinear is one matrix")
    if (broken := scheme.violated(n, k)) is not None:
        raise Error(f"{scheme.bound} requires {broken}, and this layer has n = {n}, k = {k}")
    if scheme.output.half and n % scheme.output.half[1]:
        raise Error(
            f"{scheme.bound} folds {scheme.output.half[1]} features into one, and n = {n} is no multiple of that"
        )
    if phase not in ("", "both") and phase not in scheme.phases:
        known = ", ".join(scheme.phases) or "none"
        raise Error(f"{scheme.bound} has no phase `{phase}` (it has: {known})")
    if bias and not any(t.role == "bias" for t in scheme.output.tensors):
        raise Error(
            f"{scheme.bound} declares no bias; construct the layer with bias=False, or add `bias b[n]` to its output block"
        )
    for t in kept_tensors(scheme, bias, phase).values():
        if Var("m") in t.index:
            raise Error(f"{scheme.bound}: `{t}` has no size before a call, and a QuantLinear can't hold it yet")


def check_rows_stand_alone(scheme: Scheme, phase: str) -> None:
    """Raises Error when a row of y depends on other rows of x by the scheme's own equations."""
    active = scheme.activation(phase)
    for t in active.operand.tensors if active else ():
        if isinstance(t.value, Expr) and Var("m") not in t.index:
            raise Error(
                f"{scheme.bound} can't be batch-invariant: `{t}` is computed from all rows of x together; "
                f"give `{t.name}` the index m, or leave batch_invariant out"
            )


def check_quantizes(scheme: Scheme, bias: bool, phase: str) -> None:
    """Raises Error when a float layer can't tell all that a layer of this scheme keeps."""
    if not scheme.quantize:
        raise Error(f"{scheme.bound} has no `quantize` block, so that nothing says how floats become its codes")
    active = scheme.activation(phase)
    if active is not None and active.operand.loaded:
        loaded = ", ".join(f"`{t.name}`" for t in active.operand.loaded)
        raise Error(f"{scheme.bound}: {loaded} must be calibrated, which a float layer can't tell; use set_patterns()")
    made = {t.name for t in scheme.weight.loaded}
    for t in kept_tensors(scheme, bias, phase).values():
        if t.name in made:
            continue
        if t.role != "bias":
            raise Error(f"{scheme.bound}: `{t.name}` is none of the weight's tensors, and a float layer can't tell it")
        if not t.dtype.is_float or _is_scaled(t, scheme):
            raise Error(f"{scheme.bound}: `{t.name}` is not in the unit of y, and that of a float layer is")


def _is_scaled(bias: Tensor, scheme: Scheme) -> bool:
    """Whether the output multiplies a bias by a tensor of an operand."""
    scales = {t.name for operand in (scheme.weight, *(a.operand for a in scheme.activations)) for t in operand.tensors}
    return any(
        isinstance(node, Binary)
        and node.op in "*/"
        and any(bias.name in names(a) and scales & names(b) for a, b in itertools.permutations(node.children()))
        for node in walk(scheme.output.value)
    )


def kept_tensors(scheme: Scheme, bias: bool, phase: str) -> dict[str, Tensor]:
    """The tensors a layer keeps, by name: not a residual, which comes with every call."""
    active = scheme.activation(phase)
    tensors = [*scheme.weight.loaded, *(active.operand.loaded if active else ())]
    kept = (t for t in scheme.output.tensors if t.loaded and t.role != "residual")
    tensors += [t for t in kept if not t.optional or (bias and t.role == "bias")]
    return {t.name: t for t in tensors}


def free_names(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The indices whose extents the numbers of a layer decide."""
    return tuple(dict.fromkeys(i.name for t in tensors.values() for i in t.index if isinstance(i, Free)))


def free_extents(scheme: Scheme, phase: str, shapes: Mapping[str, Sequence[int]], n: int, k: int) -> dict[str, int]:
    """The extents of those indices, from the logical shapes of the tensors that have them.

    Raises ValueError where the shapes disagree with each other, or with a transform of x of k features.
    """
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        index = scheme.tensor(name).index
        if not any(isinstance(i, Free) for i in index):
            continue
        if len(shape) != len(index):
            raise ValueError(f"`{name}` is {list(shape)}, and the scheme declares {len(index)} indices")
        for i, size in zip(index, shape, strict=True):
            if isinstance(i, Free) and found.setdefault(i.name, size) != size:
                raise ValueError(
                    f"`{name}` is {list(shape)}, and `{i}` has {found[i.name]} positions in another tensor"
                )
    active, sizes = scheme.activation(phase), {"e": 1, "m": 1, "n": n, "k": k, **found}
    for t in active.transforms if active else ():
        logical = {name: scheme.tensor(name).shape(sizes, scheme) for name in transform.loaded(t)}
        transform.extents(t, {"x": (1, k), **logical})
    return found


def follows(scheme: Scheme, declared: Tensor) -> bool:
    """Whether a tensor has the type of the activations, so that its own values must outlive a change of that."""
    output = scheme.output
    return "act" in scheme.params and declared in output.tensors and declared.dtype == output.dtype


def misfits(
    scheme: Scheme, storage: Storage, n: int, k: int, bias: bool, phase: str, tensors: Mapping[str, torch.Tensor],
    prefix: str,
) -> list[Diagnostic]:  # fmt: skip
    """What keeps a layer of n outputs and k inputs from reading these tensors, by shape and type alone (they may be on
    the meta device)."""
    sizes, problems = {"e": 1, "m": 1, "n": n, "k": k}, []
    kept = kept_tensors(scheme, bias, phase)
    wanted = dict(kept)
    for binding in storage.bindings:
        name, declared = prefix + binding.source, scheme.tensor(binding.tensor)
        if name not in tensors:
            continue
        found = tensors[name]
        if declared.optional and declared.name not in kept and (found.is_meta or bool((found != 0).any())):
            message = f"checkpoint tensor `{name}` is there, but the layer was made without `{declared.name}`"
            problems.append(error("unused-tensor", message, binding.span, fix="construct it with bias=True"))
        elif declared.name in wanted and follows(scheme, declared) and repack.format_of(found.dtype):
            del wanted[declared.name]  # any float will do, it is kept as it is; only the shape matters
            needed = binding.layout.stored_shape(declared.shape(sizes, scheme))
            if tuple(found.shape) != tuple(needed):
                problems.append(shape_error(scheme, binding, name, found.shape, needed, n, k))
    problems = [*repack.mismatches(scheme, storage, tensors, prefix, sizes, wanted), *problems]
    return problems or _free_misfits(scheme, storage, n, k, kept, phase, tensors, prefix)


def _free_misfits(
    scheme: Scheme, storage: Storage, n: int, k: int, kept: Mapping[str, Tensor], phase: str,
    tensors: Mapping[str, torch.Tensor], prefix: str,
) -> list[Diagnostic]:  # fmt: skip
    """What is wrong with the extents that tensors decide, each of which is well by itself."""
    if not free_names(kept):
        return []
    sizes = {"e": 1, "m": 1, "n": n, "k": k, **dict.fromkeys(free_names(kept), 0)}
    bound = [b for b in storage.bindings if b.tensor in kept and prefix + b.source in tensors]
    shapes = {b.tensor: repack.logical_shape(scheme, b, sizes, tensors[prefix + b.source]) for b in bound}
    try:
        free_extents(scheme, phase, shapes, n, k)
    except ValueError as problem:
        about = next(t for t in kept.values() if free_names({t.name: t}))
        return [error("shape", f"{scheme.bound}: {problem}", about.span, f"with k = {k}")]
    return []


def check_codes(scheme: Scheme, declared: Tensor, patterns: np.ndarray, name: str) -> None:
    """Codes must be numbers, and those that look a table up must name entries it has."""
    if declared.role == "code" and declared.dtype.is_float:
        wrong = ~np.isfinite(declared.dtype.decode(np.arange(1 << declared.dtype.bits)))[patterns]
        if wrong.any():
            at = [int(i) for i in np.argwhere(wrong)[0]]
            raise ValueError(
                f"`{name}` holds {int(wrong.sum())} codes that are no numbers; the first, {int(patterns[tuple(at)]):#04x} "
                f"at {at}, is {declared.dtype.decode(patterns[tuple(at)]):g} in {declared.dtype}"
            )
    for node in walk(scheme.weight.decode):
        if isinstance(node, Item) and node.args == (Ref(declared.name),):
            size = scheme.tensor(node.name).shape({})[0]
            if patterns.size and int(patterns.max()) >= size:
                raise ValueError(
                    f"`{name}` holds code {int(patterns.max())}, but table `{node.name}` has only {size} entries"
                )
