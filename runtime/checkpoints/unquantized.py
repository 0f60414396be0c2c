"""Floats that no tool has quantized, and the scheme by which they are quantized as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdsl.diagnostic import Error
from qdsl.runtime.checkpoints import Choice, Headers, Module, Plan
from qdsl.runtime.checkpoints.modules import closest_names, is_float, listed
from qdsl.runtime.resolve import check_quantizes
from qdsl.scheme import Scheme


@dataclass(frozen=True)
class Wish:
    """What to make of floats.

    skip   modules that stay as they are, as lists of such modules in configurations name them
    """

    scheme: Scheme
    skip: Sequence[str]


def plan(
    wish: Wish, modules: Mapping[str, Module], weights: Mapping[str, str], stored: Headers, phase: str = ""
) -> Plan:
    """`weights` gives the stored name of each module's weight, under which a tied one may be another's."""
    found, scheme = Plan(), wish.scheme
    bias = any(module.bias for name, module in modules.items() if not listed(name, wish.skip))
    try:
        check_quantizes(scheme, bias, phase if scheme.phases else "")
    except Error as problem:
        found.problems.append(str(problem))
        return found
    for entry in wish.skip:
        if not any(listed(name, [entry]) for name in modules):
            near = closest_names(entry, dict.fromkeys([*modules, *(name.rpartition(".")[2] for name in modules)]))
            found.problems.append(f"skip names {entry!r}, which is no linear layer{near}")
    for name, module in modules.items():
        weight = stored.get(weights[name])
        if listed(name, wish.skip) or weight is None:
            continue
        if not is_float(weight):
            found.problems.append(
                f"`{weights[name]}` is {weight.dtype}: it is quantized already, though no settings say how"
            )
            continue
        tensors = {weights[name]: "weight"}
        if module.bias:
            tensors[f"{name}.bias"] = "bias"
        why = f"quantized from {str(weight.dtype).removeprefix('torch.')}"
        found.choices[name] = Choice(scheme, {}, "", module.bias, tensors, why=why)
    taken = {name for choice in found.choices.values() for name in choice.tensors}
    experts = [n for n, header in stored.items() if ".experts." in n and header.dim() > 1 and n not in taken]
    if experts:
        found.notices.append(
            f"{len(experts)} weights of experts, such as `{experts[0]}`, stay as they are: only linear layers are quantized"
        )
    if not found.choices and not found.problems:
        found.problems.append("there is no linear layer to quantize")
    return found


def misfits(name: str, module: Module, choice: Choice, stored: Headers) -> list[str]:
    """What keeps floats from being those of a module, by shape and type alone."""
    wanted = {"weight": (module.n, module.k), "bias": (module.n,)}
    problems = []
    for full, short in choice.tensors.items():
        header = stored.get(full)
        if header is None:
            problems.append(f"`{full}` is in no file, and the model needs it")
        elif tuple(header.shape) != wanted[short]:
            problems.append(f"`{full}` is {list(header.shape)}, the model needs {list(wanted[short])}")
        elif not is_float(header):
            problems.append(f"`{full}` is {header.dtype}, floats are needed")
    return problems
