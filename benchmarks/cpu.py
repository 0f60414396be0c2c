"""Quantized products on a CPU: qdsl beside its peers, by turns in one run, and beside what the machine can do.

    python benchmarks/cpu.py --out FILE.json [--python [FAMILY=]PATH]… [--classes NAME,…] [--shapes KxN,…] [--tokens M,…]

Every family of peers is a process of its own (`cpu_process.py`), of whatever Python has it.  All of them have weights on huge
pages, go through more copies of a weight than a cache holds, and are compared with float64 of their own codes before they are
timed.  Bandwidth and peaks are measured by `limits.c` in the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cpu_family import EndedError, Family
from cpu_problem import CLASSES, DENSE, LIMIT, OURS, TOKENS
from limits import Limits, floor_us
from peers_cpu import FAMILIES, PACKAGES

import qdsl
from qdsl import cli, results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results

SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096))  # K, N
# glibc's memory on huge pages; idle threads that sleep, for the next in turn has the processor.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "OMP_WAIT_POLICY": "passive"}
# Relative errors beyond which an output is wrong: x in 8 bits, or whatever is rounded to bf16; in float32 nothing is.
ALLOWED, ALLOWED_F32 = 2e-2, 1e-3
SLOW, SLOW_US = 8, 2e4  # as many times the fastest peer, and as long: no larger M
HUGE_PART = 0.5  # of a process's memory on huge pages: with less, it says so
PAUSE_S = 0.002  # for threads of the last one to sleep


# ---- one class and shape -----------------------------------------------------------------------------------------
@dataclass
class Entry:
    """A contender with one class and shape: whose it is, and what was found, by (M, threads)."""

    family: Family
    key: str
    name: str
    kind: str
    act: str
    scheme: str  # of ours
    us: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    error: dict[tuple[int, int], float] = field(default_factory=dict)
    absent: str = ""
    slow: bool = False  # for the number of threads that is now measured

    @property
    def ours(self) -> bool:
        return self.name == OURS

    def leave(self, why: str) -> None:
        if self.ours:
            raise Error(f"{self.key}: {why}")
        self.absent = self.absent or why


class Block:
    """A class of products of one shape: all contenders prepared, then checked and timed for every M."""

    def __init__(
        self, group: str, k: int, n: int, families: Sequence[Family], only: Sequence[str] | None, rotation: int
    ):
        self.group, self.k, self.n, self.rotation = group, k, n, rotation
        self.families = [f for f in families if not f.absent]
        self.entries = [
            Entry(family, key, *about)
            for family in self.families
            for key, about in family.ask("names", group=group).items()
            if only is None or about[0] in only
        ]
        self.prepared: set[str] = set()  # families
        self.remarks: list[str] = []

    def present(self, family: Family | None = None) -> list[Entry]:
        """Whoever is measured."""
        return [e for e in self.entries if not (e.absent or e.slow) and family in (None, e.family)]

    def measure(self, tokens: Sequence[int], threads: Sequence[int], seconds: float, turns: int) -> None:
        for t in threads:
            for e in self.entries:
                e.slow = False
            self._together(lambda family, t=t: self._prepare(family, t))
            for m in tokens:
                self._together(lambda family, m=m, t=t: self._check(family, m, t))
                for turn in range(turns):
                    self._turn(m, t, seconds / turns, turn)
                self._leave_slow(m, t)

    def _together(self, work) -> None:
        """With all families at the same time; nothing is timed meanwhile."""
        with ThreadPoolExecutor(len(self.families) or 1) as pool:
            for done in [pool.submit(work, family) for family in self.families]:
                done.result()

    def _prepare(self, family: Family, threads: int) -> None:
        """Once more without the one that ended the process, until it lives."""
        while entries := self.present(family):
            try:
                if family.name in self.prepared:
                    answer = family.ask("threads", threads=threads)
                else:
                    shape, keys = {"k": self.k, "n": self.n}, [e.key for e in entries]
                    arguments = {"group": self.group, "rotation": self.rotation, "keys": keys}
                    answer = family.ask("prepare", threads=threads, **shape, **arguments)
            except EndedError as problem:
                self._blame(family, problem)
                continue
            self.prepared.add(family.name)
            memory = answer["memory"]
            if memory["huge"] < HUGE_PART * memory["all"]:
                self.remarks.append(f"{family.name}: {memory['huge'] >> 10} of {memory['all'] >> 10} MiB on huge pages")
            for e in entries:
                if e.key in answer["failed"]:
                    e.leave(answer["failed"][e.key])
            return

    def _blame(self, family: Family, problem: EndedError) -> None:
        """Whoever was about to be called, or else all of a family; its new process has nothing prepared."""
        self.prepared.discard(family.name)
        for e in self.present(family):
            if problem.key in ("", e.key):
                e.leave(str(problem))

    def _leave_slow(self, m: int, threads: int) -> None:
        """Peers that are far behind another one are not measured with more rows of x."""
        taken = {
            e.key: min(e.us[m, threads]) for e in self.present() if e.name not in (OURS, DENSE) and e.us[m, threads]
        }
        fastest = min(taken.values(), default=0.0)
        for e in self.present():
            us = taken.get(e.key, 0.0)
            if us > max(SLOW_US, SLOW * fastest):
                e.slow = True
                self.remarks.append(f"{e.key}: {us / 1e3:.0f} ms at M = {m}, {threads} threads; left out beyond")

    def _check(self, family: Family, m: int, threads: int) -> None:
        for e in self.present(family):
            try:
                answer = family.ask("check", key=e.key, m=m)
            except EndedError as problem:
                self._blame(family, problem)
                self._prepare(family, threads)
                continue
            allowed = ALLOWED_F32 if self.group == "w4a16_f32" and e.act == "f32" else ALLOWED
            if "wrong" in answer:
                e.leave(f"M = {m}: {answer['wrong']}")
            elif answer["error"] is None or answer["error"] > allowed:
                e.leave(f"wrong output at M = {m}: relative error {answer['error']}, allowed is {allowed}")
            else:
                e.error[m, threads] = answer["error"]

    def _turn(self, m: int, threads: int, seconds: float, turn: int) -> None:
        order = self.present()
        random.Random(turn).shuffle(order)
        for e in order:
            time.sleep(PAUSE_S)
            try:
                answer = e.family.ask("time", key=e.key, m=m, seconds=seconds)
            except EndedError as problem:
                self._blame(e.family, problem)
                self._prepare(e.family, threads)
                continue
            if "wrong" in answer:
                e.leave(f"M = {m}: {answer['wrong']}")
            else:
                e.us[m, threads] += answer["us"]

    def cells(self, tokens: Sequence[int], threads: Sequence[int], limits: Limits) -> list[Cell]:
        """Of contenders and of limits; a peer stands beside the first scheme of ours that takes its kind of problem."""
        ours = CLASSES[self.group].ours
        schemes = [(own, qdsl.load(own.scheme, **own.params)) for own in ours]
        first = {own.kind: own.scheme for own in reversed(ours)}
        found = []
        for t in threads:
            for m in tokens:
                for own, scheme in schemes:
                    label, group = results.scheme_label(scheme), scheme.params.get("group")
                    times = limits.times(self.group, scheme, self.k, self.n, m, t)
                    where, floor = (group, self.k, self.n, m, t), floor_us(times)
                    for e in self.entries:
                        if e.kind == own.kind and (e.scheme or first[e.kind]) == own.scheme:
                            us = statistics.median(e.us[m, t]) if e.us[m, t] else None
                            found.append(Cell(label, e.act, *where, e.name, us, e.error.get((m, t)), floor))
                    act = str(scheme.output.dtype)
                    found += [Cell(label, act, *where, LIMIT + name, us, None, floor) for name, us in times.items()]
        return found

    def line(self, m: int, t: int) -> str:
        """What was found for one M, the fastest first."""
        times = sorted((statistics.median(e.us[m, t]), e.key if e.ours else e.name) for e in self.entries if e.us[m, t])
        return f"{self.group:11}{self.k}x{self.n} {t}T M={m:<4}" + "  ".join(f"{us:.0f} {name}" for us, name in times)


# ---- the run -----------------------------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> bool:
    """Whether everything of ours ran, and right."""
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder))
        environment = {
            name: str(value) for name, value in (("QDSL_GGML", args.ggml), ("QDSL_GPTQ", args.gptq)) if value
        }
        pythons = {
            OURS: sys.executable,
            **{name: args.python.get("", sys.executable) for name in FAMILIES},
            **args.python,
        }
        wanted = [OURS, *(name for name in FAMILIES if args.families is None or name in args.families)]
        with ThreadPoolExecutor(len(wanted)) as pool:
            families = list(pool.map(lambda name: Family(name, pythons[name], environment), wanted))
        try:
            return _measured(args, families, limits)
        finally:
            for family in families:
                family.close()


def _measured(args: argparse.Namespace, families: Sequence[Family], limits: Limits) -> bool:
    if families[0].absent:
        raise Error(f"qdsl: {families[0].absent}")
    versions = dict(families[0].versions)
    for family in families[1:]:
        versions |= {PACKAGES[family.name]: f"absent: {family.absent}"} if family.absent else family.versions
    method = (
        f"median of wall clock of calls in {args.turns} turns of {1e3 * args.seconds / args.turns:.0f} ms among all contenders, "
        f"weights rotated over {args.rotation} MiB, on huge pages for all, every output checked against float64 of its own codes "
        "before it is timed; limits are medians of the same run, the floor is what is declared at the bandwidth of reading or all "
        "operations at the peak of the fastest unit"
    )
    meta = results.meta(results.processor(), method, versions, args.commit)
    known = Results(meta, ())
    if args.out and args.append and args.out.exists():
        known = results.joined(results.read(args.out), meta, ())
    for name, version in meta.versions.items():
        print(f"{name} {version}")
    blocks, complete = [], True
    for group in args.classes:
        for k, n in args.shapes:
            block = Block(group, k, n, families, args.only, args.rotation << 20)
            limits.measure(args.threads, args.rotation << 20, CLASSES[group].units)
            try:
                block.measure(args.tokens, args.threads, args.seconds, args.turns)
            except Error as problem:
                print(f"error: {group}, K {k}, N {n}: {problem}", file=sys.stderr)
                complete = False
            blocks.append(block)
            for t in args.threads:
                for m in args.tokens:
                    print(block.line(m, t))
            for remark in [*block.remarks, *(f"{e.key} absent: {e.absent}" for e in block.entries if e.absent)]:
                print(f"  {remark}")
            sys.stdout.flush()
            if args.out:  # floors are those of all that is known of the limits by now
                cells = [c for b in blocks for c in b.cells(args.tokens, args.threads, limits)]
                results.write(args.out, results.joined(known, meta, cells))
    for (name, t), samples in sorted(limits.samples.items()):
        print(
            f"limit {name}, {t} threads: {min(samples):.4g} to {max(samples):.4g}, median {limits.rate(name, t):.4g} per second"
        )
    return complete


def names(known: Iterable[str], what: str):
    """A parser of names, separated by commas, among those known."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {what} {name!r} among {', '.join(known)}")
        return found

    return parse


