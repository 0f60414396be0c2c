"""The cache of compiled artifacts: one directory per digest, appearing whole or not at all.

A digest covers the canonical scheme, its parameters, the target, the compiler's own sources and the versions of the
tools it calls, so an entry is never stale.  Builders work in a directory beside the entry and rename it into place;
one file lock per digest (released by death) keeps sixteen cold processes from compiling sixteen times.  Deleting the
cache is always safe, and a read-only cache is used as far as it goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import IO

from qdsl.artifact import MANIFEST, Artifact, open_artifact
from qdsl.diagnostic import ArtifactError, TargetError
from qdsl.manifest import plain_params
from qdsl.scheme import Scheme


def directory() -> Path:
    """Where artifacts are cached: $QDSL_CACHE, or qdsl under the user's cache directory."""
    if chosen := os.environ.get("QDSL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qdsl"


@functools.cache
def compiler_fingerprint() -> str:
    """A digest of the sources that decide what is generated."""
    digest = hashlib.sha256()
    for place in ("qdsl", "qdsl.codegen", "qdsl.codegen.cuda", "qdsl.codegen.cuda/tables"):
        package, _, folder = place.partition("/")
        with contextlib.suppress(ModuleNotFoundError, FileNotFoundError):
            for file in sorted((resources.files(package) / folder).iterdir(), key=lambda f: f.name):
                if file.name.endswith((".py", ".lark", ".cc", ".json")):
                    digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def digest_of(scheme: Scheme, kind: str, archs: Sequence[str], toolchain: dict[str, str]) -> str:
    """The name of a compilation: equal inputs and tools, equal digest."""
    parts = [scheme.text, plain_params(scheme), kind, list(archs), compiler_fingerprint(), toolchain]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def entry(scheme: Scheme, archs: Sequence[str], digest: str) -> Path:
    return directory() / f"{scheme.name}-{'-'.join(archs)}-{digest[:12]}"


def find(path: Path, digest: str) -> Artifact | None:
    """A finished entry, or None."""
    if not (path / MANIFEST).is_file():
        return None
    artifact = open_artifact(path)
    return artifact if artifact.manifest.digest == digest else None


def find_or_build(path: Path, digest: str, build: Callable[[Path], None]) -> Artifact:
    """The entry at `path`, built by `build(directory)` when absent.

    Where the cache can't be written, the artifact is built in a temporary directory that lives as long as the process.
    """
    if found := find(path, digest):
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.parent / f".{path.name}.lock", "w")  # noqa: SIM115  (a with statement follows)
    except OSError:
        return _build_outside(path, digest, build)
    with lock:
        alone = _lock(lock)
        if found := find(path, digest):
            return found
        if alone:
            _sweep(path)
        try:
            aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        except OSError:
            return _build_outside(path, digest, build)
        try:
            build(aside)
            _publish(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    found = find(path, digest)
    if found is None:
        raise ArtifactError(f"{path}: the entry vanished while it was being made; is something emptying the cache?")
    return found


def _build_outside(path: Path, digest: str, build: Callable[[Path], None]) -> Artifact:
    home = _temporary() / path.name
    if (found := find(home, digest)) is None:
        home.mkdir(parents=True, exist_ok=True)
        build(home)
        found = find(home, digest)
    assert found is not None, "a build either finishes or raises"
    return found


@functools.cache
def _temporary() -> Path:
    import atexit

    path = Path(tempfile.mkdtemp(prefix="qdsl-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _publish(aside: Path, path: Path) -> None:
    """Rename a finished directory into place; a damaged or foreign entry of that name is moved away first."""
    for file in aside.iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    os.chmod(aside, 0o755)
    try:
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.rename(path, f"{aside}.old")
        with contextlib.suppress(OSError):
            os.rename(aside, path)
        shutil.rmtree(f"{aside}.old", ignore_errors=True)


def _lock(stream: IO) -> bool:
    """Lock a file until it is closed; False where the file system has no locks: there the rename decides."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _sweep(path: Path) -> None:
    """Remove what builders of this entry left when they were killed; whoever holds the lock is the only one alive."""
    for abandoned in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(abandoned, ignore_errors=True)


def nvcc() -> str | None:
    """The CUDA compiler: $QDSL_NVCC, the one on PATH, or the one the nvcc wheels bring."""
    if chosen := os.environ.get("QDSL_NVCC"):
        if not (found := shutil.which(chosen)):
            raise TargetError(f"QDSL_NVCC is {chosen}, which can't be run; unset it, or set it to an nvcc")
        return found
    if found := shutil.which("nvcc"):
        return found
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nvidia-cuda-nvcc") or ():
            if file.name == "nvcc" and os.access(found := str(file.locate()), os.X_OK):
                return found
    return None


@functools.cache
def nvcc_version(path: str) -> str:
    """The release line of an nvcc, asked once per file and remembered beside the cache's entries."""
    stat = os.stat(path)
    memory = directory() / ".nvcc" / hashlib.sha256(f"{path}{stat.st_size}{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        return memory.read_text()
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    line = next((part for part in text.splitlines() if "release" in part), "unknown").strip()
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(line)
    return line
