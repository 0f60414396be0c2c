"""GGUF: one file of metadata and tensors, each of a type of its own, under llama.cpp's names.

The tensors are given under the names and in the order of rows of transformers' model: llama.cpp interleaves the two halves
of each head's rows of q and k, for its rotary embedding.  Dimensions are listed from the fastest.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qdsl import reference
from qdsl.diagnostic import CheckpointError
from qdsl.runtime.checkpoints import Choice, Headers, Made, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import decoded, has_bias
from qdsl.runtime.resolve import resolved

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_RECORDS = {2: ("q4_0", 18), 3: ("q4_1", 20), 8: ("q8_0", 34)}  # type -> (scheme, bytes of 32 elements)
_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
_ARCHITECTURES = ("llama",)
_SIMPLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_DERIVED = ("rope_freqs.weight",)  # from the model's own settings


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    """`config` is the metadata, with the type of each tensor as `tensors`."""
    found = Plan()
    kinds: Mapping[str, int] = config["tensors"]
    for name, kind in kinds.items():
        if kind not in _RECORDS:
            continue
        scheme, module = _RECORDS[kind][0], name.removesuffix(".weight")
        if module in modules:
            bias = has_bias(module, modules[module], stored, found)
            why = f"of type {scheme.upper()}"
            found.choices[module] = Choice(scheme, {}, "gguf", bias, {name: "weight"}, why=why)
        else:
            found.dense[name] = _floats(name, scheme, stored[name])
    return found


def _floats(name: str, scheme: str, header: torch.Tensor) -> Made:
    """A tensor that the model holds as floats, out of its records."""
    n, k = header.shape[0], header.shape[1] // _sizes()[scheme] * 32

    def make(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loaded = resolved(scheme, {}, None)
        given = {t.name: decoded(scheme, {}, "gguf", t.name, {"weight": own[name]}, n, k) for t in loaded.weight.loaded}
        return torch.from_numpy(reference.decode_weight(loaded, given, n, k).astype(np.float32))

    return Made(torch.empty((n, k), dtype=torch.float32, device="meta"), (name,), make)


def _sizes() -> dict[str, int]:
    return dict(_RECORDS.values())


# ---- the file ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: its type, its shape as torch has it (records are bytes), and its first byte."""

    kind: torch.dtype
    shape: tuple[int, ...]
    start: int


