"""GPTQ, as AutoGPTQ, GPTQModel and auto-round write it: codes of 2 to 8 bits, scales and zero points per group along K.

A label in the configuration says how zero points are stored: as they are ("gptq_v2", "gptq_p") or less one ("gptq",
also without a label).  Whether groups lie in order is in `g_idx` alone: writers set `desc_act` for files whose groups
do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qdsl.diagnostic import CheckpointError
from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import (
    decoded,
    fits,
    float_type,
    groups_of,
    has_bias,
    index_alike,
    is_float,
    parts,
    spellings,
    stacks,
)
from qdsl.runtime.checkpoints.settings import pattern, table

_PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")
_LABELS = ("gptq", "gptq_v2", "gptq_p")
_REFUSED = {
    "marlin": "its codes are in the order of Marlin's tiles",
    "bitblas": "its codes are in the order of BitBLAS' tiles",
    "gemm": 'this is the layout of AWQ; set quant_method to "awq"',
}
_BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}
_PLANES = (3, 5, 6, 7)  # widths that "gptq_p" cuts in planes of bits


@dataclass(frozen=True)
class Settings:
    """What a configuration says of one module; `rule` is the place that says so."""

    bits: int
    group: int
    symmetric: bool
    act_order: bool
    rule: str = "the configuration"


@dataclass(frozen=True)
class Form:
    """How a file stores what all its modules have.

    label         one of `checkpoint_format`
    whole_words   whether its zero points are shifted as words, so that borrows cross from field to field
    """

    label: str
    whole_words: bool

    def zeros(self, bits: int) -> str:
        """The layout that reads codes and zero points."""
        if self.label == "gptq_p" and bits in _PLANES:
            return "gptq_planar"
        if self.label != "gptq":
            return "gptq_v2"
        return "gptqmodel_v1" if self.whole_words and 32 % bits == 0 else "gptq_v1"


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    form = _form(config, found)
    top = _settings(config, found)
    rules = _rules(config, top, found)
    if found.problems:
        return found
    inside = _flat(config.get("modules_in_block_to_quantize") or [])

    def settings(name: str) -> tuple[Settings, bool | None]:
        """A module's settings, and whether they say that it is quantized (None: nothing does)."""
        for matcher, own in rules:
            if any(matcher.match(spelling) for spelling in spellings(name)):
                return own or top, own is not None
        if inside and name.rpartition(".")[2] != "lm_head":
            return top, any(entry in spelling for entry in inside for spelling in spellings(name))
        return top, True if config.get("lm_head") and name.rpartition(".")[2] == "lm_head" else None

    choose(form, settings, modules, stored, read, found)
    return found


def choose(
    form: Form, settings: Callable[[str], tuple[Settings, bool | None]], modules: Mapping[str, Module], stored: Headers,
    read: Read, found: Plan,
) -> None:  # fmt: skip
    """Decide what every stored module is, by its settings and its tensors."""
    ordered = any(name.endswith(".g_idx") for name in stored)
    for name, module in modules.items():
        tensors, (own, says) = parts(name, _PARTS, stored), settings(name)
        quantized = any(part != "bias" for part in tensors.values())
        if quantized and f"{name}.weight" in stored:
            found.problems.append(
                f"`{name}` is stored both quantized ({', '.join(tensors.values())}) and dense (weight)"
            )
        elif quantized:
            _choose(name, module, tensors, stored, read, own, form, ordered, found)
            if says is False:
                found.contradictions.append(f"`{name}` is not to be quantized, but is stored quantized")
        elif is_float(stored.get(f"{name}.weight")) and says:
            found.contradictions.append(f"`{name}` is to be quantized, but is stored dense")
    _zeros_alike(form, modules, stored, read, found)
    index_alike(modules, found, "g_idx")


def _zeros_alike(form: Form, modules: Mapping[str, Module], stored: Headers, read: Read, found: Plan) -> None:
    """Where some experts have zero points of their own, those of the others are read as well: a stack has one scheme."""
    for stack in stacks(modules, found):
        constant = [name for name in stack if found.choices[name].layout == "gptq"]
        for name in constant if len(constant) < len(stack) else ():
            old, module, tensor = found.choices[name], stack[name], f"{name}.qzeros"
            bits, zeros = int(old.params["bits"]), {"qzeros": read(tensor)}
            layout = form.zeros(bits)
            about = ("gptq", old.params, layout, "z", zeros, module.n, module.k)
            if not fits(*about) or (decoded(*about) == 1 << (bits - 1)).all():
                found.choices[name] = replace(
                    old, scheme=old.scheme.replace("_sym", ""), layout=layout, tensors={**old.tensors, tensor: "qzeros"},
                    unread=tuple(full for full in old.unread if full != tensor),
                )  # fmt: skip


