"""Parsing and printing are inverse, and the formatter keeps every comment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qdsl.diagnostic import Source
from qdsl.printer import print_file
from qdsl.syntax import parse

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(ROOT.glob("schemes/*.q"))
FILES = sorted([*SHIPPED, *ROOT.glob("tests/schemes/*.q"), *ROOT.glob("examples/*.q")])
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)


def tree(text: str):
    return parse(Source("test.q", text))


@each_file
def test_what_is_printed_parses_to_the_same_tree(path):
    file = tree(path.read_text())
    again = tree(print_file(file))
    assert again == file
    assert [c.text for c in again.comments] == [c.text for c in file.comments]


@each_file
def test_files_are_formatted(path):
    assert print_file(tree(path.read_text())) == path.read_text()


@each_file
def test_one_long_line_formats_to_the_same_file(path):
    text = path.read_text()
    bare = re.sub(r"#[^\n]*", "", text)
    assert print_file(tree(" ".join(bare.split()))) == print_file(tree(bare))


@each_file
@pytest.mark.parametrize("where", ["own line", "end of line"])
def test_every_comment_survives(path, where):
    lines = re.sub(r" *#[^\n]*", "", path.read_text()).split("\n")
    if where == "own line":
        lines = [line for at, text in enumerate(lines) for line in (f"# comment {at}", text)]
    else:
        lines = [f"{text}  # comment {at}" for at, text in enumerate(lines)]
    text = "\n".join(lines)
    printed = print_file(tree(text))
    assert sorted(re.findall("# comment [0-9]+", printed)) == sorted(re.findall("# comment [0-9]+", text))
    assert print_file(tree(printed)) == printed
    assert tree(printed) == tree(text)


def test_blocks_are_brought_in_order():
    text = """
    scheme mixed
    output f16 compute f16 -> f32
    layout plain { q = "q" : u8 }
    require k % 8 == 0
    weight { w ~ q code q[n, k] : u4 }
    """.replace("w ~ q code q[n, k] : u4", "code q[n, k] : u4 w ~ q")
    assert print_file(tree(text)) == (
        "scheme mixed\n\nweight {\n    code q[n, k] : u4\n    w ~ q\n}\n\ncompute f16 -> f32\noutput f16\n\n"
        'require k % 8 == 0\n\nlayout plain {\n    q = "q" : u8\n}\n'
    )


@pytest.mark.parametrize(
    "equation",
    [
        "q - (z - 1)",
        "q / (s * 2.0)",
        "-(q - z) * s",
        "q * (-s)",
        "(q + z) * (q - z)",
        "q - -z",
        "c[q // 2] * s",
        "1e-3 * q",
    ],
)
def test_equations_keep_their_parentheses(equation):
    text = f"scheme t weight {{ code q[n, k] : u4 w ~ {equation} }} compute f16 -> f32 output f16"
    assert f"w ~ {equation}\n" in print_file(tree(text))


def test_hash_in_quotes_is_no_comment():
    text = 'scheme t "issue #1"  # a comment\nweight { code q[n, k] : u4 w ~ q } compute f16 -> f32 output f16'
    file = tree(text)
    assert file.doc == "issue #1"
    assert [c.text for c in file.comments] == ["# a comment"]


def test_positions_point_into_the_text():
    text = (ROOT / "schemes" / "awq4.q").read_text()
    file = tree(text)
    code = file.items[0].decls[0]
    assert code.name_span.text == "q"
    assert code.span.text.startswith("code  q[n, k]")
    assert code.type.span.text == "u4"
    assert file.items[0].span.source.position(file.items[0].span.start) == (5, 1)
