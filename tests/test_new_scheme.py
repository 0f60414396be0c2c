"""The walk-through for newcomers does what it says: its files are written and its commands run, in order.

A fence marked `q` is the next state of log4.q, one marked `python` is layer.py, and one marked `console` holds commands
after `$` with lines of their output; `…` stands for whatever depends on the machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT = (EXAMPLES / "new_scheme.md").read_text()
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
FILES = {"q": "log4.q", "python": "layer.py"}


def test_every_command_of_the_walk_through_prints_what_it_shows(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = 0
    for language, body in FENCES:
        if language in FILES:
            (tmp_path / FILES[language]).write_text(body)
            continue
        assert language == "console"
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.M):
            done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, text=True, timeout=120, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            assert done.returncode == int(shown.startswith("error")), f"{command}\n{done.stdout}"
            for line in shown.splitlines():
                assert _appears(line, done.stdout), f"{command}\nlacks: {line}\n{done.stdout}"
            ran += 1
    assert ran == TEXT.count("\n$ ") >= 12


def _appears(line: str, output: str) -> bool:
    return re.search("^" + ".*".join(map(re.escape, line.split("…"))) + "$", output, re.M) is not None


def test_the_walk_through_ends_with_the_file_that_lies_beside_it():
    schemes = [body for language, body in FENCES if language == "q"]
    assert schemes[-1] == (EXAMPLES / "log4.q").read_text()