# ---- the configuration -------------------------------------------------------------------------------------------
def _form(config: Mapping[str, Any], found: Plan) -> Form:
    label = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if config.get("is_marlin_format"):
        label = "marlin"
    if label not in _LABELS:
        known = f"(supported: {', '.join(_LABELS)})"
        found.problems.append(f"GPTQ with checkpoint_format `{label}` is not supported: {_REFUSED.get(label, known)}")
    return Form(label, _shifts_words(config))


def _shifts_words(config: Mapping[str, Any]) -> bool:
    """Whether GPTQModel wrote the file, of which all versions from 0.9 on add and subtract whole words of zeros."""
    writers = table(config, "meta").get("quantizer") or ()
    for writer in writers if isinstance(writers, list) else [writers]:
        name, _, version = str(writer).partition(":")
        numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
        if name.lower() == "gptqmodel" and (not numbers or numbers >= [0, 9]):
            return True
    return False


def _settings(config: Mapping[str, Any], found: Plan, base: Settings | None = None, rule: str = "") -> Settings:
    """What a configuration, or a rule in it, says; what no format can be goes to the plan's problems."""
    bits = config.get("bits", config.get("w_bit", config.get("wbits", base and base.bits)))
    group = config.get("group_size", config.get("q_group_size", base and base.group))
    symmetric = config.get(
        "sym", not config["zero_point"] if "zero_point" in config else base.symmetric if base else True
    )
    place = f" in {rule}" if rule else ""
    label = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    known = _BITS.get(label, _BITS["gptq"]) if base is None else _BITS["gptq_p"]
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in known:
        found.problems.append(f"GPTQ with bits = {bits}{place}: `{label}` has {', '.join(map(str, known))}")
        bits = 4
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        found.problems.append(f"GPTQ with group_size = {group}{place}: a positive number, or -1 for one group over K")
        group = -1
    act_order = bool(config.get("desc_act", base.act_order if base else False))
    return Settings(bits, group, bool(symmetric), act_order, rule or "the configuration")


def _rules(config: Mapping[str, Any], top: Settings, found: Plan) -> list[tuple[re.Pattern[str], Settings | None]]:
    """`dynamic`: patterns that are matched at the start of a name, those that exclude modules (None) before the rest."""
    negative, positive = [], []
    for key, changes in table(config, "dynamic").items():
        excludes, rule = key.startswith("-:"), f"dynamic[{key!r}]"
        matcher = pattern(key.removeprefix("-:").removeprefix("+:"), rule)
        if excludes:
            negative.append((matcher, None))
        elif not isinstance(changes, Mapping):
            found.problems.append(f"{rule} = {changes!r}: settings are wanted, such as {{'bits': 8}}")
        else:
            positive.append((matcher, _settings(changes, found, top, rule)))
    return [*negative, *positive]


def _flat(entries: Any) -> list[str]:
    """The names of a list, or of a list of lists."""
    if not isinstance(entries, list):
        raise CheckpointError(f"modules_in_block_to_quantize = {entries!r}: a list is needed")
    return [str(e) for entry in entries for e in (entry if isinstance(entry, list) else [entry])]


# ---- one module --------------------------------------------------------------------------------------------------
def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, read: Read, own: Settings, form: Form,
    ordered: bool, found: Plan,
) -> None:  # fmt: skip
    n, k, bits = module.n, module.k, own.bits
    if bits not in _BITS[form.label]:
        found.problems.append(f"`{name}` has bits = {bits} by {own.rule}, which `{form.label}` can't store")
        return
    if problem := _width(name, n, k, own, stored):
        found.problems.append(problem)
        return
    group, groups = groups_of(own.group, k)
    index = _index(name, k, own, groups, stored, read, ordered, found)
    params = {"bits": bits, "group": group, **float_type(stored.get(f"{name}.scales"))}
    layout, symmetric = form.zeros(bits), False
    if f"{name}.qzeros" not in stored:
        found.problems.append(f"`{name}.qzeros` is missing")
    elif own.symmetric:
        symmetric = _constant_zeros(name, bits, group, layout, form, own.rule, stored, read, n, k, found)
    if symmetric and layout != "gptq_planar":
        scheme, layout = "gptq_sym_actorder" if index else "gptq_sym", "gptq"
    else:
        scheme = "gptq_actorder" if index else "gptq"
    unread = [f"{name}.{part}" for part in ("qzeros",) * (layout == "gptq") + ("g_idx",) * (not index)]
    for full in unread:
        tensors.pop(full, None)
    why = f"{bits} bits, group_size {own.group} by {own.rule}; zeros as `{form.label}` stores them" + (
        f", all {1 << (bits - 1)}" if symmetric else ""
    )
    why += "; g_idx names groups out of order" if index else "; groups in order"
    bias = has_bias(name, module, stored, found)
    found.choices[name] = Choice(scheme, params, layout, bias, tensors, unread=tuple(unread), why=why)


