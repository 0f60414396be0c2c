"""The files of a checkpoint: its settings, and the tensors of its safetensors files by name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from qdsl.diagnostic import CheckpointError, closest
from qdsl.runtime.checkpoints import FILES, FORMATS, SETTINGS, Choice, unnamed
from qdsl.runtime.checkpoints.experts import Part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class Stored(Protocol):
    """The tensors of a checkpoint by name.

    headers   name -> tensor on the meta device, for shape and type
    file      name -> the file it lies in
    """

    headers: dict[str, torch.Tensor]
    file: dict[str, Path]

    def __getitem__(self, name: str) -> torch.Tensor: ...
    def part(self, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        """Of a stored tensor; no more than that is read, where the file allows it."""
        ...

    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object) -> bool: ...


def opened(path: Path, changes: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, str, Stored]:
    """(settings with changes, the name of the file they are in, the format's name, the tensors) of a directory or a file.

    Raises CheckpointError where files or settings can't be read.
    """
    if path.is_file():
        if path.suffix not in FILES:
            known = ", ".join(FILES)
            raise CheckpointError(f"{path}: a checkpoint is a directory, or a file that ends in {known}")
        if changes:
            raise CheckpointError(f"{path}: its settings are in the file itself; {', '.join(changes)} can't be changed")
        method, opener = FILES[path.suffix]
        tensors = opener(path)
        return tensors.metadata, path.name, method, tensors
    config, source = read_config(path)
    config |= changes
    return config, source, method_of(config, source), StoredTensors(path)


def opened_floats(path: Path, changes: Mapping[str, Any]) -> tuple[str, str, Stored]:
    """(where it is said how to quantize them, "float", the tensors) of a directory whose tensors no tool has quantized.

    Raises CheckpointError where they are quantized already, or can't be read.
    """
    instead = "leave out `scheme` to load it, or quantize the float checkpoint that it was made from"
    if path.is_file():
        raise CheckpointError(
            f"{path}: a file with types of its own for its tensors, and a scheme was asked for; {instead}"
        )
    if changes:
        raise CheckpointError(
            f"{path}: settings are of quantized checkpoints, and a scheme was asked for; leave one out"
        )
    if found := _settings(path):
        config, source = found
        method = config.get("quant_method") or unnamed(config, source) or "a method that it does not name"
        raise CheckpointError(
            f"{path}: quantized already, by {method} ({source}), and a scheme was asked for; {instead}"
        )
    return "arguments", "float", StoredTensors(path)


# ---- the settings -------------------------------------------------------------------------------------------
def read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """(quantization settings, the file they are in); raises CheckpointError without any."""
    if found := _settings(directory):
        return found
    raise CheckpointError(
        f"{directory}: no quantization settings in config.json (quantization_config, compression_config), "
        f"{', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}; is this a quantized checkpoint? A float one needs `scheme`, by which "
        "it is quantized"
    )


def _settings(directory: Path) -> tuple[dict[str, Any], str] | None:
    """(quantization settings, the file they are in); the first place that has them counts."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    main, path = _json(directory / "config.json"), directory / "config.json"
    inner = main.get("text_config")
    for found in (
        main.get("quantization_config"),
        inner.get("quantization_config") if isinstance(inner, dict) else None,
        main.get("compression_config"),
    ):
        if found:
            if not isinstance(found, dict):
                raise CheckpointError(f"{path}: quantization settings are {found!r}, an object is needed")
            return dict(found), path.name
    for name in SETTINGS:
        if found := _json(directory / name):
            return dict(found), name
    return None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: not readable as JSON ({problem})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def method_of(config: Mapping[str, Any], source: str) -> str:
    """The name of a configuration's format, stated or told by its words."""
    stated = config.get("quant_method")
    if stated is None and (told := unnamed(config, source)):
        return told
    method = str(stated or "").lower().replace("_", "-")
    if method not in FORMATS:
        hint = f"; did you mean `{match}`?" if (match := closest(method, FORMATS)) else ""
        named = f"quant_method `{stated}`" if stated else "a configuration without quant_method"
        raise CheckpointError(f"{source}: {named} is not supported{hint} (supported: {', '.join(FORMATS)})")
    return method


# ---- the files ---------------------------------------------------------------------------------------------------
class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint's safetensors files, read one by one when asked for, each into memory of its own.

    Files are not mapped: what has been read of a mapped file stays in the process beside what was made of it.

    headers   name -> tensor on the meta device, for shape and type
    file      name -> the file it lies in
    """

    def __init__(self, directory: Path):
        self.headers: dict[str, torch.Tensor] = {}
        self.file: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        promised = _weight_map(directory)
        problems = []
        for path in sorted(set(promised.values())) if promised else [_single(directory)]:
            problems += self._scan(path) if path.is_file() else [_absent(path, promised)]
        missing = [name for name in promised if name not in self.headers]
        astray = [name for name, path in promised.items() if self.file.get(name, path) != path]
        if missing and not problems:
            places = ", ".join(sorted({promised[name].name for name in missing}))
            problems.append(f"{_index(directory)} promises {some(missing)}, which no file holds (it says: {places})")
        if astray and not problems:
            problems.append(f"{_index(directory)} promises {some(astray)} in another file than holds them")
        if problems:
            raise CheckpointError("\n".join(problems))

    def _scan(self, path: Path) -> list[str]:
        """Read one header."""
        try:
            with safetensors.safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (a file handle, not a dictionary)
                    part = opened.get_slice(name)
                    kind = getattr(torch, _DTYPES.get(part.get_dtype(), ""), None)
                    if kind is None:
                        return [f"{path}: `{name}` has type {part.get_dtype()}, which torch {torch.__version__} lacks"]
                    if name in self.file:
                        return [f"{path}: `{name}` is also in {self.file[name].name}"]
                    self.headers[name] = torch.empty(part.get_shape(), dtype=kind, device="meta")
                    self.file[name] = path
        except (safetensors.SafetensorError, OSError) as problem:
            return [f"{path}: truncated or damaged ({problem})"]
        return []

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name, lambda file: file.get_tensor(name))

    def part(self, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        return self._read(name, lambda file: file.get_slice(name)[cut].contiguous())

    def _read(self, name: str, read: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        path = self.file[name]
        try:
            if path not in self._opened:
                self._opened[path] = safetensors.safe_open(path, "pt", backend="pread")
            return read(self._opened[path])
        except (safetensors.SafetensorError, OSError) as problem:
            raise CheckpointError(f"{path}: `{name}` can't be read ({problem})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def weights_file(directory: Path) -> Path:
    """The file by which a checkpoint's tensors are found: the index, or the one that holds them all.

    Raises CheckpointError where there is none, or several might be meant.
    """
    return _index(directory) or _single(directory)


class Unstacked(Mapping[str, torch.Tensor]):
    """A checkpoint in which tensors that hold all experts of a layer go by the name of what one expert has of them.

    Headers are those of one expert; what is read is that of expert `e`, or of all where it is None.
    """

    def __init__(self, files: Stored, parts: Mapping[str, Part]):
        self._files, self._parts = files, parts
        self._e: int | None = None
        sources = {part.source for part in parts.values()}
        self.headers = {name: header for name, header in files.headers.items() if name not in sources}
        for name, part in parts.items():
            whole = files.headers[part.source]
            self.headers[name] = part.of(whole if part.shared else whole[0])
        self.file = {**files.file, **{name: files.file[part.source] for name, part in parts.items()}}

    def member(self, e: int) -> Unstacked:
        found = copy.copy(self)
        found._e = e
        return found

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._files[name]
        if part.shared or self._e is None:
            return self._files[part.source]
        return part.of(self._files.part(part.source, (slice(self._e, self._e + 1),))[0])

    def part(self, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        return self[name][cut] if name in self._parts else self._files.part(name, cut)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


class Under(Mapping[str, torch.Tensor]):
    """Those tensors of a checkpoint whose names begin with a prefix, by the rest of their names."""

    def __init__(self, files: Stored, prefix: str):
        self._files, self._prefix = files, prefix
        own = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
        self.headers = {name: files.headers[full] for name, full in own.items()}
        self.file = {name: files.file[full] for name, full in own.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[self._prefix + name]

    def part(self, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        return self._files.part(self._prefix + name, cut)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def without(prefix: str, settings: Any) -> Any:
    """Settings in which no name begins with the prefix: keys and strings, however deep, lose it."""
    if isinstance(settings, str):
        return settings.removeprefix(prefix)
    if isinstance(settings, Mapping):
        return {without(prefix, key): without(prefix, value) for key, value in settings.items()}
    return [without(prefix, value) for value in settings] if isinstance(settings, list) else settings


class Renamed(Mapping[str, torch.Tensor]):
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


def _index(directory: Path) -> Path | None:
    """The index of a checkpoint in several files: under its usual name, or the one there is; not what is left of a
    checkpoint that one file has replaced, where `save_pretrained` removes the files that it names alone."""
    if (path := directory / INDEX).is_file():
        left = (directory / SINGLE).is_file() and not any(file.exists() for file in _named(path).values())
        return None if left else path
    found = sorted(directory.glob("*.safetensors.index.json"))
    return found[0] if len(found) == 1 and not (directory / SINGLE).is_file() else None


def _weight_map(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says; empty without an index."""
    path = _index(directory)
    return {} if path is None else _named(path)


def _named(index: Path) -> dict[str, Path]:
    found = _json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: no `weight_map` from names of tensors to files")
    return {name: index.parent / file for name, file in found.items()}


def _single(directory: Path) -> Path:
    """The one weights file of a checkpoint without an index."""
    found = [path] if (path := directory / SINGLE).is_file() else sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        part = re.search(r"-(\d+)-of-(\d+)$", found[0].stem)
        if part and int(part[2]) > 1:
            raise CheckpointError(
                f"{found[0]}: one of {int(part[2])} files, and there is no {INDEX} that names the others"
            )
        return found[0]
    what = (
        f"several safetensors files ({', '.join(f.name for f in found)}) and no {INDEX}"
        if found
        else f"no safetensors ({SINGLE}, or several files and {INDEX})"
    )
    hint = "; pickled weights (.bin, .pt) are not read, convert them first" if any(directory.glob("*.bin")) else ""
    raise CheckpointError(f"{directory}: {what}{hint}")


def _absent(path: Path, promised: Mapping[str, Path]) -> str:
    return f"{path}: {'the index names this file, but it is missing' if promised else 'no file, or a link to none'}"


def some(names: Iterable[str], count: int = 4) -> str:
    """The first few names, and how many there are beyond them."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(f"`{name}`" for name in names[:count]) + more
