"""A process of cpu.py: the contenders of one family, built, checked and timed as it is told.

python cpu_process.py FAMILY     # a line of JSON in, lines of JSON out; the last one of an answer has no "now"
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import peers_cpu
import torch
from cpu_problem import BF16, CLASSES, F32, LOOKED_AT, OURS, TOKENS, Built, Contender, Ours, Problem, problem
from torch import Tensor

FIRST_S, LATER_S = 10.0, 0.1  # for calls of all copies before the first M is timed, and before every other
LONG_S = 0.1  # what takes as long is not called once more in vain
NAMES = {BF16: "bf16", F32: "f32"}


# ---- ours --------------------------------------------------------------------------------------------------------
def qdsl_family() -> Iterator[Contender]:
    """Imports qdsl here, which peers' environments need not have."""
    for group, about in CLASSES.items():
        for own in about.ours:
            yield Contender(OURS, group, own.kind, _act(own), _layers(own), scheme=own.scheme)
        yield peers_cpu.dense(group, about.ours[0].kind)


def _act(own: Ours) -> torch.dtype:
    import qdsl

    return F32 if str(qdsl.load(own.scheme, **own.params).output.dtype) == "f32" else BF16


def _layers(own: Ours) -> Callable[[Problem, int, int], Built]:
    def make(p: Problem, copies: int, threads: int) -> Built:
        import qdsl
        from qdsl import reference
        from qdsl.diagnostic import Error
        from qdsl.runtime import QuantLinear

        scheme = qdsl.load(own.scheme, **own.params)
        patterns = patterns_of(scheme, p)
        layer = QuantLinear(scheme, p.k, p.n, device="cpu").set_patterns(patterns)
        layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
        rows = [m - 1 for m in TOKENS]
        x = p.x[rows].to(layer.dtype).double().numpy()
        manifest = layer.manifest
        right = reference.linear(scheme, x, patterns, p.n, precision=manifest.precision)

        def verify(y: Tensor) -> None:
            """The last row of as many as any M has, element by element, within the bound of the reference."""
            at = rows.index(len(y) - 1)
            found = y[-1].double().numpy()
            wrong = ~(np.abs(found - right.y[at]) <= right.bound[at])
            if wrong.any():
                j = int(np.flatnonzero(wrong)[0])
                raise Error(
                    f"y[{len(y) - 1}, {j}] is {found[j]:.8g}, should be {right.y[at, j]:.8g} within "
                    f"{right.bound[at, j]:.2g} ({wrong.sum()} are wrong); `qdsl verify` looks closer"
                )

        return Built(layers, verify=verify)

    return make


def patterns_of(scheme: Any, p: Problem) -> dict[str, np.ndarray]:
    """A problem's bit patterns, by the names of a scheme; where scales have two levels, those of channels are 1."""
    groups, found = p.s.shape[1] > 1, {}
    for t in scheme.weight.loaded:
        if t.role == "code":
            found[t.name] = (p.q.numpy().astype(np.int16) & (1 << t.dtype.bits) - 1).astype(t.dtype.storage)
        elif t.role == "zero":
            found[t.name] = p.z.numpy()
        else:
            ones = groups and len(t.index) < 2
            values = np.ones(p.n) if ones else p.s.numpy() if len(t.index) == 2 else p.s[:, 0].numpy()
            found[t.name] = t.dtype.encode(values)
    return found