class GgufTensors(Mapping[str, torch.Tensor]):
    """The tensors of a GGUF file by transformers' names, read one by one when asked for.

    metadata   what the file says of its model, and the type of each tensor as `tensors`
    headers    name -> tensor on the meta device, for shape and type; quantized ones are rows of bytes
    file       name -> the file
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, places = _header(self._bytes)
        except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as problem:
            raise CheckpointError(f"{path}: truncated or damaged ({problem})") from None
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(
                f"{path}: general.architecture `{architecture}` is not supported (supported: {known})"
            )
        self._places: dict[str, _Place] = {}
        kinds = {}
        for name, (place, kind) in self._checked(places).items():
            if name not in _DERIVED:
                self._places[_renamed(name)], kinds[_renamed(name)] = place, kind
        self.metadata["tensors"] = kinds
        self._check_heads()
        self.headers = {name: torch.empty(p.shape, dtype=p.kind, device="meta") for name, p in self._places.items()}
        self.file = dict.fromkeys(self._places, path)

    def _checked(self, places: Mapping[str, tuple[tuple[int, ...], int, int]]) -> dict[str, tuple[_Place, int]]:
        """Every tensor's place in the file; raises CheckpointError where its type is not read, or the file ends before it."""
        found, problems = {}, []
        for name, (shape, kind, start) in places.items():
            if kind in _FLOATS:
                place = _Place(_FLOATS[kind], shape, start)
            elif kind in _RECORDS and len(shape) == 2 and shape[1] % 32 == 0:
                place = _Place(torch.uint8, (shape[0], shape[1] // 32 * _RECORDS[kind][1]), start)
            else:
                known = ", ".join(["F32", "F16", "BF16", *(scheme.upper() for scheme, _ in _RECORDS.values())])
                what = (
                    f"{_OTHERS.get(kind, f'type {kind}')}, {list(shape)}" if kind not in _RECORDS else f"{list(shape)}"
                )
                problems.append(f"{self.path}: `{name}` is {what}, which is not supported (supported: {known})")
                continue
            if (end := start + _size(place)) > len(self._bytes):
                problems.append(f"{self.path}: truncated or damaged: `{name}` ends at byte {end} of {len(self._bytes)}")
            found[name] = place, kind
        problems = problems or self._overlaps(found)
        if problems:
            more = [f"{self.path}: and {len(problems) - 8} more tensors"] if len(problems) > 8 else []
            raise CheckpointError("\n".join([*problems[:8], *more]))
        return found

    def _overlaps(self, found: Mapping[str, tuple[_Place, int]]) -> list[str]:
        """Tensors that do not end where the next one begins, but for padding."""
        unit, order = self.metadata.get("general.alignment", 32), sorted(found, key=lambda name: found[name][0].start)
        ends = [-(-(found[name][0].start + _size(found[name][0])) // unit) * unit for name in order]
        return [
            f"{self.path}: damaged: `{name}` ends at byte {end}, and `{after}` begins at {found[after][0].start}"
            for name, end, after in zip(order, ends, order[1:])
            if end != found[after][0].start
        ]

    def _check_heads(self) -> None:
        """Heads of q and of k must have the same rows, or their order would be guessed."""
        for name, place in self._places.items():
            other = self._places.get(name.replace("q_proj.weight", "k_proj.weight"))
            if not name.endswith("self_attn.q_proj.weight") or other is None:
                continue
            rows, heads = (place.shape[0], other.shape[0]), (self._heads("q"), self._heads("k"))
            if any(r % (2 * h) for r, h in zip(rows, heads)) or rows[0] * heads[1] != rows[1] * heads[0]:
                raise CheckpointError(
                    f"{self.path}: `{name}` has {rows[0]} rows in {heads[0]} heads, and that of k {rows[1]} in {heads[1]} "
                    "(llama.attention.head_count, head_count_kv): heads differ in size"
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        raw = bytearray(self._bytes[place.start : place.start + _size(place)])
        tensor = torch.frombuffer(raw, dtype=place.kind).reshape(place.shape)
        part = re.search(r"self_attn\.(q|k)_proj\.(weight|bias)$", name)
        return _halves(tensor, self._heads(part[1])) if part else tensor

    def part(self, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        return self[name][cut].clone()

    def _heads(self, part: str) -> int:
        heads = self.metadata.get("llama.attention.head_count")
        count = self.metadata.get("llama.attention.head_count_kv", heads) if part == "k" else heads
        if not isinstance(count, int) or count < 1:
            raise CheckpointError(
                f"{self.path}: llama.attention.head_count is {count}; the order of rows depends on it"
            )
        return count

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def _size(place: _Place) -> int:
    """Bytes of a tensor."""
    return math.prod(place.shape) * torch.empty(0, dtype=place.kind).element_size()


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in transformers' order: of each head, the first of all pairs and then the second."""
    rows = tensor.shape[0] // heads
    return tensor.reshape(heads, rows // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _renamed(name: str) -> str:
    """transformers' name of a tensor of the llama architecture; one that is not known keeps its own."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _NAMES:
        return f"model.layers.{block[1]}.{_NAMES[block[2]]}.{block[3]}"
    stem, _, last = name.rpartition(".")
    return f"{_NAMES[stem]}.{last}" if stem in _NAMES else name


def _header(raw: mmap.mmap) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    """(metadata, name -> (shape, type, first byte)); raises ValueError or struct.error where the file is no GGUF."""
    if raw[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{code}", raw, at)
        at += struct.calcsize(f"<{code}")
        return value

    def text() -> str:
        nonlocal at
        size = take("Q")
        if at + size > len(raw):
            raise ValueError(f"a name of {size} bytes at byte {at}")
        at += size
        return raw[at - size : at].decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            inner, count = take("I"), take("Q")
            if count > len(raw):
                raise ValueError(f"a list of {count} values at byte {at}")
            return [value(inner) for _ in range(count)]
        if kind not in _SIMPLE:
            raise ValueError(f"a value of type {kind} at byte {at}")
        return take(_SIMPLE[kind])

    version, tensors, pairs = take("I"), take("Q"), take("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version}, read are 2 and 3")
    if tensors + pairs > len(raw):
        raise ValueError(f"{tensors} tensors and {pairs} settings")
    metadata = {}
    for _ in range(pairs):
        key = text()
        metadata[key] = value(take("I"))
    places = {}
    for _ in range(tensors):
        name, rank = text(), take("I")
        if rank > 4:
            raise ValueError(f"`{name}` has {rank} dimensions")
        shape = tuple(take("Q") for _ in range(rank))[::-1]
        places[name] = (shape, take("I"), take("Q"))
    unit = metadata.get("general.alignment", 32)
    if not isinstance(unit, int) or unit < 1:
        raise ValueError(f"general.alignment is {unit}")
    start = -(-at // unit) * unit
    return metadata, {name: (shape, kind, start + offset) for name, (shape, kind, offset) in places.items()}
