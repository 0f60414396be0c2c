"""load_quantized: a quantized checkpoint into a model whose nn.Linears it replaces.

Everything that can be wrong is looked for first, in file headers alone: every tensor of the checkpoint must find its
place and every module its tensors.  Then the quantized layers are made and filled beside the model, and only when all
of them exist does the model change.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from qdsl.diagnostic import CheckpointError, Error, closest
from qdsl.runtime.checkpoints import FORMATS, SETTINGS, Choice, Module, Plan, unnamed
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.resolve import resolved

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
# Stored by some tools, derived by every model that uses them.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def load_quantized(
    model: nn.Module, directory: str | Path, *, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, compile: str = "auto", batch_invariant: bool = False, phase: str = "",
) -> nn.Module:  # fmt: skip
    """Load a quantized checkpoint into a model of its architecture; returns the model.

    model      such as AutoModelForCausalLM.from_config(config); its weights are replaced, so they may be on "meta"
    directory  config and safetensors as the quantizing tool wrote them
    device     where to put the model; by default each parameter stays where it is (meta ones go to the CPU)
    dtype      type of activations and dense weights; by default the model's own
    compile    as for QuantLinear, and so is `batch_invariant`
    phase      the role of this copy of the model, such as "prefill" or "decode", for layers whose scheme has phases

    Linears that the checkpoint stores quantized become `QuantLinear`s, every other parameter is loaded as it is.  A tied
    head stays tied unless the checkpoint stores it quantized.  Raises CheckpointError, listing all that is wrong and
    naming file and tensor, before the model changes.
    """
    directory = Path(directory)
    config, source = read_config(directory)
    method = _method(config, source)
    files = StoredTensors(directory)
    modules = {name: _module(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    plan = FORMATS[method](config, modules, files.headers, files.__getitem__)
    for notice in _notices(plan):
        warnings.warn(f"{directory}: {notice}", stacklevel=2)
    problems = [_placed(problem, source, files) for problem in plan.problems]
    if problems and not plan.choices:  # not a format we read: that its tensors have no place says nothing more
        raise _refusal(directory, problems)
    dense = _dense(model, plan.choices, files.headers)
    taken = {name for choice in plan.choices.values() for name in (*choice.tensors, *choice.unread)} | {
        source for _, source in dense.values()
    }
    problems += _check_dense(dense, files) + _unplaced(model, files, taken | plan.skipped, dense)
    if not problems:  # a layer is only checked once its format is known to be understood
        layers = {}
        for name, choice in plan.choices.items():
            options = {"compile": compile, "batch_invariant": batch_invariant, "phase": _phase(choice, phase)}
            layers[name], found = _layer(model, name, choice, files, device, dtype, options)
            problems += found
        if phase and not any(resolved(c.scheme, c.params, None).phases for c in plan.choices.values()):
            problems.append(f"no layer of it has phases, and phase = {phase!r} was asked for")
    if problems:
        raise _refusal(directory, problems)
    for name in _progress(plan.choices, "loading quantized layers"):
        _fill(layers[name], name, plan.choices[name], files)
    values = {key: files[source] for key, (_, source) in dense.items()}
    _install(model, layers, dense, values, device, dtype)
    return model


def _notices(plan: Plan) -> list[str]:
    if not plan.contradictions:
        return plan.notices
    more = len(plan.contradictions) - 8
    together = "; ".join([*plan.contradictions[:8], *([f"and {more} more"] if more > 0 else [])])
    return [*plan.notices, f"configuration and tensors disagree, and the tensors count: {together}"]


def _placed(problem: str, source: str, files: StoredTensors) -> str:
    """A problem with the files it is about before it: those of the tensors it names, or else the configuration's."""
    about = {files.file[name].name for name in re.findall(r"`([^`]+)`", problem) if name in files.file}
    return f"{', '.join(sorted(about)) or source}: {problem}"


def _refusal(directory: Path, problems: Iterable[str]) -> CheckpointError:
    return CheckpointError(f"{directory} can't be loaded:\n" + "\n".join(f"- {problem}" for problem in problems))


# ---- the configuration -------------------------------------------------------------------------------------------
def read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """(quantization settings, the file they are in); the first place that has them counts."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    main = _json(directory / "config.json")
    for found in (
        main.get("quantization_config"),
        (main.get("text_config") or {}).get("quantization_config"),
        main.get("compression_config"),
    ):
        if found:
            return dict(found), "config.json"
    for name in SETTINGS:
        if found := _json(directory / name):
            return dict(found), name
    raise CheckpointError(
        f"{directory}: no quantization settings in config.json (quantization_config, compression_config), "
        f"{', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}; is this a quantized checkpoint?"
    )


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


def _method(config: Mapping[str, Any], source: str) -> str:
    """The format's name, stated or told by its words."""
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
    """The tensors of a checkpoint's safetensors files, read one by one when asked for.

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
            problems += self._scan(path)
        missing = [name for name in promised if name not in self.headers]
        astray = [name for name, path in promised.items() if self.file.get(name, path) != path]
        if missing and not problems:
            problems.append(f"{_index(directory)} promises {_some(missing)}, which no file holds")
        if astray and not problems:
            problems.append(f"{_index(directory)} promises {_some(astray)} in another file than holds them")
        if problems:
            raise CheckpointError("\n".join(problems))

    def _scan(self, path: Path) -> list[str]:
        """Read one header."""
        if not path.is_file():
            return [f"{path}: the index names this file, but it is missing"]
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
        path = self.file[name]
        try:
            if path not in self._opened:
                self._opened[path] = safetensors.safe_open(path, "pt")
            return self._opened[path].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as problem:
            raise CheckpointError(f"{path}: `{name}` can't be read ({problem})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _index(directory: Path) -> Path | None:
    """The index of a checkpoint in several files: under its usual name, or the one there is."""
    if (path := directory / INDEX).is_file():
        return path
    found = sorted(directory.glob("*.safetensors.index.json"))
    return found[0] if len(found) == 1 and not (directory / SINGLE).is_file() else None


def _weight_map(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says; empty without an index."""
    path = _index(directory)
    if path is None:
        return {}
    found = _json(path).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{path}: no `weight_map` from names of tensors to files")
    return {name: directory / file for name, file in found.items()}


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
        f"several safetensors files ({', '.join(f.name for f in found)}) and no {INDEX}" if found else "no safetensors"
    )
    hint = "; pickled weights (.bin, .pt) are not read, convert them first" if any(directory.glob("*.bin")) else ""
    raise CheckpointError(f"{directory}: {what}{hint}")


