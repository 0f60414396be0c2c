"""The walk-through for newcomers does what it says: its files are written and its commands run, in order.

A fence marked `q` is the next state of log4.q, one marked `python` is layer.py, and one marked `console` holds commands
after `$` with lines of their output; `…` stands for whatever depends on the machine.  The first command is the installed
one, and later ones of qdsl are run in this process, which imports the compiler once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from qdsl.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT = (EXAMPLES / "new_scheme.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
FILES = {"q": "log4.q", "python": "layer.py"}


def test_every_command_of_the_walk_through_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    ran = 0
    for language, body in FENCES:
        if language in FILES:
            (tmp_path / FILES[language]).write_text(body)
            continue
        assert language == "console"
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.M):
            program, *arguments = command.split()
            status, output = _called(arguments, capsys) if program == "qdsl" and ran else _run(command)
            assert status == int(shown.startswith("error")), f"{command}\n{output}"
            for line in shown.splitlines():
                assert _appears(line, output), f"{command}\nlacks: {line}\n{output}"
            ran += 1
    assert ran == TEXT.count("\n$ ") >= 12


def _called(arguments: list[str], capsys) -> tuple[int, str]:
    status = main(arguments)
    return status, "".join(capsys.readouterr())


def _run(command: str) -> tuple[int, str]:
    done = subprocess.run(
        command, shell=True, text=True, timeout=120, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def _appears(line: str, output: str) -> bool:
    return re.search("^" + ".*".join(map(re.escape, line.split("…"))) + "$", output, re.M) is not None


def test_the_walk_through_ends_with_the_file_that_lies_beside_it():
    schemes = [body for language, body in FENCES if language == "q"]
    assert schemes[-1] == (EXAMPLES / "log4.q").read_text()
