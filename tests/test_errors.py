"""Every mistake has an id, a file that makes it, and the exact text that a user reads.

`errors/NAME.q` is a wrong file (a first line `# params: name=value` binds parameters), `errors/NAME.txt` what it
prints.  After a change of wording, `pytest --update-golden` rewrites the texts; read the difference.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from random import Random

import pytest

from qdsl.check import check
from qdsl.diagnostic import SchemeError, Source
from qdsl.scheme import shape_error
from qdsl.syntax import parse

ROOT = Path(__file__).parent.parent
ERRORS = ROOT / "tests" / "errors"
FILES = sorted(ERRORS.glob("*.q"))


def mistakes(path: Path):
    """The diagnostics of one file."""
    text = path.read_text()
    source = Source(path.name, text)
    bound = re.match(r"# params: (.*)", text)
    params = dict(pair.split("=") for pair in bound[1].split()) if bound else {}
    try:
        scheme = check(parse(source), params)
    except SchemeError as wrong:
        return wrong.diagnostics
    if path.stem != "shape":
        return ()
    binding = next(iter(scheme.layouts.values())).bindings[0]
    return (shape_error(scheme, binding, "model.up_proj.qweight", (512, 4096), (4096, 512), 4096, 4096),)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_message(path, golden):
    found = mistakes(path)
    assert found, f"{path.name} has no mistake"
    golden(path.with_suffix(".txt"), "\n\n".join(map(str, found)) + "\n")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_file_is_named_after_its_mistake(path):
    assert any(path.stem.startswith(d.id) for d in mistakes(path))


def ids_in_sources() -> set[str]:
    """The first argument of every call that makes or reports a diagnostic."""
    found = set()
    for path in sorted((ROOT / "qdsl").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                id = node.args[0].value
                if name in ("error", "report", "fail") and re.fullmatch(r"[a-z]+(-[a-z]+)*", str(id)):
                    found.add(id)
    return found


def test_every_id_has_a_file():
    assert ids_in_sources() == {d.id for path in FILES for d in mistakes(path)}


def test_no_text_is_left_over():
    assert {p.stem for p in ERRORS.glob("*.txt")} == {p.stem for p in FILES}


# ---- hostile input -----------------------------------------------------------------------------------------------
VALID = "scheme s\nweight {{ code q[n, k] : u4 w ~ {} }}\ncompute f16 -> f32\noutput f16\n"


def refused(text: str) -> str:
    with pytest.raises(SchemeError) as wrong:
        check(parse(Source("hostile.q", text)))
    return str(wrong.value)


def test_a_line_of_a_megabyte_is_cut():
    text = VALID.format("q" + " " * 1_000_000 + "* zz")
    message = refused(text)
    assert "unknown name `zz`" in message
    assert len(message) < 1000
    line, caret = message.split("\n")[3:5]
    assert line[caret.index("^") :].startswith("zz")


def test_a_megabyte_of_open_braces():
    assert "error[unexpected-token]" in refused("scheme s weight " + "{" * 1_000_000)


@pytest.mark.parametrize(
    "nested", ["(" * 50_000 + "q" + ")" * 50_000, "-" * 50_000 + "q", "abs(" * 5000 + "q" + ")" * 5000]
)
def test_deep_nesting(nested):
    message = refused(VALID.format(nested))
    assert "error[too-deep]" in message
    assert len(message) < 1000


def test_the_deepest_equation_that_parses_goes_through_every_stage():
    text = VALID.format("(" * 100 + "q" + ")" * 100)
    check(parse(Source("deep.q", text)))


@pytest.mark.parametrize(
    "junk", ["\0", "\ufeff", "é", "\x1b[31m", "\r", "scheme", "scheme s", "{}", "#", '"', "\ud800"]
)
def test_junk(junk):
    message = refused(junk)
    assert message.startswith("error[")
    assert "\x1b" not in message
    assert "\0" not in message


def test_windows_line_ends_are_read():
    check(parse(Source("crlf.q", VALID.format("q").replace("\n", "\r\n"))))


WORDS = re.compile(r'"[^"\n]*"|[A-Za-z_]\w*|[0-9]+|//|->|[<>=]=|\s+|.', re.S)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_schemes_are_refused_with_diagnostics(seed):
    """Words replaced, removed, added and swapped: the file checks or gives diagnostics, and nothing else escapes."""
    random = Random(seed)
    files = [
        WORDS.findall(p.read_text()) for p in sorted(ROOT.glob("*schemes/*.q")) + sorted(ROOT.glob("tests/schemes/*.q"))
    ]
    words = [w for file in files for w in file if w.strip()] + [
        "0",
        "65537",
        "2.5",
        "acc",
        "x",
        "(",
        "]",
        "max",
        "u(9)",
    ]
    for _ in range(100):
        file = list(random.choice(files))
        for _ in range(random.choice((1, 1, 2))):
            at = random.randrange(len(file))
            match random.randrange(4):
                case 0:
                    file[at] = random.choice(words)
                case 1:
                    del file[at]
                case 2:
                    file.insert(at, f" {random.choice(words)} ")
                case 3:
                    other = random.randrange(len(file))
                    file[at], file[other] = file[other], file[at]
        try:
            check(parse(Source("damaged.q", "".join(file))))
        except SchemeError as wrong:
            str(wrong)  # every message renders
