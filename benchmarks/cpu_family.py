"""A family of contenders of cpu.py in a process of its own, asked by lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(__file__).with_name("cpu_process.py")


class EndedError(Exception):
    """A family's process ended while it was about something."""

    def __init__(self, key: str, status: int) -> None:
        self.key = key
        super().__init__(f"ended its process ({signal.Signals(-status).name if status < 0 else f'status {status}'})")


class Family:
    """A process with contenders; `absent` says why there is none."""

    def __init__(self, name: str, python: str, environment: Mapping[str, str]) -> None:
        self.name, self.python, self.environment = name, python, environment
        self.absent, self.versions = "", {}
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [self.python, str(PROGRAM), self.name], text=True, env={**os.environ, **self.environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            hello = self._answer("")
        except EndedError as problem:
            hello = {"absent": str(problem)}
        self.absent, self.versions = hello.get("absent", ""), hello.get("versions", {})

    def ask(self, do: str, **arguments: object) -> dict:
        """The answer; raises EndedError when the process ends instead, after which there is a new one."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            return self._answer("")
        except (EndedError, BrokenPipeError) as problem:
            ended = problem if isinstance(problem, EndedError) else EndedError("", self.process.wait())
            self._start()
            raise ended from None

    def _answer(self, key: str) -> dict:
        for line in self.process.stdout:
            answer = json.loads(line)
            if "now" not in answer:
                return answer
            key = answer["now"]
        raise EndedError(key, self.process.wait())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
