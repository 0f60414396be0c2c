"""Every example of the language reference is a scheme that checks, is formatted, and every message it shows is real.

A fence marked `q` is a whole file.  One marked `q fragment` is some of its blocks: the blocks it lacks are completed from
`DEFAULTS`.  One marked `text errors/NAME.txt` is what `tests/errors/NAME.q` prints.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qdsl.check import HINTS, check
from qdsl.diagnostic import Source
from qdsl.dtype import NAMES, WORDS
from qdsl.expr import FUNCTIONS, REDUCTIONS
from qdsl.printer import print_file
from qdsl.syntax import ROLES, parse

TESTS = Path(__file__).parent
README = (TESTS.parent / "schemes" / "README.md").read_text()
FENCE = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    pytest.param(kind, body, id=f"line-{README[: found.start()].count(chr(10)) + 1}")
    for found in FENCE.finditer(README)
    for language, kind, body in [found.groups()]
    if language == "q"
]
DEFAULTS = {
    "weight": "weight { code q[n, k] : u4 scale s[n, k // 128] : f16 zero z[n, k // 128] : u4 w ~ (q - z) * s }",
    "compute": "compute f16 -> f32",
    "output": "output f16",
}
INTEGER = {"weight": "weight { code q[n, k] : i8 scale s[n] : f32 w ~ q * s }", "compute": "compute i8 -> i32"}


def completed(kind: str | None, body: str) -> str:
    if kind is None:
        return body
    missing = DEFAULTS | (INTEGER if body.startswith("activation") else {})
    return "\n".join(
        ["scheme fragment", body, *(text for name, text in missing.items() if f"\n{name} " not in f"\n{body}")]
    )


@pytest.mark.parametrize(("kind", "body"), BLOCKS)
def test_example_checks_and_is_formatted(kind, body):
    file = parse(Source("README.md", completed(kind, body)))
    check(file)
    for block in body.strip().split("\n\n"):  # the formatter puts what was completed in between
        assert block in print_file(file)


def test_messages_are_real():
    shown = [(name, body) for language, name, body in FENCE.findall(README) if language == "text"]
    assert shown
    for name, body in shown:
        assert body == (TESTS / name).read_text()


def test_every_shipped_scheme_has_its_source():
    table = README[README.index("## Schemes that ship") : README.index("## Errors")]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert sorted(named) == sorted(path.stem for path in (TESTS.parent / "schemes").glob("*.q"))


def test_every_word_of_the_language_is_explained():
    words = {*ROLES, *FUNCTIONS, *REDUCTIONS, *HINTS, *WORDS, "optional", "record", "when", "pad", "words", "ones"}
    words |= {name for name in NAMES if not re.fullmatch("[ui][1-8]", name)} | {
        "transform",
        "half",
        "require",
        "dim",
        "int",
    }
    assert {word for word in words if not re.search(rf"\b{word}\b", README)} == set()
