"""A compiled artifact on disk: a directory with a manifest, one library per architecture, and the source.

`open_artifact` reads the manifest and checks nothing else; `library` checks a file's digest before anyone loads it,
because a library is code.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from qdsl.choice import Table
from qdsl.diagnostic import ArtifactError
from qdsl.manifest import Manifest

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Artifact:
    path: Path
    manifest: Manifest

    def library(self, arch: str) -> Path:
        """The library for an architecture, its digest checked; raises ArtifactError when it is damaged or missing."""
        name = self.manifest.libraries.get(arch)
        if name is None:
            raise ArtifactError(f"{self.path}: compiled for {', '.join(self.manifest.libraries)}, not for {arch}")
        if name not in self.manifest.digests or Path(name).name != name:
            raise ArtifactError(f"{self.path / MANIFEST}: `{name}` is not one of its files; {self.remedy}")
        file = self.path / name
        if not file.exists():
            raise ArtifactError(f"{self.path}: `{name}` is missing; {self.remedy}")
        found = sha256(file)
        if found != self.manifest.digests[name]:
            raise ArtifactError(
                f"{file}: its sha256 is {found[:12]}…, the manifest says {self.manifest.digests[name][:12]}…; "
                f"it was changed after compilation and will not be loaded; {self.remedy}"
            )
        return file

    @property
    def remedy(self) -> str:
        m = self.manifest
        params = "".join(f" -P {k}={v}" for k, v in m.params.items())
        arch = "".join(f" --arch {a}" for a in m.libraries)
        return f"remove {self.path} and run `qdsl compile {m.scheme}{params} --target {m.kind}{arch}`"

    def __str__(self) -> str:
        m = self.manifest
        args = ", ".join(f"{k}={v}" for k, v in m.params.items())
        lines = [f"{m.scheme}({args}) for {m.kind}: {', '.join(f'{a} in {f}' for a, f in m.libraries.items())}"]
        for buffers in dict.fromkeys(m.buffers.values()):
            lines.append(f"  layouts for {', '.join(arch for arch, held in m.buffers.items() if held == buffers)}")
            lines += [f"    {b.tensor}{b.layout} in {b.dtype}" for b in buffers]
        for arch, phases in m.variants.items():
            for phase, variants in phases.items():
                lines += [f"  {arch}{phase and f', phase {phase}'}", *(f"    {variant}" for variant in variants)]
                lines += [f"    {line}" for line in m.tables[arch][phase].lines() if len(variants) > 1]
        return "\n".join([*lines, *(f"  {note}" for note in m.notes)])


def with_table(artifact: Artifact, arch: str, table: Table, phase: str = "") -> Artifact:
    """The artifact with another table of choices: its manifest is replaced as a whole, the files it vouches for stay."""
    tables = artifact.manifest.tables
    manifest = replace(artifact.manifest, tables={**tables, arch: {**tables[arch], phase: table}})
    aside = artifact.path / f".{MANIFEST}.{os.getpid()}"
    try:
        aside.write_text(manifest.to_json(), encoding="utf-8")
        os.replace(aside, artifact.path / MANIFEST)
    finally:
        aside.unlink(missing_ok=True)
    return Artifact(artifact.path, manifest)


def open_artifact(path: str | Path) -> Artifact:
    """The artifact in a directory; raises ArtifactError naming what is wrong with it."""
    path = Path(path)
    if not path.is_dir():
        raise ArtifactError(f"{path}: no such artifact directory; `qdsl compile` makes one")
    try:
        return Artifact(path.resolve(), Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no {MANIFEST}; this is not a compiled artifact") from None
    except (OSError, KeyError, ValueError, TypeError) as problem:
        what = f"it lacks {problem}" if isinstance(problem, KeyError) else problem
        raise ArtifactError(f"{path / MANIFEST}: not readable ({what}); remove {path} and compile again") from None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
