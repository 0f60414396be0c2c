"""Damaged checkpoints: a file or tensor gone, a file cut short, a byte of a header changed.

Each ends in a CheckpointError that names what was damaged, or does no harm: then the same modules are read in the same
way from the same bytes.  `--damages N` sets how many are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_models import FIXTURES, LOADED
from torch import nn

import qdsl
from qdsl import reference
from qdsl.runtime import repack
from qdsl.runtime.conversion import convert
from qdsl.runtime.examination import examine

transformers = pytest.importorskip("transformers")

WHOLE = {name: Path(__file__).parent / "data" / name for name in ("awq_g128", "awq_moe_mixtral_g64")}
HIDDEN, INNER, VOCABULARY = 128, 256, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}


@dataclass(frozen=True)
class Made:
    """A small checkpoint that is made here: how its linears are stored, and its settings."""

    scheme: str
    params: dict[str, Any]
    layout: str
    settings: dict[str, Any]
    beside: Any = None  # (module, n, k) -> further tensors of a module


def _index(module, n, k):
    return {f"{module}.g_idx": (torch.arange(k) // 32).int()}


def _shape(module, n, k):
    return {f"{module}.weight_shape": torch.tensor([n, k])}


def _record(module, n, k):
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [n, k]}).encode()
    book = torch.tensor(qdsl.load("nf4").tensor("c").value, dtype=torch.float32)
    record = torch.tensor(list(state), dtype=torch.uint8)
    return {f"{module}.weight.quant_map": book, f"{module}.weight.quant_state.bitsandbytes__nf4": record}


def _offset(module, n, k):
    return {f"{module}.weight_offset": torch.zeros(n, 1)}


MADE = {
    "gptq": Made("gptq", {"group": 32}, "gptq_v2",
                 {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, _index),
    "packed": Made("gptq", {"group": 32}, "pack_quantized",
                   {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": GROUP}}, _shape),
    "nvfp4": Made("nvfp4a16", {}, "compressed_tensors",
                  {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                   "config_groups": {"g": {"targets": ["Linear"], "weights": FP4}}}),
    "blocks": Made("fp8_block", {"block": 64}, "deepseek", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "modelopt": Made("fp8_static", {}, "compressed_tensors", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "code_book": Made("nf4", {}, "bitsandbytes", {"quant_method": "bitsandbytes"}, _record),
    "modelslim": Made("w8a8_dynamic", {}, "compressed_tensors", {}, _offset),
}  # fmt: skip


def _write(name: str, directory: Path) -> None:
    """Make a checkpoint of random numbers, in two files with an index."""
    made, rng = MADE[name], np.random.default_rng(1)
    scheme = qdsl.load(made.scheme, **made.params)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**MODEL))
    tensors: dict[str, torch.Tensor] = {}
    for module, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and module != "lm_head":
            n, k = linear.weight.shape
            patterns = {t: p for t, p in reference.random_patterns(scheme, rng, n, k).items() if t != "b"}
            tensors |= repack.write(scheme, scheme.layouts[made.layout], patterns, f"{module}.")
            tensors |= made.beside(module, n, k) if made.beside else {}
    for key, parameter in model.named_parameters():
        if not any(stored.startswith(key.rpartition(".")[0] + ".") for stored in tensors):
            tensors[key] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    where = {key: files[at % 2] for at, key in enumerate(sorted(tensors))}
    for file in files:
        save_file({key: t.contiguous() for key, t in tensors.items() if where[key] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    settings = {"quantization_config": made.settings} if made.settings else {}
    (directory / "config.json").write_text(json.dumps(MODEL | settings))
    if name == "modelslim":
        types = {key: "W8A8_DYNAMIC" if ".weight" in key and "proj" in key else "FLOAT" for key in tensors}
        (directory / "quant_model_description.json").write_text(json.dumps(types))


@cache
def model_of(directory: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


# ---- what is read, if anything is --------------------------------------------------------------------------------
def looked_at(model: nn.Module, directory: Path):
    """All that loading would read: how each module is stored, and of every stored tensor its type, shape and bytes."""
    found = examine(model, directory)
    if found.problems:
        raise qdsl.CheckpointError("\n".join(found.problems))
    how = {
        name: (c.scheme, dict(c.params), c.layout, c.bias, dict(c.tensors)) for name, c in found.plan.choices.items()
    }
    used = {name for c in found.plan.choices.values() for name in c.tensors} | {
        source for _, source in found.dense.values()
    }
    return how, {name: repack.bits_of(found.files[name]) for name in used}


def outcome(model: nn.Module, directory: Path, said: str):
    """(what is read, the error): one of them is None."""
    try:
        return looked_at(model, directory), None
    except qdsl.CheckpointError as problem:
        return None, str(problem)
    except Exception as problem:
        raise AssertionError(f"{said}: {type(problem).__name__}") from problem


def same(one, other) -> bool:
    bits = one[1].keys() == other[1].keys() and all(
        np.array_equal(bits, other[1][name]) for name, bits in one[1].items()
    )
    return one[0] == other[0] and bits


# ---- damages -----------------------------------------------------------------------------------------------------
def header_of(raw: bytes) -> dict[str, Any]:
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size])


def without_tensor(raw: bytes, name: str) -> bytes:
    """The file as its writer would have written it without a tensor."""
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    entries, body, kept = header_of(raw), b"", {}
    for key, entry in entries.items():
        if key == name or key == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        kept[key] = entry | {"data_offsets": [len(body), len(body) + last - first]}
        body += raw[start + first : start + last]
    text = json.dumps(kept).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def damage(directory: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one file; returns (what was done, the name that an error has to have in it)."""
    files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors"))
    weights = [path for path in files if path.suffix == ".safetensors"]
    kind = rng.choice(["file", "tensor", "truncate", "header", "header", "header"])
    path = rng.choice(files if kind in ("file", "truncate") else weights)
    raw = path.read_bytes()
    path.unlink()  # a link to the undamaged one
    if kind == "file":
        return f"deleted {path.name}", path.name
    if kind == "truncate":
        size = rng.randrange(len(raw))
        path.write_bytes(raw[:size])
        return f"cut {path.name} to {size} of {len(raw)} bytes", path.name
    if kind == "tensor":
        name = rng.choice([key for key in header_of(raw) if key != "__metadata__"])
        path.write_bytes(without_tensor(raw, name))
        return f"deleted {name}", name
    at = rng.randrange(8 + struct.unpack("<Q", raw[:8])[0])
    byte = raw[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else rng.choice(b'0123456789FUI",:[]{}ax')
    path.write_bytes(raw[:at] + bytes([byte]) + raw[at + 1 :])
    return f"byte {at} of {path.name} from {raw[at]} to {byte}", path.name


SOURCES = ["converted", *WHOLE, *MADE, *([name for name in LOADED if name not in WHOLE] if FIXTURES else [])]


def whole_checkpoint(name: str, directory: Path) -> None:
    """Put one of the sources into a new directory."""
    if name == "converted":
        convert(WHOLE["awq_g128"], directory)
        return
    directory.mkdir()
    if name in MADE:
        _write(name, directory)
        return
    for path in sorted((WHOLE[name] if name in WHOLE else FIXTURES / name).iterdir()):
        beside = ("reference_dequant.safetensors", "PRODUCED_BY.json")
        if path.suffix in (".json", ".safetensors") and path.name not in beside:
            shutil.copy(path, directory)


def test_damages_end_in_an_error_that_names_them_or_do_no_harm(request, tmp_path):
    total = request.config.getoption("--damages")
    share = -(-total // len(SOURCES))
    harmless = 0
    for name in SOURCES:
        whole = tmp_path / name
        whole_checkpoint(name, whole)
        right, model = looked_at(model_of(whole), whole), model_of(whole)
        for case in range(share):
            rng, directory = random.Random(f"{name} {case}"), tmp_path / "damaged"
            directory.mkdir()
            for path in whole.iterdir():
                os.link(path, directory / path.name)
            done, needed = damage(directory, rng)
            said = f"{name}, case {case}, {done}"
            found, problem = outcome(model, directory, said)
            assert problem is None or needed in problem, f"{said}: {needed} is not named by\n{problem}"
            assert problem is not None or same(found, right), f"{said}: something else is loaded"
            harmless += problem is None
            shutil.rmtree(directory)
    assert harmless < total / 4


@pytest.mark.parametrize("name", MADE)
def test_every_tensor_and_file_is_needed(name, tmp_path):
    """Each in turn, of the checkpoints that are made here."""
    whole = tmp_path / "whole"
    whole.mkdir()
    _write(name, whole)
    model = model_of(whole)
    assert looked_at(model, whole)[0]
    for path in sorted(whole.iterdir()):
        raw = path.read_bytes()
        for gone in (header_of(raw) if path.suffix == ".safetensors" else {}).keys() - {"__metadata__"}:
            path.write_bytes(without_tensor(raw, gone))
            with pytest.raises(qdsl.CheckpointError) as caught:
                looked_at(model, whole)
            assert gone in str(caught.value), str(caught.value)
        if path.name == "config.json" and name == "modelslim":
            continue  # it says what the model is, which is given
        path.unlink()
        with pytest.raises(qdsl.CheckpointError) as caught:
            looked_at(model, whole)
        assert path.name in str(caught.value), str(caught.value)
        path.write_bytes(raw)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in MADE])
