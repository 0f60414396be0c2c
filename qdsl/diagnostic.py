"""What users see when something is wrong: spans, diagnostics, and the four kinds of error.

A `Diagnostic` prints the source line with a caret, the reason beside it, and the remedy below.  The checker collects
diagnostics and raises one `SchemeError` that carries them all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

_WIDTH = 160  # of a source line in a message


class Error(Exception):
    """Base of every error that is the user's to mend; its text names the place, the reason and the remedy."""


class SchemeError(Error):
    """The scheme file is wrong.  `diagnostics` holds every mistake found, in file order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]):
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n\n".join(str(d) for d in self.diagnostics))

    def __reduce__(self):
        return type(self), (self.diagnostics,)


class TargetError(Error):
    """The scheme is fine, but this target (or this machine) can't do it."""


class CheckpointError(Error):
    """Tensors or a configuration disagree with the layout that should read them."""


class ArtifactError(Error):
    """A compiled artifact is missing, damaged, stale, or made for another device."""


@dataclass(frozen=True)
class Source:
    """The text of one file."""

    path: str
    text: str = field(repr=False)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of a character, both from 1."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


@dataclass(frozen=True)
class Span:
    """Characters `start` up to `end` of a source."""

    source: Source = field(repr=False)
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        return Span(self.source, self.start, max(self.end, other.end))


@dataclass(frozen=True)
class Diagnostic:
    """One message.  `id` is a stable word; `label` stands beside the caret; notes and the fix follow below."""

    severity: str  # "error" or "note"
    id: str
    message: str
    span: Span | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.severity}[{self.id}]: {self.message}"]
        gutter = ""
        if self.span is not None:
            line, column = self.span.source.position(self.span.start)
            gutter = " " * len(str(line))
            text, before = _excerpt(self.span.source.text.split("\n")[line - 1], column - 1)
            width = max(1, min(self.span.end - self.span.start, len(text) - before))
            lines += [
                f"{gutter}--> {self.span.source.path}:{line}:{column}",
                f"{gutter} |",
                f"{line} | {text}".rstrip(),
                f"{gutter} | {' ' * before}{'^' * width} {self.label}".rstrip(),
            ]
            if self.notes or self.fix:
                lines.append(f"{gutter} |")
        lines += [f"{gutter} = note: {note}" for note in self.notes]
        if self.fix:
            lines.append(f"{gutter} = help: {self.fix}")
        return "\n".join(lines)


def _excerpt(line: str, at: int) -> tuple[str, int]:
    """A line as a terminal can show it, one column a character, and where `at` lies in it; long lines are cut."""
    shown = "".join(
        c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line.rstrip("\r")
    )
    if len(shown) <= _WIDTH:
        return shown, at
    start = max(0, min(at - _WIDTH // 2, len(shown) - _WIDTH))
    left, right = "… " if start else "", " …" if start + _WIDTH < len(shown) else ""
    return left + shown[start : start + _WIDTH] + right, at - start + len(left)


def error(id: str, message: str, span: Span | None, label: str = "", *, notes=(), fix: str = "") -> Diagnostic:
    return Diagnostic("error", id, message, span, label, tuple(notes), fix)


def closest(word: str, legal: Iterable[str]) -> str | None:
    """The legal word that `word` most likely meant, or None."""
    matches = difflib.get_close_matches(word, sorted(legal), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, legal: Iterable[str]) -> str:
    """A label for an unknown word: the closest legal one, or all of them when they are few."""
    legal = sorted(set(legal))
    if match := closest(word, legal):
        return f"did you mean `{match}`?"
    return f"one of {', '.join(f'`{name}`' for name in legal)}" if 0 < len(legal) <= 12 else ""
