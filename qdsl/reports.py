"""The mistakes found so far in one scheme file.

Every check reports here and goes on; `finish` raises what was found as one `SchemeError`, in file order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from qdsl.diagnostic import Diagnostic, SchemeError, Span, error

T = TypeVar("T")


class FailedError(Exception):
    """This construct is already reported; give up on it and go on with the next."""


@dataclass(frozen=True)
class Reports:
    """A collector of diagnostics.  `report` and `fail` take what `diagnostic.error` takes."""

    found: list[Diagnostic] = field(default_factory=list)

    def report(self, *args, **kwargs) -> None:
        """One more mistake, after which the construct can still be checked."""
        self.found.append(error(*args, **kwargs))

    def fail(self, *args, **kwargs) -> NoReturn:
        """One more mistake, after which nothing more can be said about the construct."""
        self.report(*args, **kwargs)
        raise FailedError

    def attempt(self, f: Callable[..., T], *args) -> T | None:
        """What `f` returns, or None when it failed."""
        try:
            return f(*args)
        except FailedError:
            return None

    def finish(self) -> None:
        """The end of a stage: raises all mistakes found, if any."""
        if self.found:
            ordered = sorted(dict.fromkeys(self.found), key=lambda d: d.span.start if d.span else -1)
            raise SchemeError(ordered)


def keyword_of(block: Span, keyword: str) -> Span:
    """The word that begins a block, where mistakes of the block as a whole are shown."""
    return Span(block.source, block.start, block.start + len(keyword))
