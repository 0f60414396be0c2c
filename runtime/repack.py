"""From the tensors of a checkpoint to logical bit patterns, and back.

    stored words --layout--> fields --value convention--> bit patterns --kernel layout--> buffer

`mismatches` looks at shapes and types alone, so tensors on the "meta" device will do; `read` and `write` then work on
the numbers.  Everything is numpy on the host: a layer is repacked once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from qdsl.diagnostic import Diagnostic, error
from qdsl.dtype import DType, dtype
from qdsl.expr import Binary, Expr, Negate, Number, Stored, constant, evaluate
from qdsl.scheme import Binding, Free, Scheme, Storage, Tensor, expert_name, extent_of, shape_error

_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SMALL = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu"}  # the last one is new in torch 2.7
_INTEGERS = {
    "u8": torch.uint8, "i8": torch.int8, "u16": torch.uint16, "i16": torch.int16, "u32": torch.uint32,
    "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
# Values of the keys are values of the formats listed, so a tensor of the key may stand in for them.
_WIDENS = {torch.float16: ("f32",), torch.bfloat16: ("f32",)}


# ---- types -------------------------------------------------------------------------------------------------------
def torch_dtype(format: DType) -> torch.dtype | None:
    """The torch type of an activation format, or None."""
    return _FLOATS.get(format.name)


def format_of(found: torch.dtype) -> DType | None:
    """The number format of a torch float type, or None."""
    return next((dtype(name) for name, known in _FLOATS.items() if known == found), None)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements as unsigned integers of their width, on the host."""
    unsigned = np.dtype(f"uint{tensor.element_size() * 8}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(unsigned).reshape(tuple(tensor.shape))


def tensor_of(words: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    """Unsigned words as a torch tensor of that type, in torch's own (64-byte aligned) memory."""
    result = torch.empty(words.shape, dtype=kind)
    if words.size:
        result.reshape(-1).view(torch.uint8).numpy()[...] = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
    return result


def accepts(binding: Binding, found: torch.dtype) -> DType | None:
    """The stored format to read a tensor of type `found` by, or None when its values are not those of the binding.

    Besides the binding's own type these pass: another type with the same bits (int32 for uint32 words, uint8 for an
    8-bit float), a 16-bit float where the binding says f32, and any integer type for an index.
    """
    stored = binding.stored
    if stored.is_float:
        if found == _FLOATS.get(stored.name):
            return stored
        if stored.bits <= 8 and (found == torch.uint8 or found == getattr(torch, _SMALL.get(stored.name, ""), None)):
            return stored
        return format_of(found) if stored.name in _WIDENS.get(found, ()) else None
    given = next((name for name, known in _INTEGERS.items() if known == found), None)
    if given == stored.name:
        return stored
    same_bits = given is not None and dtype(given).bits == stored.bits
    return stored if same_bits and (is_packed(binding) or stored.bits == 32) else None


def is_packed(binding: Binding) -> bool:
    return any(axis.runs for axis in binding.layout.axes)


# ---- shapes ------------------------------------------------------------------------------------------------------
def names_of(binding: Binding, prefix: str, sizes: Mapping[str, int]) -> list[str]:
    """The full name of every stored tensor of a binding: one, or one per expert."""
    if not binding.per_expert:
        return [prefix + binding.source]
    return [prefix + expert_name(binding.source, e) for e in range(sizes["e"])]


def logical_shape(
    scheme: Scheme, binding: Binding, sizes: Mapping[str, int], stored: torch.Tensor | None = None
) -> tuple[int, ...]:
    """Shape of what one stored tensor holds (one expert's share, if experts lie apart).

    The free digits of a transform take their extents from `stored`.
    """
    index = scheme.tensor(binding.tensor).index
    index = index[1:] if binding.per_expert else index
    free: dict[str, int] = {}
    if any(isinstance(i, Free) for i in index):
        if stored is None or is_packed(binding) or stored.dim() != len(index):
            raise ValueError(f"the extents of `{binding.tensor}` come from a stored tensor of rank {len(index)}")
        free = {i.name: size for i, size in zip(index, stored.shape, strict=True) if isinstance(i, Free)}
    return tuple(extent_of(i, {**sizes, **free}, scheme) for i in index)


def mismatches(
    scheme: Scheme, storage: Storage, tensors: Mapping[str, torch.Tensor], prefix: str, sizes: Mapping[str, int],
    wanted: Mapping[str, Tensor],
) -> list[Diagnostic]:  # fmt: skip
    """What is wrong with the shapes, types and presence of the wanted tensors; empty when they can be read."""
    found: list[Diagnostic] = []
    for binding in storage.bindings:
        if binding.tensor not in wanted:
            continue
        for name in names_of(binding, prefix, sizes):
            if name not in tensors:
                message = (
                    f"checkpoint tensor `{name}` is missing, layout `{storage.name}` reads `{binding.tensor}` from it"
                )
                found.append(error("missing-tensor", message, binding.span))
                continue
            problem = _misfit(scheme, storage, binding, name, tensors[name], sizes)
            if problem is not None:
                found.append(problem)
    bound = {b.tensor for b in storage.bindings}
    for name in wanted:
        if name not in bound:
            found.append(error("missing-tensor", f"layout `{storage.name}` stores no `{name}`", wanted[name].span))
    return found


def _misfit(
    scheme: Scheme, storage: Storage, binding: Binding, name: str, tensor: torch.Tensor, sizes: Mapping[str, int]
) -> Diagnostic | None:
    n, k = sizes["n"], sizes["k"]
    try:
        shape = logical_shape(scheme, binding, sizes, tensor)
        needed, least = binding.layout.stored_shape(shape), binding.layout.least_shape(shape)
        records = _records(scheme, storage, binding, sizes) if storage.record is not None else 0
    except ValueError as problem:
        return error(
            "shape",
            f"checkpoint tensor `{name}` is {list(tensor.shape)}: {problem}",
            binding.span,
            f"with n = {n}, k = {k}",
        )
    if storage.record is not None:
        size = records * storage.record
        if tensor.dtype not in (torch.uint8, torch.int8):
            return error("dtype", f"checkpoint tensor `{name}` is {tensor.dtype}, records are bytes (u8)", binding.span)
        if tensor.numel() != size:
            return error(
                "shape",
                f"checkpoint tensor `{name}` has {tensor.numel()} bytes, layout needs {size}",
                binding.span,
                f"with n = {n}, k = {k}",
            )
        return None
    if accepts(binding, tensor.dtype) is None and not _index_of_any_width(scheme, binding, tensor):
        return error(
            "dtype",
            f"checkpoint tensor `{name}` is {tensor.dtype}, layout needs {binding.stored}",
            binding.span,
            fix=_remedy(scheme, binding, tensor),
        )
    scalar = not needed and tuple(tensor.shape) == (1,)
    return (
        None
        if tuple(tensor.shape) in (needed, least) or scalar
        else shape_error(scheme, binding, name, tensor.shape, least, n, k)
    )


def _index_of_any_width(scheme: Scheme, binding: Binding, tensor: torch.Tensor) -> bool:
    return scheme.tensor(binding.tensor).dtype.kind == "index" and tensor.dtype in (torch.int64, torch.int32)


def _remedy(scheme: Scheme, binding: Binding, tensor: torch.Tensor) -> str:
    found = format_of(tensor.dtype)
    stands_for = [p for p, v in scheme.params.items() if v == binding.stored and p != "act"]
    if found and len(stands_for) == 1:
        return f"the scheme's parameter `{stands_for[0]}={found}` reads it as it is"
    return "convert the tensor, or declare its type in the scheme; values are never rounded silently"


# ---- records -----------------------------------------------------------------------------------------------------
def _records(scheme: Scheme, storage: Storage, binding: Binding, sizes: Mapping[str, int]) -> int:
    """How many records the stored tensor of a binding holds."""
    assert storage.record is not None
    together = [other for other in storage.bindings if other.source == binding.source]
    shapes = [other.layout.stored_shape(logical_shape(scheme, other, sizes)) for other in together]
    return _record_count(together, shapes, storage.record)


def _record_count(bindings: Sequence[Binding], shapes: Sequence[tuple[int, ...]], record: int) -> int:
    """The leading axes of every binding number the records and the others lie inside; all bindings agree on how many."""
    shared: set[int] = set()
    for at, (binding, shape) in enumerate(zip(bindings, shapes, strict=True)):
        word, fits = binding.layout.word // 8, set()
        for split in range(len(shape) + 1):
            if (binding.offset or 0) + math.prod(shape[split:]) * word <= record:
                fits.add(math.prod(shape[:split]))
        shared = shared & fits if at else fits
    if not shared:
        raise ValueError(f"its bindings do not fit records of {record} bytes")
    return min(shared)


def from_records(
    scheme: Scheme, storage: Storage, binding: Binding, sizes: Mapping[str, int], stored: torch.Tensor
) -> np.ndarray:
    """One binding's words out of the bytes of all records."""
    shape = binding.layout.stored_shape(logical_shape(scheme, binding, sizes, stored))
    records = _records(scheme, storage, binding, sizes)
    word, start = binding.layout.word // 8, binding.offset or 0
    field = bits_of(stored).reshape(records, -1)[:, start : start + math.prod(shape) // records * word]
    return np.ascontiguousarray(field).view(np.dtype(f"uint{word * 8}")).reshape(shape)


def to_records(parts: Sequence[tuple[Binding, np.ndarray]], record: int) -> np.ndarray:
    """The bytes of all records, one row per index of the first axis; bytes that no binding names are zero."""
    count = _record_count([b for b, _ in parts], [words.shape for _, words in parts], record)
    raw = np.zeros((count, record), np.uint8)
    for binding, words in parts:
        inside = np.ascontiguousarray(words).reshape(count, -1).view(np.uint8)
        raw[:, binding.offset : (binding.offset or 0) + inside.shape[1]] = inside
    return raw.reshape(parts[0][1].shape[0], -1)


# ---- values ------------------------------------------------------------------------------------------------------
def read(
    scheme: Scheme, storage: Storage, binding: Binding, tensors: Mapping[str, torch.Tensor], prefix: str,
    sizes: Mapping[str, int],
) -> np.ndarray:  # fmt: skip
    """Logical bit patterns of one declared tensor; raises ValueError when a value can't be represented in its type."""
    parts = []
    declared = scheme.tensor(binding.tensor)
    for name in names_of(binding, prefix, sizes):
        tensor = torch.as_tensor(tensors[name])
        shape = logical_shape(scheme, binding, sizes, tensor)
        if storage.record is not None:
            words = from_records(scheme, storage, binding, sizes, tensor)
            parts.append(patterns_of(binding, declared, words, binding.stored, shape, name))
            continue
        if declared.dtype.kind == "index":
            parts.append(_index(scheme, binding, declared, tensor, shape, sizes, name))
            continue
        stored = accepts(binding, tensor.dtype) or binding.stored
        words = bits_of(tensor).reshape(tensor.shape if shape else ())  # a scalar may be stored as [1]
        parts.append(patterns_of(binding, declared, words, stored, shape, name))
    return np.stack(parts) if binding.per_expert else parts[0]


def patterns_of(
    binding: Binding, declared: Tensor, words: np.ndarray, stored: DType, shape: tuple[int, ...], name: str = ""
) -> np.ndarray:
    """Bit patterns of the declared type out of stored words (unsigned) of format `stored`."""
    layout = binding.layout
    if binding.words:
        words = words + words.dtype.type(binding.words % (1 << layout.word))  # wraps, as the writer's subtraction did
    layout = layout if stored.bits == layout.word else replace(layout, word=stored.bits)
    fields = layout.unpack(words, shape)
    if declared.dtype.is_float:
        if stored.name == declared.dtype.name and binding.value == Stored():
            return fields
        if not stored.is_float and binding.value == Stored():
            return fields.astype(declared.dtype.storage)  # the bits themselves
        source = stored if stored.is_float else declared.dtype
        return declared.dtype.encode(_evaluate(binding.value, source.decode(fields)))
    if not is_packed(binding):
        _check_range(fields, stored, declared, name)
    shift = constant(_with(binding.value, 0.0))
    slope = (constant(_with(binding.value, 1.0)) or 0.0) - (shift or 0.0)
    kind = declared.dtype.storage
    value = fields.astype(kind, copy=False)
    with np.errstate(over="ignore"):  # sums and products wrap: modulo 2^bits they are right
        if round(slope) != 1:
            value = value * kind.type(round(slope) & ((1 << 8 * kind.itemsize) - 1))
        if shift:
            value = value + kind.type(round(shift) & ((1 << 8 * kind.itemsize) - 1))
        if value is fields and is_packed(binding) and layout.bits == declared.dtype.bits:
            return fields  # nothing above its bits
        return value & kind.type(declared.dtype.mask)


def words_of(binding: Binding, declared: Tensor, patterns: np.ndarray) -> np.ndarray:
    """The inverse of `patterns_of`: stored words (unsigned) of the binding's own format."""
    layout, stored = binding.layout, binding.stored
    if declared.dtype.is_float:
        if stored.is_float and (stored.name != declared.dtype.name or binding.value != Stored()):
            patterns = stored.encode(_invert(binding.value, declared.dtype.decode(patterns)))
        return layout.pack(patterns)
    shift = round(constant(_with(binding.value, 0.0)) or 0.0)
    slope = round(constant(_with(binding.value, 1.0)) or 0.0) - shift
    plain = not is_packed(binding) and stored.kind == "int"  # sign bits fill the stored word
    kind = np.dtype(f"uint{layout.word}") if plain else declared.dtype.storage
    value = patterns.astype(kind, copy=False)
    if (shift, slope) != (0, 1):  # the slope is 1 or -1; modulo the bits of a word
        whole = (1 << 8 * kind.itemsize) - 1
        value = (value - kind.type(shift & whole)) * kind.type(slope & whole)
    if declared.dtype.kind == "int" or not plain:
        value = value & kind.type(declared.dtype.mask)
    if plain and declared.dtype.kind == "int" and declared.dtype.bits < layout.word:
        sign = kind.type(1 << (declared.dtype.bits - 1))
        value = (value ^ sign) - sign
    words = layout.pack(value)
    return words - words.dtype.type(binding.words % (1 << layout.word)) if binding.words else words


def write(
    scheme: Scheme, storage: Storage, patterns: Mapping[str, np.ndarray], prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in this layout, the inverse of reading, without words of padding at the end.

    Records are assembled byte by byte.
    """
    result: dict[str, torch.Tensor] = {}
    records: dict[str, list[tuple[Binding, np.ndarray]]] = {}
    for binding in storage.bindings:
        if binding.tensor not in patterns:
            continue
        declared, whole = scheme.tensor(binding.tensor), patterns[binding.tensor]
        for e, part in enumerate(whole if binding.per_expert else [whole]):
            name = prefix + (expert_name(binding.source, e) if binding.per_expert else binding.source)
            words = words_of(binding, declared, part)
            if storage.record is None:
                words = words[tuple(slice(size) for size in binding.layout.least_shape(part.shape))]
                result[name] = tensor_of(words, stored_type(binding.stored))
            else:
                records.setdefault(name, []).append((binding, words))
    for name, parts in records.items():
        assert storage.record is not None
        result[name] = tensor_of(to_records(parts, storage.record), torch.uint8)
    return result


def stored_type(stored: DType) -> torch.dtype:
    """The torch type of a stored tensor of a format; bytes where torch has none."""
    small = getattr(torch, _SMALL.get(stored.name, ""), torch.uint8)
    return _FLOATS.get(stored.name) or _INTEGERS.get(stored.name) or small


def _check_range(fields: np.ndarray, stored: DType, declared: Tensor, name: str) -> None:
    """A plain integer wider than its declared type must hold a value of that type, in either sign convention."""
    bits = declared.dtype.bits
    if stored.bits == bits:
        return
    value = stored.decode(fields).astype(np.int64)
    bad = (value < -(1 << (bits - 1))) | (value >= 1 << bits)
    if bad.any():
        at = np.argwhere(bad)[0]
        raise ValueError(
            f"`{name}` holds {value[tuple(at)]} at {at.tolist()}, which no {declared.dtype} `{declared.name}` can be"
        )


def _index(
    scheme: Scheme, binding: Binding, declared: Tensor, tensor: torch.Tensor, shape: tuple[int, ...],
    sizes: Mapping[str, int], name: str,
) -> np.ndarray:  # fmt: skip
    """An index tensor: every element must name an existing position."""
    assert declared.extent is not None
    limit = extent_of(declared.extent, sizes, scheme)
    value = tensor.detach().cpu().to(torch.int64).numpy().reshape(shape)
    value = _evaluate(binding.value, value.astype(np.float64)).astype(np.int64)
    bad = (value < 0) | (value >= limit)
    if bad.any():
        at = np.argwhere(bad)[0]
        raise ValueError(
            f"`{name}` names position {value[tuple(at)]} at {at.tolist()}, but `{declared.extent}` has only {limit}"
        )
    return value.astype(np.uint32)


def _evaluate(value: Expr, stored: np.ndarray) -> np.ndarray:
    return np.asarray(evaluate(value, lambda _: stored, lambda *_: stored))


def _with(value: Expr, stored: float) -> Expr:
    """The convention with a number in place of the stored element."""
    return Number(stored) if isinstance(value, Stored) else value.map(lambda child: _with(child, stored))


def _invert(value: Expr, declared: np.ndarray) -> np.ndarray:
    """The stored value whose convention gives `declared`, in float64."""
    match value:
        case Stored():
            return declared
        case Negate(inner):
            return _invert(inner, -declared)
        case Binary(op, left, right):
            fixed = constant(right)
            with np.errstate(divide="ignore", invalid="ignore"):
                if fixed is not None:
                    undo = {
                        "+": lambda y: y - fixed,
                        "-": lambda y: y + fixed,
                        "*": lambda y: y / fixed,
                        "/": lambda y: y * fixed,
                    }
                    return _invert(left, undo[op](declared))
                first = constant(left)
                assert first is not None, "the checker admits only conventions with constants"
                undo = {
                    "+": lambda y: y - first,
                    "-": lambda y: first - y,
                    "*": lambda y: y / first,
                    "/": lambda y: first / y,
                }
                return _invert(right, undo[op](declared))
        case _:
            raise AssertionError(f"the checker admits no convention like `{value}`")
