"""From a scheme and a target's name to an artifact: digest, cache, and the compiler only when it is needed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from qdsl import cache
from qdsl.artifact import MANIFEST, Artifact, open_artifact
from qdsl.diagnostic import Error, TargetError
from qdsl.manifest import Buffer, plain_params
from qdsl.scheme import Scheme


def toolchain(kind: str) -> dict[str, str]:
    """The versions that decide what a compilation produces."""
    found = {"tvm": cache.version("apache-tvm"), "tvm-ffi": cache.version("apache-tvm-ffi")}
    if kind == "cuda":
        compiler = cache.nvcc()
        found["nvcc"] = cache.nvcc_version(compiler) if compiler else "absent"
        if flags := os.environ.get("NVCC_APPEND_FLAGS"):
            found["flags"] = flags
    return found


def default_archs(kind: str) -> tuple[str, ...]:
    """What `qdsl compile` compiles for, unless it is told."""
    from qdsl.codegen.target import default_archs  # not when this is imported: few processes compile

    return default_archs(kind)


def compile_scheme(scheme: Scheme, kind: str, archs: tuple[str, ...], out: Path | None) -> Artifact:
    from qdsl.codegen.target import target

    archs = tuple(dict.fromkeys(archs or (default_archs(kind) if kind in ("cpu", "cuda") else ("",))))
    for arch in archs:
        target(kind, arch)  # a wrong name is an error before anything is built
    if out is not None:
        out = out.resolve()  # a link stays one
        _refuse_other(out)
    tools = toolchain(kind)
    digest = cache.digest_of(scheme, kind, archs, tools)
    artifact = cache.find_or_build(
        cache.entry(scheme, archs, digest), digest, lambda path: _build(path, scheme, kind, archs, digest, tools)
    )
    return artifact if out is None else _copy(artifact, out)


def kernel_buffers(scheme: Scheme, kind: str, arch: str) -> tuple[Buffer, ...]:
    """How the kernels of an architecture take a scheme's tensors: as a compiled artifact says, or the plan of one.

    Nothing is built.  Raises TargetError where there is neither an artifact nor the compiler.
    """
    tools = toolchain(kind)
    digest = cache.digest_of(scheme, kind, (arch,), tools)
    if artifact := cache.find(cache.entry(scheme, (arch,), digest), digest):
        return artifact.manifest.buffers[arch]
    _require_compiler(scheme, kind, (arch,), tools)
    from qdsl.codegen.pipeline import buffers

    return buffers(scheme, kind, arch)


def _require_compiler(scheme: Scheme, kind: str, archs: tuple[str, ...], tools: dict[str, str]) -> None:
    if tools["tvm"] == "absent":
        params = "".join(f" -P {k}={v}" for k, v in plain_params(scheme).items())
        command = f"qdsl compile {scheme.name}{params} --target {kind} {' '.join(f'--arch {a}' for a in archs)} -o DIR"
        raise TargetError(
            f"{scheme.bound} is not compiled for {kind} {', '.join(archs)}, and the compiler (apache-tvm) is not installed here; "
            f"where it is, run `{command}`, and point QDSL_ARTIFACTS at DIR"
        )


def _build(path: Path, scheme: Scheme, kind: str, archs: tuple[str, ...], digest: str, tools: dict[str, str]) -> None:
    _require_compiler(scheme, kind, archs, tools)
    from qdsl.codegen.pipeline import compile_into

    shown = sys.stderr.isatty()

    def report(text: str) -> None:
        if shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        compile_into(path, scheme, kind, archs, digest, tools, report)
    finally:
        report("")


def _refuse_other(out: Path) -> None:
    """An artifact may stand in the place of another, or of nothing."""
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise Error(f"{out}: exists and is not an artifact; choose another directory or remove it")
    above = next(p for p in out.parents if p.exists())
    if not above.is_dir():
        raise Error(f"{out}: there can be no such directory, for {above} is a file; choose another")


def _copy(artifact: Artifact, out: Path) -> Artifact:
    """Put an artifact at `out`, replacing one that is there."""
    _refuse_other(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(artifact.path, aside, dirs_exist_ok=True)
        os.chmod(aside, 0o755)
        if out.exists():
            shutil.rmtree(out)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return open_artifact(out)
