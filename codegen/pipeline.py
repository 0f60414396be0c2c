"""The compiler as a table of stages, each a function from one printable value to the next.

    scheme -> plan -> TensorIR -> source -> library

`emit` stops at a stage and returns its text; `compile_into` runs them all and writes an artifact directory.  With
QDSL_DUMP=dir every stage's text is also written there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tvm import tirx

from qdsl.artifact import MANIFEST
from qdsl.codegen import cpu, portable
from qdsl.codegen.cuda import host, main_loop
from qdsl.codegen.plan import Plan, plans
from qdsl.codegen.simd import linear, order
from qdsl.codegen.target import target as find_target
from qdsl.manifest import Buffer, Manifest, Variant, plain_params
from qdsl.precision import Precision
from qdsl.scheme import Scheme

STAGES = ("syntax", "scheme", "plan", "tir", "source", "binary")
Report = Callable[[str], None]


def lower(planned: Plan, only: Collection[str] | None = None) -> dict[str, tirx.PrimFunc]:
    """Every kernel of a plan: the tensor-core main loop where the equation allows it, the portable nest elsewhere.

    only  names of functions, where there are kernels for tensor cores; None: all
    """
    if planned.main_loop:
        return main_loop.lower(planned, only)
    if planned.inner:
        return {"order_inputs": order.lower(planned), **lower(planned.inner)}
    return {**portable.before(planned), **linear.lower(planned)} if planned.blocked else portable.lower(planned)


def lower_phases(planned: Mapping[str, Plan]) -> dict[str, tirx.PrimFunc]:
    """The kernels of all phases, by names that tell them apart."""
    found = {}
    for phase, own in planned.items():
        for name, function in lower(own).items():
            called = _called(phase, name)
            found[called] = function.with_attr("global_symbol", called) if phase else function
    return found


def _called(phase: str, function: str) -> str:
    return f"{phase}_{function}" if phase else function


def _variants(phase: str, planned: Plan) -> tuple[Variant, ...]:
    """The plan's variants, their steps called as in the library."""
    return tuple(
        replace(v, steps=tuple(replace(s, function=_called(phase, s.function)) for s in v.steps))
        for v in planned.variants
    )


def emit(scheme: Scheme, kind: str, arch: str, stage: str) -> str:
    """The text of one stage, from "plan" to "source"."""
    planned = plans(scheme, find_target(kind, arch))
    if stage == "plan":
        return _plan_text(planned)
    functions = lower_phases(planned)
    if stage == "tir":
        return "\n".join(f.script() for f in functions.values())
    target = find_target(kind, arch)
    return _cuda_source(planned, functions) if kind == "cuda" else cpu.emit(functions, target)[1]


def _plan_text(planned: Mapping[str, Plan]) -> str:
    return "\n".join(f"phase {phase}: {own}" if phase else str(own) for phase, own in planned.items())


def buffers(scheme: Scheme, kind: str, arch: str) -> tuple[Buffer, ...]:
    """How the kernels of an architecture take a scheme's tensors, without making the kernels."""
    return _buffers(plans(scheme, find_target(kind, arch)))


def _buffers(planned: Mapping[str, Plan]) -> tuple[Buffer, ...]:
    """Of all phases, each tensor once: what they share lies in one way."""
    return tuple({b.tensor: b for own in planned.values() for b in own.buffers}.values())


def _cuda_source(planned: Mapping[str, Plan], functions: dict[str, tirx.PrimFunc]) -> str:
    any_ = next(iter(planned.values()))
    assert all(own.overlapped == any_.overlapped for own in planned.values()), "one library, one way to launch"
    return host.emit(functions, any_.target, any_.overlapped)


def compile_into(
    directory: Path, scheme: Scheme, kind: str, archs: Sequence[str], digest: str, toolchain: dict[str, str],
    report: Report = lambda _: None,
) -> None:  # fmt: skip
    """Compile for every architecture and write the artifact; the manifest comes last, so a directory with one is whole."""
    libraries: dict[str, str] = {}
    planned: dict[str, dict[str, Plan]] = {}
    for arch in archs:
        report(f"{scheme.bound}: planning for {kind} {arch}")
        target = find_target(kind, arch)
        planned[arch] = plans(scheme, target)
        _dump("1-plan.txt", _plan_text(planned[arch]))
        functions = lower_phases(planned[arch])
        _dump(f"2-tir.{arch}.py", "\n".join(f.script() for f in functions.values()))
        name = f"kernel.{arch}.so"
        report(f"{scheme.bound}: compiling {len(functions)} kernels for {kind} {arch}")
        if kind == "cuda":
            source = directory / f"kernel.{arch}.cu"
            source.write_text(_cuda_source(planned[arch], functions))
            host.build(source, directory / name, target)
        else:
            executable, text = cpu.emit(functions, target)
            source = directory / f"kernel.{arch}.ll"
            source.write_text(text)
            cpu.build(executable, directory / name)
        _dump(f"3-source.{source.name}", source.read_text())
        libraries[arch] = name
    each = [own for found in planned.values() for own in found.values()]
    limits = [own.max_k for own in each if own.max_k is not None]
    files = sorted(f for f in directory.iterdir() if f.is_file())
    manifest = Manifest(
        scheme.name, scheme.text, plain_params(scheme), kind, libraries,
        {arch: _buffers(found) for arch, found in planned.items()},
        {arch: {phase: _variants(phase, own) for phase, own in found.items()} for arch, found in planned.items()},
        {arch: {phase: own.table for phase, own in found.items()} for arch, found in planned.items()},
        Precision.least(own.precision for own in each), min(limits, default=None),
        tuple(dict.fromkeys(str(n) for own in each for n in own.notes)), toolchain,
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}, digest,
    )  # fmt: skip
    (directory / MANIFEST).write_text(manifest.to_json())


def _dump(name: str, text: str) -> None:
    if chosen := os.environ.get("QDSL_DUMP"):
        Path(chosen).mkdir(parents=True, exist_ok=True)
        (Path(chosen) / name).write_text(text)
