"""What holds for the repository as a whole: who imports what, and what is never written anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qdsl
from qdsl.cli import main

ROOT = Path(__file__).parent.parent
SOURCES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("qdsl", "codegen", "runtime")}
TEXTS = (".py", ".q", ".md", ".toml", ".lark", ".cc", ".txt", ".json", ".cu", "")
VENDORED = ("build", ".build", "out", ".venv", ".git", ".gpu", "qdsl.egg-info")


def imports(file: Path, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports when it is imported, or, `everywhere`, at any time."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if everywhere else _at_import(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _at_import(getattr(node, name, []))


def offenders(folder: str, packages: set[str], *, everywhere: bool) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in SOURCES[folder]
        for module in imports(file, everywhere=everywhere)
        if module.split(".")[0] in packages or module in packages
    ]


# ---- imports -----------------------------------------------------------------------------------------------------
def test_the_language_needs_neither_tvm_nor_torch():
    assert not offenders("qdsl", {"torch", "tvm_ffi", "qdsl.codegen", "qdsl.runtime"}, everywhere=False)
    assert not offenders("qdsl", {"tvm", "tvm_ffi", "torch"}, everywhere=True)


def test_the_compiler_needs_no_torch():
    assert not offenders("codegen", {"torch", "qdsl.runtime"}, everywhere=True)


def test_the_runtime_needs_no_compiler():
    assert not offenders("runtime", {"tvm", "lark", "qdsl.syntax"}, everywhere=True)
    assert not offenders("runtime", {"qdsl.codegen"}, everywhere=False)


def test_the_pinned_tvm_ffi_serializes():
    """The reason for the pin in pyproject.toml: newer ones die here with a segmentation fault."""
    code = (
        "import tvm\nfrom tvm import te\n"
        "x = te.placeholder((4,), name='x')\n"
        "f = te.create_prim_func([x, te.compute((4,), lambda i: x[i] + 1.0, name='y')])\n"
        "assert 'x' in tvm.ir.save_json(tvm.IRModule({'main': f}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- texts -------------------------------------------------------------------------------------------------------
def test_no_schemes_name_in_compiler_or_runtime():
    """Where one would be needed, the language lacks a word; only configurations of checkpoints name schemes."""
    names = {*qdsl.shipped(), "awq", "log4"}
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(map(re.escape, names)))})(?![a-z0-9])", re.I)
    found = []
    for folder in ("codegen", "runtime"):
        for file in SOURCES[folder]:
            if file.relative_to(ROOT / folder).parts[0] == "checkpoints":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                words = [
                    v
                    for v in (getattr(node, f, None) for f in ("id", "attr", "name", "arg", "module"))
                    if isinstance(v, str)
                ]
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _is_prose(node.value):
                    words.append(node.value)
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {w}" for w in words if pattern.search(w)]
    assert not found


def _is_prose(text: str) -> bool:
    """Docstrings and messages may give examples; a name that a program compares with has no spaces."""
    return " " in text


def test_schemes_are_formatted():
    files = [*(ROOT / "schemes").glob("*.q"), *(ROOT / "examples").glob("*.q")]
    assert len(files) > 10
    assert main(["fmt", "--check", *map(str, files)]) == 0


def test_no_module_is_called_after_nothing():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base", "core"}
    assert not [str(f) for files in SOURCES.values() for f in files if f.stem in vague]


def test_no_file_mentions_a_private_place():
    private = re.compile(
        "|".join(["/wor" + "k/", "/roo" + "t/", "/home/" + r"\w", "--index" + "-url", "/opt/" + "pypi"])
    )
    found = []
    for file in _tracked():
        if file.suffix in TEXTS and file.is_file():
            try:
                text = file.read_text()
            except UnicodeDecodeError:
                continue
            found += [f"{file.relative_to(ROOT)}: {m[0]}" for m in [private.search(text)] if m]
    assert not found


def _tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.splitlines()]
    return [file for file in ROOT.rglob("*") if not set(VENDORED) & set(file.relative_to(ROOT).parts)]


def test_data_for_tests_stays_small():
    assert sum(f.stat().st_size for f in (ROOT / "tests" / "data").rglob("*")) < 15 << 20


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "examples/new_scheme.md"])
def test_links_lead_somewhere(file):
    page = ROOT / file
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert targets and all((page.parent / target).exists() for target in targets)


def test_the_scheme_of_the_readme_is_one():
    scheme = re.search(r"^```q\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    assert qdsl.parse(scheme).layouts