def _width(name: str, n: int, k: int, own: Settings, stored: Headers) -> str:
    """What is wrong when codes of the width that the settings say do not fill qweight."""
    codes = stored.get(f"{name}.qweight")
    if codes is None or codes.dim() != 2:
        return "" if codes is None else f"`{name}.qweight` is {list(codes.shape)}, codes are a matrix"
    needed = [-(-k // 32) * own.bits, n]
    if list(codes.shape) == needed:
        return ""
    other = codes.shape[1] == n and [b for b in _BITS["gptq_p"] if -(-k // 32) * b == codes.shape[0]]
    hint = f"; {other[0]} bits would fit: is there a rule missing in `dynamic`?" if other else ""
    return (
        f"`{name}.qweight` is {list(codes.shape)}, {own.bits} bits (by {own.rule}) with n = {n}, k = {k} need "
        f"{needed}{hint}"
    )


def _constant_zeros(
    name: str, bits: int, group: int | str, layout: str, form: Form, rule: str, stored: Headers, read: Read, n: int,
    k: int, found: Plan,
) -> bool:  # fmt: skip
    """Whether the stored zero points all are the middle code, as "sym" says; if they are not, they count."""
    params = {"bits": bits, "group": group}
    tensor = f"{name}.qzeros"
    if not fits("gptq", params, layout, "z", {"qzeros": stored[tensor]}, n, k):
        return True  # the layout that reads them will say what is wrong with their shape
    zeros, middle = {"qzeros": read(tensor)}, 1 << (bits - 1)
    if (decoded("gptq", params, layout, "z", zeros, n, k) == middle).all():
        return True
    other = "gptq_v1" if layout == "gptq_v2" else "gptq_v2"
    if layout != "gptq_planar" and (decoded("gptq", params, other, "z", zeros, n, k) == middle).all():
        found.contradictions.append(
            f"`{name}`: the label `{form.label}` and `qzeros` disagree on whether zero points are stored less one; "
            f"the file is symmetric, so they are {middle}"
        )
        return True
    found.contradictions.append(f"`{name}` is symmetric by {rule}, but its zero points are not all {middle}")
    return False


def _index(
    name: str, k: int, own: Settings, groups: int, stored: Headers, read: Read, ordered: bool, found: Plan
) -> bool:
    """Whether g_idx says more than that groups lie in order."""
    header, tensor = stored.get(f"{name}.g_idx"), f"{name}.g_idx"
    if header is None or header.numel() == 0:
        if ordered and header is None:  # only files of old writers lack them, and those lack them all
            found.problems.append(f"`{tensor}` is missing, though other modules have one")
        elif own.act_order and groups > 1:
            found.problems.append(f"`{name}` has desc_act by {own.rule}, but no g_idx that names its groups")
        return False
    if tuple(header.shape) != (k,) or header.dtype not in (torch.int32, torch.int64):
        found.problems.append(
            f"`{tensor}` is {list(header.shape)} {header.dtype}; it names a group for each of k = {k}"
        )
        return False
    index = read(tensor).to(torch.int64)
    if torch.equal(index, torch.arange(k) // (k if groups == 1 else own.group)):
        return False
    if bool((index == 0).all()):
        if own.act_order:
            found.problems.append(
                f"`{tensor}` is all zero, which no act-order of {groups} groups can be (desc_act by {own.rule})"
            )
        return False
    if int(index.min()) < 0 or int(index.max()) >= groups:
        found.problems.append(
            f"`{tensor}` names group {int(index.max() if index.min() >= 0 else index.min())} of {groups}"
        )
        return False
    if not own.act_order:
        found.contradictions.append(f"`{name}` has no desc_act by {own.rule}, but its g_idx is not in order")
    return True
