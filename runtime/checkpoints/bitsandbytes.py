"""bitsandbytes: 4-bit codes of a code book with an absmax per run of weights, or LLM.int8's rows.

Everything about a 4-bit weight is in a record of its own, JSON in a tensor of bytes; the configuration only says that
there are such weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from qdsl.runtime.checkpoints import Choice, Headers, Made, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import decoded_table, has_bias, is_float, listed, parts
from qdsl.runtime.checkpoints.settings import names

_STATE = "weight.quant_state.bitsandbytes__"
_BOOKS = {"nf4": "nf4", "fp4": "bnb_fp4"}
_PARTS = (
    "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    *(_STATE + kind for kind in _BOOKS), "SCB", "weight_format", "bias",
)  # fmt: skip


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    skipped = names(config, "llm_int8_skip_modules")
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        weight = stored.get(f"{name}.weight")
        quantized = (weight is not None and not is_float(weight)) or tensors.keys() - {f"{name}.weight", f"{name}.bias"}
        if not quantized:
            continue
        own = {part: stored[full] for full, part in tensors.items()}
        if listed(name, skipped):
            found.contradictions.append(f"`{name}` is on the list llm_int8_skip_modules, but is stored quantized")
        if "SCB" in own or (weight is not None and weight.dtype == torch.int8):
            _rows(name, module, tensors, stored, read, found)
        else:
            _codes(name, module, tensors, own, stored, read, found)
    return found


def _rows(name: str, module: Module, tensors: dict[str, str], stored: Headers, read: Read, found: Plan) -> None:
    """int8 with the largest magnitude of each row; the outliers of LLM.int8 are in x, which stays as it is here."""
    order = f"{name}.weight_format"
    if order in stored and bool((read(order) != 0).any()):
        found.problems.append(f"`{order}` is not 0: rows are in another order than their own, which is not supported")
        return
    bias = has_bias(name, module, stored, found)
    kept = {full: part for full, part in tensors.items() if full != order}
    why = "int8 with SCB; activations stay as they are"
    found.choices[name] = Choice("w8a16_group", {"group": "k"}, "bitsandbytes", bias, kept, unread=(order,), why=why)


def _codes(
    name: str, module: Module, tensors: dict[str, str], own: Headers, stored: Headers, read: Read, found: Plan
) -> None:
    kinds = [kind for kind in _BOOKS if _STATE + kind in own]
    if len(kinds) != 1:
        names = " or ".join(f"`{name}.{_STATE}{kind}`" for kind in _BOOKS)
        what = "is there twice" if kinds else "is missing"
        found.problems.append(f"the record of `{name}`, {names}, {what}: it says what the codes mean")
        return
    record = f"{name}.{_STATE}{kinds[0]}"
    state = _state(record, read, found)
    if state is None:
        return
    kind, block = state.get("quant_type"), state.get("blocksize")
    wanted = {"quant_type": (kind, kinds[0]), "shape": (state.get("shape"), [module.n, module.k])}
    wrong = [f"{key} {have}, needed is {need}" for key, (have, need) in wanted.items() if have != need]
    if not isinstance(block, int) or block < 2 or module.k % block:
        wrong.append(f"blocksize {block}, and rows of k = {module.k} are no multiple of it: groups would cross rows")
    if wrong:
        found.problems += [f"`{record}` says {text}" for text in wrong]
        return
    scheme = _BOOKS[kinds[0]]
    if not _known_book(name, scheme, own, read, found):
        return
    nested = "weight.nested_absmax" in own or own.get("weight.absmax", torch.empty(0)).dtype == torch.uint8
    made = {"weight.absmax": _absmax(name, module, own, state, found)} if nested else {}
    if None in made.values():
        return
    unread = (record, f"{name}.weight.quant_map")
    kept = {full: part for full, part in tensors.items() if full not in unread}
    bias = has_bias(name, module, stored, found)
    why = f"{kind} in runs of {block}" + (", absmax quantized once more" if nested else "")
    params = {"group": block}
    found.choices[name] = Choice(scheme, params, "bitsandbytes", bias, kept, made=made, unread=unread, why=why)


def _state(record: str, read: Read, found: Plan) -> dict[str, Any] | None:
    try:
        state = json.loads(bytes(read(record).to(torch.uint8).flatten().tolist()))
    except ValueError as problem:
        found.problems.append(f"`{record}` is not readable as JSON ({problem})")
        return None
    if not isinstance(state, dict):
        found.problems.append(f"`{record}` is not a JSON object")
        return None
    return state


def _known_book(name: str, scheme: str, own: Headers, read: Read, found: Plan) -> bool:
    """The stored code book must be the scheme's."""
    full = f"{name}.weight.quant_map"
    if "weight.quant_map" not in own:
        found.problems.append(f"`{full}` is missing")
        return False
    book = decoded_table(scheme, "c")
    if own["weight.quant_map"].numel() != len(book) or not torch.equal(read(full).double().flatten(), book):
        found.problems.append(f"`{full}` is not the code book of `{scheme}`")
        return False
    return True


def _absmax(name: str, module: Module, own: Headers, state: Mapping[str, Any], found: Plan) -> Made | None:
    """The absmax that is quantized itself, in runs that take no notice of rows."""
    sources = ("weight.absmax", "weight.nested_absmax", "weight.nested_quant_map")
    run, offset, count = (
        state.get("nested_blocksize"),
        state.get("nested_offset"),
        module.n * module.k // state["blocksize"],
    )
    shapes = {
        sources[0]: count,
        sources[1]: -(-count // run) if isinstance(run, int) and run > 0 else None,
        sources[2]: 256,
    }
    problems = [
        f"`{name}.{part}` is " + ("missing" if part not in own else f"{list(own[part].shape)}, needed is [{size}]")
        for part, size in shapes.items()
        if part not in own or list(own[part].shape) != [size]
    ]
    if not isinstance(offset, int | float):
        problems.append(f"`{name}.{_STATE}{state['quant_type']}` has no nested_offset")
    found.problems += problems
    if problems:
        return None

    def make(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes, factors, table = (tensors[part] for part in sources)
        return table[codes.long()] * factors.repeat_interleave(run)[:count] + torch.tensor(offset)

    return Made(torch.empty(count, dtype=torch.float32, device="meta"), sources, make)
