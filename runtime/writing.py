"""A checkpoint's directory, written file by file.

    parts of names --tensors of a name--> OUT.partial/model-00001-of-00009.safetensors, ... --> OUT

Every file is written aside and renamed, and OUT.partial becomes OUT when all of it is there.  A run that was interrupted
goes on with the files that are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from qdsl.diagnostic import Error
from qdsl.runtime.checkpoint import progress
from qdsl.runtime.examination import Examination
from qdsl.runtime.stored import INDEX

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
JOURNAL = "journal.json"  # in OUT.partial: what is being written
PART = 1 << 30  # stored bytes that go into one file: what an interruption loses, at most
# What goes with the weights: tokenizer, generation, image processing, the model's own code, its licence.
BESIDE = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model", "*.tiktoken",
    "generation_config.json", "chat_template*", "*processor_config.json", "*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip


def write(
    out: Path, home: Path, parts: Sequence[Sequence[str]], tensors: Callable[[str], Mapping[str, torch.Tensor]],
    settings: Mapping[str, Any], *, journal: Mapping[str, Any], what: str,
    metadata: Callable[[Mapping[str, torch.Tensor]], dict[str, str]] = lambda tensors: {"format": "pt"},
) -> Path:  # fmt: skip
    """Write a checkpoint; returns `out`, which must not be there yet.

    home       the checkpoint that this one is made of: config.json, tokenizer and what else goes along come from it
    parts      names of modules and tensors, a file for each list
    tensors    what is stored for a name, by full name
    settings   the `quantization_config` of config.json
    journal    what decides the bytes of every file, beside the parts: a run with another one starts anew
    what       is being done, for the bar that shows how far it is
    metadata   of a file that holds some tensors
    """
    partial = out.with_name(f"{out.name}.partial")
    _begin(partial, json.dumps({**journal, "parts": parts, "settings": settings}, indent=1))
    files = [partial / f"model-{at:05}-of-{len(parts):05}.safetensors" for at in range(1, len(parts) + 1)]
    index: dict[str, str] = {}  # tensor -> file
    held: dict[str, torch.Tensor] = {}  # of the file that is being made

    def save(aside: Path) -> None:
        save_file(held, aside, metadata(held))

    last = {names[-1]: file for names, file in zip(parts, files)}
    done = {name for names, file in zip(parts, files) if _names_in(file) for name in names}
    for name in progress([name for names in parts for name in names], what):
        if name not in done:
            held |= tensors(name)
        if name in last:
            if name not in done:
                _replace(last[name], save)
                held.clear()
            index |= dict.fromkeys(_names_in(last[name]), last[name].name)
    _write_json(partial / INDEX, {"metadata": {}, "weight_map": index})
    for path in sorted(home.iterdir()):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in BESIDE):
            shutil.copyfile(path, partial / path.name)
    _write_json(partial / "config.json", _config(home / "config.json", settings))
    os.rename(partial, out)
    (out / JOURNAL).unlink()
    return out


def give_memory_back() -> None:
    """Let the C library return large blocks to the system as soon as they are freed, for a process that writes checkpoints.

    glibc keeps blocks of up to 32 MiB otherwise, in pieces between the tensors of a file, which then takes twice its size.
    """
    with contextlib.suppress(AttributeError, OSError):  # of another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def check_free(out: Path) -> None:
    """Raises Error where a checkpoint would be written over something."""
    if out.exists():
        raise Error(f"{out}: exists; choose another directory or remove it")


def _config(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other quantization settings."""
    config = json.loads(path.read_text()) if path.is_file() else {}
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict):
                part.pop(key, None)
    return {**config, "quantization_config": dict(settings)}


# ---- what goes into which file -----------------------------------------------------------------------------------
def in_files(model: nn.Module, found: Examination, limit: int) -> list[list[str]]:
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
    replaced = set(found.quantized)
    for name in model.state_dict():
        module = next((m for m in _around(name) if m in replaced), None)
        if module is not None:
            members = [one for p in found.stacks.get(module, ()) for one in p.modules] or found.fused.joined.get(
                module, [module]
            )
            sizes[module] = sum(headers[full].nbytes for one in members for full in found.plan.choices[one].tensors)
        elif name in found.dense:
            sizes[name] = headers[found.dense[name][1]].nbytes
    return sizes


def _around(name: str) -> Iterator[str]:
    """The modules that a tensor is in, by name, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def sources(found: Examination) -> dict[str, Any]:
    """The files that a checkpoint's tensors lie in, as they are now: for the journal."""
    files = {path: path.stat() for path in sorted(set(found.files.file.values()))}
    return {str(path.resolve()): [about.st_size, about.st_mtime_ns] for path, about in files.items()}


# ---- files -------------------------------------------------------------------------------------------------------
def _begin(partial: Path, journal: str) -> None:
    """Make the folder, or go on in it; what another run has left there goes away."""
    if (partial / JOURNAL).is_file() and (partial / JOURNAL).read_text() == journal:
        return
    if partial.is_dir() and ((partial / JOURNAL).is_file() or not any(partial.iterdir())):
        shutil.rmtree(partial)
    if partial.exists():
        raise Error(f"{partial}: is in the way and was not left by an interrupted run; remove it")
    partial.mkdir(parents=True)
    _replace(partial / JOURNAL, lambda aside: aside.write_text(journal))


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    _replace(path, lambda aside: aside.write_text(json.dumps(data, indent=2) + "\n"))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all, also if the machine stops."""
    aside = path.with_name(f".{path.name}")
    try:
        aside.touch()
        mode = aside.stat().st_mode
        write(aside)
        aside.chmod(mode)  # safetensors makes files that nobody else may read
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _names_in(file: Path) -> list[str]:
    """The tensors of a file; none where there is no file, or a damaged one."""
    if not file.is_file():
        return []
    try:
        with safetensors.safe_open(file, "pt", backend="pread") as opened:
            return list(opened.keys())
    except (safetensors.SafetensorError, OSError):
        return []
