"""What a CPU can do, measured by limits.c, and the time that a product takes at least."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cpu_problem import CLASSES

from qdsl.diagnostic import Error
from qdsl.runtime.bench import declared_bytes
from qdsl.scheme import Scheme

SOURCE = Path(__file__).with_suffix(".c")
UNIT_S = 0.05  # of measuring at a time
OTHERS = 1 << 29  # bytes of others that go through the caches between turns: some rotations


class Limits:
    """limits.c, compiled here for this processor, and the samples taken so far."""

    def __init__(self, folder: Path) -> None:
        self.program, compiler = folder / "limits", os.environ.get("CC", "cc")
        command = [compiler, "-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(self.program)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as problem:
            raise Error(f"limits.c: no C compiler {compiler!r} ({problem}); name one with CC") from None
        if done.returncode:
            raise Error(f"limits.c: {compiler} does not compile it; name another with CC\n{done.stderr.strip()}")
        self.units = self._run("units")
        self.samples: dict[tuple[str, int], list[float]] = defaultdict(list)

    def _run(self, *arguments: object) -> list[str]:
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Error(f"limits {' '.join(map(str, arguments))}: {done.stderr.strip() or f'status {done.returncode}'}")
        return done.stdout.split()

    def measure(self, threads: Iterable[int], rotation: int, units: Iterable[str]) -> None:
        for t in threads:
            self.samples["read", t] += map(float, self._run("read", t, rotation, OTHERS))
            for unit in units:
                if unit in self.units:
                    self.samples[unit, t] += map(float, self._run(unit, t, UNIT_S))

    def rate(self, name: str, threads: int) -> float:
        """Bytes or operations per second: the median."""
        return statistics.median(self.samples[name, threads])

    def times(self, group: str, scheme: Scheme, k: int, n: int, m: int, threads: int) -> dict[str, float]:
        """µs of a product, by what limits it: reading what it declares, or multiplying by one unit or another."""
        found = {"read": declared_bytes(scheme, m, n, k) / self.rate("read", threads) * 1e6}
        for unit, taken in CLASSES[group].units.items():
            if unit in self.units:
                found[unit] = 2e6 * m * n * k * taken / self.rate(unit, threads)
        return found


def floor_us(times: Mapping[str, float]) -> float:
    """Reading and multiplying, by the fastest unit, at the same time."""
    units = [us for name, us in times.items() if name != "read"]
    return max(times["read"], min(units, default=0.0))
