"""compressed-tensors, as llm-compressor writes it: groups of modules, each with its own format and arguments.

A group's `format` says what is stored, its `weights` how the weight was quantized, its `input_activations` what happens
to x.  Codes and zero points of packed formats are offset by half their range; scales multiply, save NVFP4's global one,
which divides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qdsl.runtime.checkpoints import Choice, Headers, Made, Module, Plan, Read
from qdsl.runtime.checkpoints.modules import (
    float_type,
    groups_of,
    has_bias,
    index_alike,
    is_float,
    kv_scales,
    parts,
    spellings,
)
from qdsl.runtime.checkpoints.settings import names, pattern, table

_CODES = ("weight_packed", "weight")
_PARTS = (
    *_CODES, "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale", "input_scale",
    "input_zero_point", "input_global_scale", "bias",
)  # fmt: skip
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
_SYNONYMS = {"dynamic": "group", "static": "weight"}  # of `actorder`
_E4M3 = torch.float8_e4m3fn
# For each format the types that its codes may have, by the tensor's name.
_STORED: dict[str, dict[str, tuple[torch.dtype, ...]]] = {
    "pack-quantized": {"weight_packed": (torch.int32,)},
    "int-quantized": {"weight": (torch.int8,)},
    "float-quantized": {"weight": (_E4M3,)},
    "naive-quantized": {"weight": (torch.int8, _E4M3)},
    "mxfp8-quantized": {"weight": (_E4M3,)},
    "nvfp4-pack-quantized": {"weight_packed": (torch.uint8,)},
    "mxfp4-pack-quantized": {"weight_packed": (torch.uint8,)},
}


@dataclass(frozen=True)
class Args:
    """How a tensor is quantized; `dynamic` is False, True or "local"."""

    bits: int
    kind: str
    symmetric: bool
    group: int
    strategy: str
    block: tuple[int, ...]
    dynamic: bool | str
    order: str

    def __str__(self) -> str:
        size = (
            f" {self.group}"
            if self.strategy in ("group", "tensor_group")
            else f" {list(self.block)}" * bool(self.block)
        )
        when = {False: "static", True: "dynamic"}.get(self.dynamic, self.dynamic)
        return f"{self.kind}{self.bits} {'' if self.symmetric else 'a'}symmetric per {self.strategy}{size}, {when}"


@dataclass(frozen=True)
class Group:
    """One of `config_groups`."""

    name: str
    format: str
    targets: tuple[str, ...]
    weights: Args | None
    inputs: Args | None


def plan(config: Mapping[str, Any], modules: Mapping[str, Module], stored: Headers, read: Read) -> Plan:
    found = Plan()
    groups = _groups(config, found)
    ignored = names(config, "ignore")
    for entry in (*ignored, *(target for group in groups for target in group.targets)):
        if entry.startswith("re:"):
            pattern(entry[3:], f"`{entry}`")
    if found.problems:
        return found
    found.skipped |= kv_scales(stored, found)
    for name, module in modules.items():
        tensors = parts(name, _PARTS, stored)
        quantized = any(part not in ("weight", "bias") for part in tensors.values()) or (
            f"{name}.weight" in stored and not is_float(stored[f"{name}.weight"])
        )
        listed, group = _matches(name, ignored), _group_of(name, groups)
        if not quantized:
            if f"{name}.weight" in stored and group and group.weights and not listed:
                found.contradictions.append(f"`{name}` is a target of `{group.name}`, but is stored dense")
            continue
        if group is None or group.weights is None:
            found.problems.append(
                f"`{name}` is stored quantized ({', '.join(tensors.values())}), but no group of `config_groups` targets it"
            )
            continue
        if listed:
            found.contradictions.append(f"`{name}` is on the list `ignore`, but is stored quantized")
        _choose(name, module, tensors, stored, read, group, group.weights, found)
    index_alike(modules, found, "weight_g_idx")
    return found


# ---- the configuration -------------------------------------------------------------------------------------------
def _groups(config: Mapping[str, Any], found: Plan) -> list[Group]:
    if table(config, "sparsity_config").get("targets"):
        found.problems.append(
            "compressed-tensors with `sparsity_config`: sparse weights are not supported; save it dense"
        )
    if table(config, "transform_config").get("config_groups"):
        found.problems.append("compressed-tensors with `transform_config`: transforms of activations are not supported")
    groups = []
    for name in table(config, "config_groups"):
        entry = table(table(config, "config_groups"), name)
        format = str(entry.get("format") or config.get("format") or "").replace("_", "-")
        targets = names(entry, "targets")
        if targets and all(target.endswith("Attention") for target in targets):
            continue  # describes the key-value cache
        weights = _args(table(entry, "weights"), f"config_groups[{name!r}].weights", found)
        inputs = _args(table(entry, "input_activations"), f"config_groups[{name!r}].input_activations", found)
        if format not in _FORMATS:
            known = ", ".join(_FORMATS)
            found.problems.append(f"config_groups[{name!r}] has format `{format}`, which is not supported ({known})")
        if entry.get("output_activations"):
            found.problems.append(f"config_groups[{name!r}] quantizes output_activations, which is not supported")
        groups.append(Group(name, format, targets, weights, inputs))
    if not groups and not found.problems:
        found.problems.append("compressed-tensors without `config_groups`: nothing says how weights are quantized")
    return groups


def _args(given: Mapping[str, Any] | None, place: str, found: Plan) -> Args | None:
    """QuantizationArgs, with what it leaves out inferred as compressed-tensors does."""
    if not given:
        return None
    group = given.get("group_size")
    strategy = given.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    block, dynamic = given.get("block_structure") or [], given.get("dynamic", False)
    if not isinstance(block, list) or not all(isinstance(size, int) and size > 0 for size in block):
        found.problems.append(f"{place}: block_structure = {block}; two numbers are needed")
        block = []
    if not isinstance(dynamic, bool) and dynamic != "local":
        found.problems.append(f"{place}: dynamic = {dynamic}; true, false or local is needed")
        dynamic = False
    order = given.get("actorder") or ""
    bits = given.get("num_bits", 8)
    if strategy in ("group", "tensor_group") and (not isinstance(group, int) or group < 1):
        found.problems.append(f"{place}: strategy `{strategy}` with group_size = {group}; a positive number is needed")
        group = 1
    if strategy == "block" and len(block) != 2:
        found.problems.append(f"{place}: strategy `block` with block_structure = {block}; two numbers are needed")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        found.problems.append(f"{place}: num_bits = {bits}; a number of bits is needed")
        bits = 8
    return Args(
        bits, str(given.get("type", "int")), bool(given.get("symmetric", True)), group if isinstance(group, int) and group > 0 else -1,
        str(strategy), tuple(block), dynamic, _SYNONYMS.get(str(order), str(order)),
    )  # fmt: skip


def _matches(name: str, entries: tuple[str, ...]) -> bool:
    """Whether one entry means a module: a pattern from the start of its name, its name, or the class of linears."""
    return any(_is(spelling, entry) for entry in entries for spelling in spellings(name)) or "Linear" in entries


def _is(name: str, entry: str) -> bool:
    return bool(re.match(entry[3:], name)) if entry.startswith("re:") else name == entry


def _group_of(name: str, groups: list[Group]) -> Group | None:
    """The group that names a module, or else the one of all linears."""
    named = (g for g in groups if any(_is(s, target) for target in g.targets for s in spellings(name)))
    return next(named, None) or next((g for g in groups if "Linear" in g.targets), None)


# ---- one module --------------------------------------------------------------------------------------------------
def _choose(
    name: str, module: Module, tensors: dict[str, str], stored: Headers, read: Read, group: Group, weights: Args,
    found: Plan,
) -> None:  # fmt: skip
    if problem := _misfit(name, stored, group):
        found.problems.append(problem)
        return
    own = {part: stored[full] for full, part in tensors.items()}
    about = _Module(name, module.n, module.k, own, read)
    format = group.format
    if format == "naive-quantized":
        format = "int-quantized" if weights.kind == "int" else "float-quantized"
    decide = {
        "pack-quantized": _packed, "int-quantized": _integers, "float-quantized": _floats, "mxfp8-quantized": _mxfp8,
        "nvfp4-pack-quantized": _nvfp4, "mxfp4-pack-quantized": _mxfp4,
    }[format]  # fmt: skip
    chosen = decide(about, weights, group.inputs, found)
    if chosen is None:
        found.problems.append(
            f"`{name}` is {group.format}, weights {weights}, input {group.inputs or 'as it is'} (config_groups"
            f"[{group.name!r}]): no scheme is known for this"
        )
        return
    unread = tuple(f"{name}.{part}" for part in chosen.unread)
    kept = {full: part for full, part in tensors.items() if full not in unread}
    why = f"{group.name}: {group.format}, weights {weights}, input {group.inputs or 'as it is'}{chosen.why}"
    bias = has_bias(name, module, stored, found)
    found.choices[name] = Choice(
        chosen.scheme, chosen.params, chosen.layout, bias, kept, made=chosen.made, unread=unread, why=why
    )


def _misfit(name: str, stored: Headers, group: Group) -> str:
    """What is wrong with the tensor of codes, for the format that the configuration says."""
    for part, kinds in _STORED[group.format].items():
        full = f"{name}.{part}"
        other = next(p for p in _CODES if p != part)
        if full not in stored:
            beside = f" (but `{name}.{other}` is there)" if f"{name}.{other}" in stored else ""
            return f"`{full}` is missing{beside}: {group.format} (config_groups[{group.name!r}]) stores the codes in it"
        if f"{name}.{other}" in stored:
            return f"`{name}` has both `{full}` and `{name}.{other}`, and {group.format} stores one"
        if stored[full].dtype not in kinds:
            wanted = " or ".join(str(kind) for kind in kinds)
            return f"`{full}` is {stored[full].dtype}, {group.format} (config_groups[{group.name!r}]) stores {wanted}"
    return ""


@dataclass(frozen=True)
class _Module:
    name: str
    n: int
    k: int
    own: Mapping[str, torch.Tensor]
    read: Read

    def number(self, part: str) -> torch.Tensor:
        return self.read(f"{self.name}.{part}")


@dataclass(frozen=True)
class _Chosen:
    scheme: str
    params: Mapping[str, Any]
    layout: str = "compressed_tensors"
    unread: tuple[str, ...] = ()
    made: Mapping[str, Made] = field(default_factory=dict)
    why: str = ""


def _packed(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    """Codes of some bits in words along K."""
    if w.kind != "int" or w.strategy not in ("group", "channel") or w.dynamic:
        return None
    k, own = about.k, about.own
    _check_shape(about, found)
    group, groups = groups_of(w.group, k)
    index = _index(about, groups, w, found)
    unread = ("weight_shape",) + (("weight_g_idx",) if "weight_g_idx" in own and not index else ())
    params = {"bits": w.bits, "group": group, **float_type(own.get("weight_scale"))}
    order = "; weight_g_idx names groups out of order" if index else ""
    if x is not None:
        fp8 = x.kind == "float" and x.bits == 8 and x.strategy == "token" and x.dynamic is True and x.symmetric
        if not (fp8 and w.bits == 4 and w.symmetric and not index):
            return None
        return _Chosen("w4a8_fp8", {k: v for k, v in params.items() if k != "bits"}, "pack_quantized", unread)
    codes = own["weight_packed"]
    layout = "pack_quantized"
    dense, padded = -(-k * w.bits // 32), -(-k // (32 // w.bits))
    if codes.dim() == 2 and dense != padded and codes.shape[1] == padded and w.symmetric and not index:
        layout = "pack_quantized_padded"
        order += "; whole codes in a word, as versions up to 0.11 pack"
    if not w.symmetric:
        return _Chosen("gptq_actorder" if index else "gptq", params, "pack_quantized", unread, why=order)
    if "weight_zero_point" in own:
        zero = 1 << (w.bits - 1)
        found.problems.append(
            f"`{about.name}.weight_zero_point` is stored, but config_groups says symmetric (zero {zero}); which is it?"
        )
    return _Chosen("gptq_sym_actorder" if index else "gptq_sym", params, layout, unread, why=order)


def _check_shape(about: _Module, found: Plan) -> None:
    """weight_shape must be the module's."""
    full = f"{about.name}.weight_shape"
    if "weight_shape" not in about.own:
        found.problems.append(f"`{full}` is missing")
    elif about.own["weight_shape"].numel() == 2:
        shape = about.number("weight_shape").tolist()
        if shape != [about.n, about.k]:
            found.problems.append(f"`{full}` says {shape}, the model needs [{about.n}, {about.k}]")
    else:
        found.problems.append(f"`{full}` holds {about.own['weight_shape'].numel()} numbers, a shape has two")


