"""The compiler as a table of stages, each a function from one printable value to the next.

    scheme -> plan -> TensorIR -> source -> library

`emit` stops at a stage and returns its text; `compile_into` runs them all and writes an artifact directory.  With
QDSL_DUMP=dir every stage's text is also written there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tvm import tirx

from qdsl.artifact import MANIFEST
from qdsl.codegen import cpu, portable
from qdsl.codegen.cuda import host, main_loop
from qdsl.codegen.plan import Plan, plan
from qdsl.codegen.target import target as find_target
from qdsl.manifest import Manifest, plain_params
from qdsl.scheme import Scheme

STAGES = ("syntax", "scheme", "plan", "tir", "source", "binary")
Report = Callable[[str], None]


def lower(planned: Plan) -> dict[str, tirx.PrimFunc]:
    """Every kernel of a plan: the tensor-core main loop where the equation allows it, the portable nest elsewhere."""
    return main_loop.lower(planned) if planned.main_loop else portable.lower(planned)


def emit(scheme: Scheme, kind: str, arch: str, stage: str) -> str:
    """The text of one stage, from "plan" to "source"."""
    planned = plan(scheme, find_target(kind, arch))
    if stage == "plan":
        return str(planned)
    functions = lower(planned)
    if stage == "tir":
        return "\n".join(f.script() for f in functions.values())
    return _cuda_source(planned, functions) if kind == "cuda" else cpu.emit(functions, planned.target)[1]


def _cuda_source(planned: Plan, functions: dict[str, tirx.PrimFunc]) -> str:
    return host.emit(functions, planned.target, planned.overlapped)


def compile_into(
    directory: Path, scheme: Scheme, kind: str, archs: Sequence[str], digest: str, toolchain: dict[str, str],
    report: Report = lambda _: None,
) -> None:  # fmt: skip
    """Compile for every architecture and write the artifact; the manifest comes last, so a directory with one is whole."""
    libraries: dict[str, str] = {}
    plans: dict[str, Plan] = {}
    for arch in archs:
        report(f"{scheme.bound}: planning for {kind} {arch}")
        planned = plans[arch] = plan(scheme, find_target(kind, arch))
        _dump("1-plan.txt", str(planned))
        functions = lower(planned)
        _dump(f"2-tir.{arch}.py", "\n".join(f.script() for f in functions.values()))
        name = f"kernel.{arch}.so"
        report(f"{scheme.bound}: compiling {len(functions)} kernels for {kind} {arch}")
        if kind == "cuda":
            source = directory / f"kernel.{arch}.cu"
            source.write_text(_cuda_source(planned, functions))
            host.build(source, directory / name, planned.target)
        else:
            executable, text = cpu.emit(functions, planned.target)
            source = directory / f"kernel.{arch}.ll"
            source.write_text(text)
            cpu.build(executable, directory / name)
        _dump(f"3-source.{source.name}", source.read_text())
        libraries[arch] = name
    planned = plans[archs[-1]]  # the architectures of a kind differ in nothing but their kernels
    files = sorted(f for f in directory.iterdir() if f.is_file())
    manifest = Manifest(
        scheme.name, scheme.text, plain_params(scheme), kind, libraries, planned.buffers,
        {arch: p.variants for arch, p in plans.items()}, {arch: p.table for arch, p in plans.items()}, planned.offset, planned.kept, planned.max_k,
        tuple(str(n) for n in planned.notes), toolchain,
        {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}, digest,
    )  # fmt: skip
    (directory / MANIFEST).write_text(manifest.to_json())


def _dump(name: str, text: str) -> None:
    if chosen := os.environ.get("QDSL_DUMP"):
        Path(chosen).mkdir(parents=True, exist_ok=True)
        (Path(chosen) / name).write_text(text)
