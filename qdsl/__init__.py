"""qdsl: quantization schemes in, kernels out.

    import qdsl
    scheme = qdsl.load("awq4", group=64)              # a shipped scheme, or a path to a .q file
    artifact = qdsl.compile(scheme, target="cpu")     # cached by digest

Importing this package, loading a scheme and finding a cached artifact import neither TVM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from qdsl.artifact import Artifact, open_artifact
from qdsl.diagnostic import ArtifactError, CheckpointError, Error, SchemeError, Source, TargetError
from qdsl.scheme import Scheme

__all__ = ["Artifact", "ArtifactError", "CheckpointError", "Error", "Scheme", "SchemeError", "TargetError",
           "compile", "load", "open_artifact", "parse", "shipped", "source"]  # fmt: skip


def shipped() -> dict[str, Path]:
    """The schemes that come with qdsl, by name."""
    files = resources.files("qdsl.schemes").iterdir()
    return {file.name[:-2]: Path(str(file)) for file in sorted(files, key=lambda f: f.name) if file.name.endswith(".q")}


def load(name: str | Path, **params: object) -> Scheme:
    """The scheme of a shipped name or a `.q` path, with parameters over its defaults; raises SchemeError."""
    found = source(name)
    return parse(found.text, found.path, **params)


def source(name: str | Path) -> Source:
    """The text of a shipped name or a `.q` path."""
    from qdsl.diagnostic import closest

    known = shipped()
    path = known.get(str(name)) or Path(name)
    if not path.is_file():
        hint = f"; did you mean `{match}`?" if (match := closest(str(name), known)) else ""
        raise Error(f"{name}: no such scheme{hint}\n(shipped: {', '.join(known)}; or give the path of a .q file)")
    try:
        return Source(str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise Error(f"{path}: not a readable text file ({problem})") from None


def parse(text: str, path: str = "<text>", **params: object) -> Scheme:
    """The scheme that a text declares; raises SchemeError."""
    from qdsl.check import check
    from qdsl.syntax import parse as parse_syntax

    return check(parse_syntax(Source(path, text)), params)


def compile(
    scheme: Scheme, target: str = "cpu", archs: Sequence[str] = (), *, out: str | Path | None = None
) -> Artifact:
    """A compiled artifact, from the cache or made now (and copied to `out`).

    target   "cpu" or "cuda"; archs such as ("sm_80", "sm_90a") or ("x86-64-v3",); by default what nearly every
             machine of the kind runs and, for "cpu", every level above, of which a machine takes its own
    Raises TargetError when the target can't run the scheme or a tool is missing.
    """
    from qdsl.compilation import compile_scheme

    return compile_scheme(scheme, target, tuple(archs), Path(out) if out is not None else None)