def _index(about: _Module, groups: int, w: Args, found: Plan) -> bool:
    """Whether weight_g_idx says more than that groups lie in order."""
    full, header = f"{about.name}.weight_g_idx", about.own.get("weight_g_idx")
    if header is None:
        if w.order == "group" and groups > 1:
            found.problems.append(f"`{full}` is missing, and actorder `group` needs the names of groups")
        return False
    if tuple(header.shape) != (about.k,) or header.dtype not in (torch.int32, torch.int64):
        found.problems.append(
            f"`{full}` is {list(header.shape)} {header.dtype}; it names a group for each of k = {about.k}"
        )
        return False
    index = about.number("weight_g_idx").to(torch.int64)
    if bool((index == -1).all()) and w.order != "group":
        return False
    if int(index.min()) < 0 or int(index.max()) >= groups:
        found.problems.append(
            f"`{full}` names group {int(index.max() if index.min() >= 0 else index.min())} of {groups}"
        )
        return False
    if torch.equal(index, torch.arange(about.k) // (about.k if groups == 1 else w.group)):
        return False
    if w.order != "group":
        found.contradictions.append(f"`{about.name}` has no actorder `group`, but its weight_g_idx is not in order")
    return True


def _integers(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    """Signed codes, one in a byte."""
    if w.kind != "int" or w.dynamic or w.order == "group":
        return None
    made = _spread(about) if w.strategy == "tensor" else {}
    channel, (group, _) = w.strategy in ("channel", "tensor"), groups_of(w.group, about.k)
    if not channel and w.strategy != "group":
        return None
    if x is None:
        if not w.symmetric:
            return _Chosen("w8a16_asym", {"group": group}, made=made) if w.bits == 8 else None
        if w.bits == 8:
            return _Chosen("w8a16", {}, made=made) if channel else _Chosen("w8a16_group", {"group": group})
        params = {"bits": w.bits, "group": group, **float_type(about.own.get("weight_scale"))}
        return None if w.strategy == "tensor" or w.bits > 8 else _Chosen("gptq_sym", params, "int_quantized")
    if not w.symmetric or x.bits != 8:
        return None
    token = x.strategy == "token" and x.dynamic is True
    if x.kind == "float":
        scales = float_type(about.own.get("weight_scale"))
        fits = w.bits == 4 and w.strategy == "group" and token and x.symmetric
        return _Chosen("w4a8_fp8", {"group": group, **scales}, "int_quantized") if fits else None
    if not channel:
        return None
    if token and w.bits == 4:
        return _Chosen("w4a8_dynamic", {}, made=made) if x.symmetric else None
    if w.bits != 8:
        return None
    if token:
        return _Chosen("w8a8_dynamic" if x.symmetric else "w8a8_dynamic_asym", {}, made=made)
    if x.strategy != "tensor" or x.dynamic:
        return None
    if not x.symmetric:
        return _Chosen("w8a8_static", {}, made=made)
    if "input_zero_point" in about.own and bool((about.number("input_zero_point") != 0).any()):
        found.problems.append(f"`{about.name}.input_zero_point` is not 0, though config_groups says symmetric")
    return _Chosen("w8a8_static_sym", {}, unread=("input_zero_point",), made=made)


def _spread(about: _Module) -> dict[str, Made]:
    """The scale of a whole tensor, as one for each row."""
    scale, n = about.own.get("weight_scale"), about.n
    if scale is None or scale.numel() != 1:
        return {}
    header = torch.empty((n, 1), dtype=scale.dtype, device="meta")
    made = Made(header, ("weight_scale",), lambda own: own["weight_scale"].reshape(1, 1).expand(n, 1).contiguous())
    return {"weight_scale": made}


def _floats(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    """8-bit floats."""
    if w.kind != "float" or w.bits != 8 or not w.symmetric or (x and (x.kind != "float" or x.bits != 8)):
        return None
    token = x is not None and x.strategy == "token" and x.dynamic is True
    static = x is not None and x.strategy == "tensor" and x.dynamic is False
    if w.strategy == "tensor":
        if x is None:
            return _Chosen("fp8a16_tensor", {})
        return _Chosen("fp8_static", {}) if static else _Chosen("fp8_tensor_dynamic", {}) if token else None
    if w.strategy == "channel":
        return _Chosen("fp8a16_channel", {}) if x is None else _Chosen("fp8_dynamic", {}) if token else None
    if w.strategy == "block" and w.block[0] == w.block[1]:
        block = {"block": w.block[0]}
        if x is None:
            return _Chosen("fp8a16_block", block)
        grouped = x.strategy == "group" and x.dynamic is True and x.group == w.block[1]
        return _Chosen("fp8_block", block) if grouped else None
    return None


def _mxfp8(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    if (w.kind, w.bits, w.group) != ("float", 8, 32):
        return None
    if x is None:
        return _Chosen("mxfp8", {})
    return _Chosen("mxfp8a8", {}) if (x.kind, x.bits, x.group) == ("float", 8, 32) and x.dynamic else None


def _mxfp4(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    if (w.kind, w.bits, w.group) != ("float", 4, 32):
        return None
    if x is None:
        return _Chosen("mxfp4", {})
    if x.kind != "float" or x.group != 32 or not x.dynamic or x.bits not in (4, 8):
        return None
    return _Chosen("mxfp4a8", {"fmt": "e2m1"} if x.bits == 4 else {})


def _nvfp4(about: _Module, w: Args, x: Args | None, found: Plan) -> _Chosen | None:
    if (w.kind, w.bits, w.group) != ("float", 4, 16):
        return None
    if x is None:
        return _Chosen("nvfp4a16", {})
    return _Chosen("nvfp4", {}) if (x.kind, x.bits, x.group, x.dynamic) == ("float", 4, 16, "local") else None
