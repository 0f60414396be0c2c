"""From a checkpoint, quantized or of floats with a scheme, to one in kernel layout, which loads without repacking:
`qdsl convert`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.cache import compiler_fingerprint
from qdsl.manifest import Buffer
from qdsl.runtime.artifact import best_arch, buffers_of
from qdsl.runtime.checkpoint import empty_layers, filled, floats
from qdsl.runtime.checkpoints import converted
from qdsl.runtime.examination import examine, refuse, wish
from qdsl.runtime.experts import parts_of
from qdsl.runtime.inspection import empty_model
from qdsl.runtime.state import EXTRA, Tag
from qdsl.runtime.writing import PART, check_free, in_files, sources, write
from qdsl.scheme import Scheme


def convert(
    checkpoint: str | Path, out: str | Path, *, kind: str = "cpu", arch: str | None = None,
    model: nn.Module | None = None, phase: str = "", settings: Mapping[str, Any] | None = None,
    scheme: str | Path | Scheme | None = None, params: Mapping[str, Any] | None = None,
    skip: Sequence[str] | None = None, part: int = PART,
) -> Path:  # fmt: skip
    """Repack a checkpoint for a target's kernels; returns `out`, which `load_quantized` reads as any other checkpoint.

    checkpoint   what `load_quantized` reads: a directory, or a GGUF file
    kind, arch   of the target, such as "cuda" and "sm_90a"; by default this machine's CPU. Another target reads the
                 result as well, and repacks it
    model        of its architecture, whose parameters may be on "meta"; by default transformers builds it from config.json
    phase        as for load_quantized, and so are `settings`, and for a checkpoint of floats `scheme`, `params`, `skip`
    part         stored bytes that go into one file of the result, which has at least one module

    Tensors keep their bits, quantized or not. Beside the weights come config.json, with other quantization settings, the
    tokenizer and what else belongs to them (`writing.BESIDE`). At most one file of the result is in memory at a time. Raises
    CheckpointError as load_quantized does, before anything is written, and Error where `out` is there already.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    home = checkpoint.parent if checkpoint.is_file() else checkpoint
    check_free(out)
    arch = arch or best_arch(torch.device(kind))
    model = empty_model(home) if model is None else model
    asked = wish(model, scheme, params, skip)
    found = examine(model, checkpoint, phase, settings, asked)
    for notice in found.notices:
        warnings.warn(f"{checkpoint}: {notice}", stacklevel=2)
    refuse(checkpoint, found.problems)
    options = {"compile": "auto", "batch_invariant": False, "phase": phase}
    layers = empty_layers(model, checkpoint, found, torch.device("meta"), None, options)
    layouts: dict[tuple[str, str], tuple[Buffer, ...]] = {}  # of a scheme, by its text and parameters

    def tensors(name: str) -> Mapping[str, torch.Tensor]:
        if name not in layers:
            return {name: floats(name, found)}
        layer = filled(layers.pop(name), name, found, next(model.get_submodule(name).parameters()).dtype)
        named: dict[str, torch.Tensor] = {}
        for prefix, own in parts_of(layer).items():
            made = own.scheme
            if (made.text, made.bound) not in layouts:
                layouts[made.text, made.bound] = buffers_of(made, kind, arch)
            state = own.state_for(layouts[made.text, made.bound], kind)
            named |= {f"{name}.{prefix}{each}": tensor for each, tensor in state.items()}
        return {**named, **converted.guard(f"{name}.{layer.replaces}", named)}

    journal = {
        "compiler": compiler_fingerprint(), "source": sources(found), "kind": kind, "arch": arch, "phase": phase,
        "changes": dict(settings or {}), "scheme": asked and [asked.scheme.text, asked.scheme.bound],
        "skip": asked and list(asked.skip),
    }  # fmt: skip
    return write(
        out, home, in_files(model, found, part), tensors, converted.settings(), journal=journal,
        what=f"converting for {kind} {arch}", metadata=_metadata,
    )  # fmt: skip


def _metadata(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return converted.metadata(Tag.from_tensor(t) for name, t in tensors.items() if name.endswith(f".{EXTRA}"))