def test_each_kind_of_tensor_is_needed_and_each_file_that_says_more(name, tmp_path):
    """Each in turn, of checkpoints of the tools: some write their settings twice."""
    whole = tmp_path / name
    whole_checkpoint(name, whole)
    model = model_of(whole)
    right = looked_at(model, whole)
    for path in sorted(whole.iterdir()):
        raw = path.read_bytes()
        kinds: dict[str, str] = {}
        for key in header_of(raw).keys() - {"__metadata__"} if path.suffix == ".safetensors" else ():
            kinds.setdefault(re.sub(r"\d+", "*", key), key)
        for gone in kinds.values():
            path.write_bytes(without_tensor(raw, gone))
            _, problem = outcome(model, whole, gone)
            assert problem is not None and gone in problem, f"{gone} is not named by\n{problem}"
        path.unlink()
        found, problem = outcome(model, whole, path.name)
        assert problem is None or path.name in problem, f"{path.name} is not named by\n{problem}"
        assert problem is not None or same(found, right), path.name
        path.write_bytes(raw)


JUNK = (None, [], {}, "x", 3.5, -7, True, [1, "x"], {"x": 1})


def changed(settings: Any, path: tuple = ()):
    """Every way to put junk in place of one value: (where, what, the settings with it)."""
    entries = (
        settings.items() if isinstance(settings, dict) else enumerate(settings) if isinstance(settings, list) else ()
    )
    for key, value in entries:
        for junk in JUNK:
            other = dict(settings) if isinstance(settings, dict) else list(settings)
            other[key] = junk
            yield (*path, key), junk, other
        for where, junk, inner in changed(value, (*path, key)):
            other = dict(settings) if isinstance(settings, dict) else list(settings)
            other[key] = inner
            yield where, junk, other


@pytest.mark.parametrize("name", SOURCES)
def test_settings_of_any_type_are_taken_or_refused(name, tmp_path):
    """Never anything but a CheckpointError, whatever stands where a number or a list should."""
    whole_checkpoint(name, tmp_path / name)
    tmp_path = tmp_path / name
    model = model_of(tmp_path)
    file = next(
        (tmp_path / f for f in ("quant_model_description.json",) if (tmp_path / f).exists()), tmp_path / "config.json"
    )
    whole = json.loads(file.read_text())
    key = "quantization_config" if file.name == "config.json" else None
    settings = whole[key] if key else {k: whole[k] for k in list(whole)[:12]}
    for where, junk, other in changed(settings):
        file.write_text(json.dumps({**whole, key: other} if key else {**whole, **other}))
        outcome(model, tmp_path, f"{where} = {junk!r}")
