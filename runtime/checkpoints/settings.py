"""Values of a configuration, each of the type that its key means; raise CheckpointError where it is of another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qdsl.diagnostic import CheckpointError


def table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where it is absent or null."""
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} = {found!r}: an object is needed")
    return found


def names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """A list of names under the first of some keys that has one; empty where none has."""
    for key in keys:
        found = config.get(key)
        if found is not None and found != []:
            if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
                raise CheckpointError(f"{key} = {found!r}: a list of names is needed")
            return tuple(found)
    return ()


def pattern(text: str, place: str) -> re.Pattern[str]:
    """A regular expression that a configuration has at some place."""
    try:
        return re.compile(text)
    except re.error as problem:
        raise CheckpointError(f"{place}: {text!r} is no regular expression ({problem})") from None