# ---- the plan against model and files ----------------------------------------------------------------------------
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


def _check_dense(dense: Mapping[str, tuple[torch.Tensor, str]], files: StoredTensors) -> list[str]:
    problems = []
    for tensor, source in dense.values():
        header = files.headers.get(source)
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
    model: nn.Module, files: StoredTensors, taken: set[str], dense: dict[str, tuple[torch.Tensor, str]]
) -> list[str]:
    """Tensors without a place and parameters without a tensor; drops from `dense` what the model says may be absent.

    Two tied names that are both stored must hold the same numbers.
    """
    optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    surplus = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    problems = []
    for name, (_, source) in list(dense.items()):
        if source in files:
            continue
        if any(p.search(name) for p in optional):
            del dense[name]
            continue
        quantized = [other for other in files.headers if other.startswith(name.rsplit(".", 1)[0] + ".")]
        beside = f" (only {_some(quantized)})" if quantized else ""
        problems.append(f"`{source}` is in no file{beside}, and the model needs it")
    aliases = _aliases(model)
    for name in files:
        if name in taken or _DERIVED.search(name) or any(p.search(name) for p in surplus):
            continue
        tied = aliases.get(name)
        if tied in taken:
            if tied is not None and not torch.equal(files[name], files[tied]):
                problems.append(f"{files.file[name].name}: `{name}` differs from `{tied}`, to which the model ties it")
            continue
        problems.append(f"{files.file[name].name}: `{name}` has no place in the model")
    meta = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in dense]
    if meta:
        problems.append(
            f"the model's {_some(meta)} on the meta device come from no checkpoint; build it with real buffers "
            "(accelerate's init_empty_weights keeps them), or on the CPU"
        )
    return problems


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter -> the stored name that `_dense` would take for it is among these."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: known[0] for known in names.values() if len(known) > 1 for name in known[1:]}


def _some(names: Iterable[str], count: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(f"`{name}`" for name in names[:count]) + more


# ---- layers ------------------------------------------------------------------------------------------------------
def _layer(
    model: nn.Module,
    name: str,
    choice: Choice,
    files: StoredTensors,
    device,
    dtype,
    options: Mapping[str, Any],
) -> tuple[QuantLinear | None, list[str]]:
    """An empty layer for a module, and what keeps the files from filling it."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear), "plans name linears of the model"
    place = torch.device(device) if device is not None else old.weight.device
    try:
        layer = QuantLinear(
            choice.scheme, old.in_features, old.out_features, choice.bias, "cpu" if place.type == "meta" else place,
            dtype or old.weight.dtype, **options, **choice.params,
        )  # fmt: skip
    except (Error, TypeError) as problem:
        return None, [f"{name}: {problem}"]
    others = {**choice.given, **{short: made.header for short, made in choice.made.items()}}
    found = layer.mismatches(_Renamed(files.headers, name, choice, others), f"{name}.", choice.layout)
    return layer, [
        f"{_where(choice, files)}: {name}: {problem}" for problem in [*found, *_surplus(name, choice, layer)]
    ]


def _surplus(name: str, choice: Choice, layer: QuantLinear) -> list[str]:
    """Tensors that are stored for a module, and that its scheme has no use for."""
    read = {b.source for b in layer.scheme.layouts[choice.layout].bindings}
    read |= {source for made in choice.made.values() for source in made.sources}
    return [
        f"`{full}` is stored, but a module of {choice.why or choice.scheme} has no such tensor"
        for full, short in choice.tensors.items()
        if short not in read
    ]


def _phase(choice: Choice, phase: str) -> str:
    return phase if resolved(choice.scheme, choice.params, None).phases else ""


def _fill(layer: QuantLinear, name: str, choice: Choice, files: StoredTensors) -> None:
    try:
        stored = _Renamed(files, name, replace(choice, leading={}), {})
        own = {full.removeprefix(f"{name}."): stored[full] for full in stored} if choice.made else {}
        made = {short: made.make(own) for short, made in choice.made.items()}
        layer.load(_Renamed(files, name, choice, {**choice.given, **made}), f"{name}.", choice.layout)
    except (CheckpointError, ValueError) as problem:
        raise CheckpointError(f"{_where(choice, files)}: {name}: {problem}") from None


def _where(choice: Choice, files: StoredTensors) -> str:
    """The files that hold a module."""
    return ", ".join(sorted({files.file[stored].name for stored in choice.tensors if stored in files.file}))


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
        if place == old.device and kind == old.dtype:
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