# ---- the process -------------------------------------------------------------------------------------------------
class Process:
    """Answers of a family.  `say` tells what is being done, so that one knows what ended the process."""

    def __init__(self, contenders: Sequence[Contender], say: Callable[[Mapping], None]) -> None:
        self.contenders, self.say = contenders, say
        self.problems: dict[str, Problem] = {}
        self.rows: dict[tuple, Tensor] = {}
        self.built: dict[str, Built] = {}
        self.at: dict[str, int] = {}
        self.warm: set[str] = set()  # those all of whose copies have been called

    def names(self, group: str) -> dict:
        """key -> (name, kind, type of x, scheme of ours) of those of a class."""
        return {c.key: (c.name, c.kind, NAMES[c.act], c.scheme) for c in self.contenders if c.group == group}

    def prepare(self, group: str, k: int, n: int, threads: int, rotation: int, keys: Sequence[str]) -> dict:
        """Build some contenders of a class; {key: why not}, and the memory that this takes."""
        self.built, self.problems, self.rows, self.at, self.warm = {}, {}, {}, {}, set()
        gc.collect()
        self.shape, self.rotation = (k, n), rotation
        self.chosen = {c.key: c for c in self.contenders if c.group == group and c.key in keys}
        return self.threads(threads)

    def threads(self, threads: int) -> dict:
        """Use as many threads; what has its own number of them is built again."""
        torch.set_num_threads(threads)
        failed = {}
        for key, c in self.chosen.items():
            if key in self.built and not c.fixed:
                continue
            self.say({"now": key})
            self.built.pop(key, None)  # before there is another
            self.warm.discard(key)
            if c.kind not in self.problems:
                self.problems[c.kind] = problem(c.kind, *self.shape)
            given = self.problems[c.kind]
            others = -(-self.rotation * 8 // (given.q.numel() * given.bits))  # fill the rotation
            try:
                self.built[key] = c.make(given, 1 + others, threads)
            except Exception as why:  # whatever a peer raises
                failed[key] = _reason(why)
        gc.collect()
        return {"failed": failed, "memory": _memory()}

    def check(self, key: str, m: int) -> dict:
        """|y - exact| / |exact|, after calls of the copies; none where something is no number."""
        self.say({"now": key})
        built, x, y = self.built[key], self._x(key, m), None
        begin, budget = time.perf_counter(), LATER_S if key in self.warm else FIRST_S
        self.warm.add(key)
        for call in built.copies:  # what the first call of a copy makes, it makes now
            y = call(x)
            if time.perf_counter() - begin > budget:
                break
        y = y if isinstance(y, Tensor) else y()
        exact = built.exact if built.exact is not None else self.problems[self.chosen[key].kind].exact(x.dtype)
        here = [at for at, row in enumerate(LOOKED_AT) if row < m]
        found = y[[LOOKED_AT[at] for at in here]].double()
        error = ((found - exact[here]).norm() / exact[here].norm()).item() if y.isfinite().all() else math.nan
        if built.verify:
            built.verify(y)
        return {"error": None if math.isnan(error) else error}

    def time(self, key: str, m: int, seconds: float) -> dict:
        """µs of calls in a row, through all copies; the first one, which finds the caches of others, does not count."""
        copies, x, at = self.built[key].copies, self._x(key, m), self.at.get(key, 0)
        clock, samples = time.perf_counter, []
        self.say({"now": key})
        begin = clock()
        copies[at % len(copies)](x)
        if clock() - begin > LONG_S:
            samples.append((clock() - begin) * 1e6)
        while not samples or clock() - begin < seconds:
            at += 1
            call = copies[at % len(copies)]
            start = clock()
            call(x)
            samples.append((clock() - start) * 1e6)
        self.at[key] = at + 1
        return {"us": samples}

    def _x(self, key: str, m: int) -> Tensor:
        """The same tensor at every call."""
        c = self.chosen[key]
        if (c.kind, c.act, m) not in self.rows:
            self.rows[c.kind, c.act, m] = self.problems[c.kind].x[:m].to(c.act).contiguous()
        return self.rows[c.kind, c.act, m]


def _reason(why: BaseException) -> str:
    lines = str(why).strip().splitlines()
    return f"{type(why).__name__}: {lines[0][:160]}" if lines else type(why).__name__


def _memory() -> dict[str, int]:
    """KiB of this process, and of them on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return {"huge": held["AnonHugePages"], "all": held["Anonymous"]}


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def serve(family: str) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer prints is no answer

    def say(answer: Mapping) -> None:
        print(json.dumps(answer), file=out)

    torch.set_grad_enabled(False)
    gc.disable()
    try:
        contenders = list((qdsl_family if family == OURS else peers_cpu.FAMILIES[family])())
    except Exception as why:  # whatever an import raises
        say({"absent": _reason(why)})
        return
    packages = ["torch"] if family == OURS else [peers_cpu.PACKAGES[family]]
    say({"versions": versions(packages)})
    process = Process(contenders, say)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(process, asked.pop("do"))(**asked)
        except Exception as why:  # whatever a peer raises
            answer = {"wrong": _reason(why)}
        say(answer)


if __name__ == "__main__":
    serve(sys.argv[1])
