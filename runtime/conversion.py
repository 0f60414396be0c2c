"""From a quantized checkpoint to one in kernel layout, which loads without repacking: `qdsl convert`.

    examine --> the model in parts --> OUT.partial/model-00001-of-00009.safetensors, ... --> OUT

Every file is written aside and renamed, and OUT.partial becomes OUT when all of it is there.  A run that was interrupted
goes on with the files that are missing.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from qdsl.cache import compiler_fingerprint
from qdsl.diagnostic import Error
from qdsl.runtime.artifact import best_arch, buffers_of
from qdsl.runtime.checkpoint import Examination, empty_layers, examine, filled, floats, progress, refuse
from qdsl.runtime.checkpoints import converted
from qdsl.runtime.inspection import empty_model
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.state import EXTRA, Tag
from qdsl.runtime.stored import INDEX

JOURNAL = "conversion.json"  # in OUT.partial: what is being converted, and to what
PART = 1 << 30  # stored bytes that go into one file: what an interruption loses, at most
# What goes with the weights: tokenizer, generation, image processing, the model's own code, its licence.
BESIDE = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model", "*.tiktoken",
    "generation_config.json", "chat_template*", "*processor_config.json", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip


def convert(
    checkpoint: str | Path, out: str | Path, *, kind: str = "cpu", arch: str | None = None,
    model: nn.Module | None = None, phase: str = "", settings: Mapping[str, Any] | None = None, part: int = PART,
) -> Path:  # fmt: skip
    """Repack a checkpoint for a target's kernels; returns `out`, which `load_quantized` reads as any other checkpoint.

    checkpoint   what `load_quantized` reads: a directory, or a GGUF file
    kind, arch   of the target, such as "cuda" and "sm_90a"; by default this machine's CPU. Another target reads the
                 result as well, and repacks it
    model        of its architecture, whose parameters may be on "meta"; by default transformers builds it from config.json
    phase        as for load_quantized, and so are `settings`
    part         stored bytes that go into one file of the result, which has at least one module

    Tensors keep their bits, quantized or not. Beside the weights come config.json, with other quantization settings, the
    tokenizer and what else belongs to them (`BESIDE`). At most one file of the result is in memory at a time. Raises
    CheckpointError as load_quantized does, before anything is written, and Error where `out` is there already.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    home = checkpoint.parent if checkpoint.is_file() else checkpoint
    if out.exists():
        raise Error(f"{out}: exists; choose another directory or remove it")
    arch = arch or best_arch(torch.device(kind))
    model = empty_model(home) if model is None else model
    found = examine(model, checkpoint, phase, settings)
    for notice in found.notices:
        warnings.warn(f"{checkpoint}: {notice}", stacklevel=2)
    refuse(checkpoint, found.problems)
    options = {"compile": "auto", "batch_invariant": False, "phase": phase}
    layers = empty_layers(model, checkpoint, found, torch.device("meta"), None, options)
    parts = _parts(model, found, part)
    partial = out.with_name(f"{out.name}.partial")
    _begin(partial, _journal(found, parts, kind=kind, arch=arch, phase=phase, settings=dict(settings or {})))
    names = iter(progress([name for inside in parts for name in inside], f"converting for {kind} {arch}"))
    index: dict[str, str] = {}  # tensor -> file
    for at, inside in enumerate(parts, 1):
        file = partial / f"model-{at:05}-of-{len(parts):05}.safetensors"
        own = itertools.islice(names, len(inside))
        if not _names_in(file):
            tensors = dict(_tensors(own, model, found, layers, kind, arch))
            _write_weights(file, tensors)
            del tensors
        for _ in own:  # of a file that was there
            pass
        index |= dict.fromkeys(_names_in(file), file.name)
    _write_json(partial / INDEX, {"metadata": {}, "weight_map": index})
    for path in sorted(home.iterdir()):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in BESIDE):
            shutil.copyfile(path, partial / path.name)
    _write_json(partial / "config.json", _config(home / "config.json"))
    os.rename(partial, out)
    (out / JOURNAL).unlink()
    return out


# ---- what goes into which file -----------------------------------------------------------------------------------
def _parts(model: nn.Module, found: Examination, limit: int) -> list[list[str]]:
    """Quantized modules and dense tensors, by the model's names and in its order, as many to a part as fit the limit."""
    parts: list[list[str]] = []
    room = 0
    for name, size in _sizes(model, found).items():
        if size > room or not parts:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def _sizes(model: nn.Module, found: Examination) -> dict[str, int]:
    """Stored bytes of every quantized module and dense tensor."""
    headers = {**found.files.headers, **{name: made.header for name, made in found.plan.dense.items()}}
    sizes: dict[str, int] = {}
    for name in model.state_dict():
        module = name.rpartition(".")[0]
        if module in found.plan.choices:
            stored = found.plan.choices[module].tensors
            sizes[module] = sum(headers[full].nbytes for full in stored)
        elif name in found.dense:
            sizes[name] = headers[found.dense[name][1]].nbytes
    return sizes


def _tensors(
    names: Iterable[str], model: nn.Module, found: Examination, layers: dict[str, QuantLinear], kind: str, arch: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is stored for modules and tensors of the model."""
    for name in names:
        if name not in layers:
            yield name, floats(found.dense[name][1], found)
            continue
        layer = filled(layers.pop(name), name, found, model.get_submodule(name).weight.dtype)
        yield from converted.guarded(name, layer.state_for(buffers_of(layer.scheme, kind, arch), kind)).items()


def _config(path: Path) -> dict[str, Any]:
    """config.json with the settings of a converted checkpoint."""
    config = json.loads(path.read_text()) if path.is_file() else {}
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict):
                part.pop(key, None)
    return {**config, "quantization_config": converted.settings()}


# ---- files -------------------------------------------------------------------------------------------------------
def _journal(found: Examination, parts: list[list[str]], **options: Any) -> str:
    """What decides the bytes of every file."""
    files = {path: path.stat() for path in sorted(set(found.files.file.values()))}
    source = {str(path.resolve()): [about.st_size, about.st_mtime_ns] for path, about in files.items()}
    return json.dumps({"compiler": compiler_fingerprint(), "source": source, "parts": parts, **options}, indent=1)


def _begin(partial: Path, journal: str) -> None:
    """Make the folder of a conversion, or go on in it; what another conversion has left there goes away."""
    if (partial / JOURNAL).is_file() and (partial / JOURNAL).read_text() == journal:
        return
    if partial.is_dir() and ((partial / JOURNAL).is_file() or not any(partial.iterdir())):
        shutil.rmtree(partial)
    if partial.exists():
        raise Error(f"{partial}: is in the way and is no interrupted conversion; remove it")
    partial.mkdir(parents=True)
    _replace(partial / JOURNAL, lambda aside: aside.write_text(journal))


def _write_weights(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    tags = [Tag.from_tensor(tensor) for name, tensor in tensors.items() if name.endswith(f".{EXTRA}")]
    _replace(file, lambda aside: save_file(dict(tensors), aside, converted.metadata(tags)))


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    _replace(path, lambda aside: aside.write_text(json.dumps(data, indent=2) + "\n"))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all, also if the machine stops."""
    aside = path.with_name(f".{path.name}")
    write(aside)
    with aside.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(aside, path)


def _names_in(file: Path) -> list[str]:
    """The tensors of a file; none where there is no file, or a damaged one."""
    if not file.is_file():
        return []
    try:
        with safetensors.safe_open(file, "pt", backend="pread") as opened:
            return list(opened.keys())
    except (safetensors.SafetensorError, OSError):
        return []