def interpreter(text: str) -> tuple[str, str]:
    """`FAMILY=PATH`, or PATH for all families."""
    family, equals, path = text.rpartition("=")
    if equals and family not in FAMILIES:
        raise argparse.ArgumentTypeError(f"no family {family!r} among {', '.join(FAMILIES)}")
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path}: no program; name a Python with the peers' packages")
    return family, path


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python",
        type=interpreter,
        action="append",
        default=[],
        metavar="[FAMILY=]PATH",
        help="a Python that has peers",
    )
    parser.add_argument(
        "--ggml", type=Path, metavar="DIR", help="holds libggml-base.so and libggml-cpu.so; by default llama_cpp's"
    )
    parser.add_argument(
        "--gptq", type=Path, metavar="FILE.so", help="GPTQModel's CPU extension; by default the package's"
    )
    parser.add_argument(
        "--families", type=names(FAMILIES, "family"), metavar="NAME,…", help=f"of peers: {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--only", type=lambda text: tuple(text.split(",")), metavar="NAME,…", help="contenders: qdsl, torch_bf16, …"
    )
    parser.add_argument("--classes", type=names(CLASSES, "class"), default=tuple(CLASSES), metavar="NAME,…")
    parser.add_argument("--shapes", type=cli.shapes, default=SHAPES, metavar="KxN,…")
    parser.add_argument(
        "--tokens", type=cli.tokens, default=TOKENS, metavar="M,…", help=f"some of {', '.join(map(str, TOKENS))}"
    )
    parser.add_argument("--threads", type=cli.tokens, default=(1, 2), metavar="T,…")
    parser.add_argument("--rotation", type=int, default=64, metavar="MiB", help="that a call's weight lies behind")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing, for one contender and M")
    parser.add_argument("--turns", type=int, default=3, help="that they are taken in")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the cells here, block by block")
    parser.add_argument("--append", action="store_true", help="keep the cells that --out holds, if the run was alike")
    parser.add_argument("--commit", default="", help="of the sources, where they are no git checkout")
    args = parser.parse_args(argv)
    args.python = dict(args.python)
    if any(k % 256 or n % 128 for k, n in args.shapes):
        parser.error("--shapes: the contenders take K that are multiples of 256 and N that are multiples of 128")
    if not set(args.tokens) <= set(TOKENS):
        parser.error(f"--tokens: the right outputs are those of M in {', '.join(map(str, TOKENS))}")
    if args.rotation < 1 or args.turns < 1 or not args.seconds > 0:
        parser.error("--rotation, --seconds and --turns are positive")
    if max(args.threads) > (os.cpu_count() or 1):
        parser.error(f"--threads: there are {os.cpu_count()} processors")
    if args.out and not args.commit and results.commit() == "unknown":
        parser.error("these sources are no git checkout; say with --commit what they are")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    try:
        if args.out:
            results.writable(args.out)
        return 0 if run(args) else 1
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
