"""Instructions of our CPU kernels, counted one by one, and the cycles that they take at least.

python benchmarks/counts.py --out FILE.json [--classes NAME,…] [--tokens M,…]      # on Linux, with objdump

A process is stepped through a call (ptrace), for two numbers of features; what the larger one has more of is the kernel's own
work on so many weights, free of what a call does once.  Cycles are those of the ports that Intel's processors since Ice Lake
have for 512 bits: two for vectors, of which one shifts and one moves elements across lanes, two for loads, and the tile
unit.  Ports work side by side, so a kernel takes at least what the busiest of them does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import cpu
from cpu_problem import CLASSES, TOKENS

import qdsl
from qdsl import cli, results
from qdsl.diagnostic import Error

K = 4096
FEATURES = (64, 128)  # multiples of what any kernel takes at a time
TRACE_ME, SINGLE_STEP, GET_REGISTERS = 0, 9, 12
RIP = 16  # of user_regs_struct
BUSY = ("vectors", "loads", "stores", "tiles", "issue")  # what an instruction may keep so

# Cycles of a port by what an instruction's name begins with; the first that fits holds.
# "any" is either vector port, and so are two halves of one that takes both.
PORTS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"tdp", {"tiles": 16}),
    (r"tileload", {"load": 8}),  # 16 rows, two in a cycle
    (r"tilestore", {"store": 16}),
    (r"vdpbf16ps", {"any": 4}),  # measured: limits.c has half of vfmadd's rate in instructions, of twice the products
    (r"vcvtne2ps2bf16", {"any": 1, "lanes": 2}),
    (r"vcvtneps2bf16", {"any": 1, "lanes": 1}),
    (r"vcvtph2ps|vcvtps2ph", {"any": 1, "lanes": 1}),
    (r"vps(ll|rl|ra)[dqw]|vpro[lr]|vpsh[lr]d", {"shift": 1}),
    (r"vpermw", {"shift": 1, "lanes": 1}),  # measured: as long as a shift and a vpermd together
    (r"vperm|vpshuf|vpunpck|vpmov[sz]x|vpmov[dqw]|valign|vpalign|vinsert|vextract|vshuf|vunpck|vpbroadcast[bw]", {"lanes": 1}),
    (r"vpcmp|vptest|vcmp", {"lanes": 1}),
    (r"prefetch", {"load": 1}),
    (r"v?mov|vbroadcast|vpbroadcast", {}),
    (r"v", {"any": 1}),
)  # fmt: skip


def classified(text: str) -> Counter[str]:
    """Cycles by port of an instruction as objdump writes it (AT&T: the destination comes last)."""
    name, _, operands = text.partition(" ")
    found = Counter({"all": 1})
    for pattern, cycles in PORTS:
        if re.match(pattern, name):
            found.update(cycles)
            break
    if "(" in operands and not name.startswith(("lea", "tile", "prefetch", "nop")):
        stored = operands.rstrip().endswith(")") and name.startswith(("mov", "vmov", "vcvtneps"))
        found["store" if stored else "load"] += 1
    if "%zmm" not in operands and "%ymm" not in operands and "%xmm" not in operands:
        found.pop("any", None)
    return found


def cycles(ports: Mapping[str, float]) -> dict[str, float]:
    """Least cycles by what is busy: vector ports together and each of them, loads, stores, the tile unit, and issue."""
    p = Counter(ports)  # 0 of what it has none of
    vectors = max(p["shift"], p["lanes"], (p["shift"] + p["lanes"] + p["any"]) / 2)
    return dict(zip(BUSY, (vectors, p["load"] / 2, p["store"], p["tiles"], p["all"] / 6)))


def _stepped(pid: int) -> Counter[int]:
    """How often each address is executed, from a stop of the process to the next one."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.argtypes, trace.restype = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
    registers, seen = (ctypes.c_ulong * 27)(), Counter()
    while True:
        trace(SINGLE_STEP, pid, None, None)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            raise SystemExit(f"counts: the process ended while it was counted (status {status})")
        if os.WSTOPSIG(status) != signal.SIGTRAP:
            return seen
        trace(GET_REGISTERS, pid, None, ctypes.byref(registers))
        seen[registers[RIP]] += 1


def _code(library: Path) -> dict[int, str]:
    """Address -> instruction."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    lines = (re.match(r"\s*([0-9a-f]+):\s+(.*)", line) for line in text.splitlines())
    return {int(m[1], 16): m[2].split("#")[0].strip() for m in lines if m}


def _base(pid: int, library: Path) -> int:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        if fields[-1] == str(library) and fields[2] == "00000000":
            return int(fields[0].split("-")[0], 16)
    raise SystemExit(f"counts: {library} is not mapped")


def _child(pipe: int, scheme: object, features: int, tokens: int) -> None:
    """Calls a layer once between two stops; says first what library it calls."""
    import numpy as np
    import torch

    from qdsl import reference
    from qdsl.runtime import QuantLinear

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    layer = QuantLinear(scheme, K, features, device="cpu")
    layer.set_patterns(reference.random_patterns(layer.scheme, np.random.default_rng(0), features, K))
    x = torch.randn(tokens, K).to(layer.dtype)
    y = torch.empty(tokens, layer.width, dtype=layer.dtype)
    layer.run_into(x, y)
    os.write(pipe, str(layer.kernel.artifact.library(layer.kernel.arch)).encode())
    os.close(pipe)
    ctypes.CDLL(None).ptrace(TRACE_ME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    layer.run_into(x, y)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)


def counted(scheme: object, features: int, tokens: int) -> Counter[str]:
    """Instructions that a call has in the library of its kernel, as texts."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _child(theirs, scheme, features, tokens)
    os.close(theirs)
    library = Path(b"".join(iter(lambda: os.read(ours, 4096), b"")).decode())
    os.close(ours)
    os.waitpid(pid, 0)
    if not library.name:
        raise SystemExit("counts: the process ended before its call; run it without counts.py to see why")
    base, code = _base(pid, library), _code(library)
    seen = _stepped(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found: Counter[str] = Counter()
    for address, times in seen.items():
        if (text := code.get(address - base)) is not None:
            found[text] += times
    return found


def per_weight(scheme: object, tokens: int) -> dict:
    """Of a kernel: instructions, and least cycles by what is busy, for 1024 weights and all tokens."""
    less, more = (counted(scheme, features, tokens) for features in FEATURES)
    weights = K * (FEATURES[1] - FEATURES[0]) / 1024
    ports: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for text in more.keys() | less.keys():
        times = (more[text] - less[text]) / weights
        names[text.split(" ")[0]] += times
        for port, taken in classified(text).items():
            ports[port] += taken * times
    return {
        "instructions": round(ports["all"], 1),
        "cycles": {name: round(taken, 1) for name, taken in cycles(ports).items()},
        "names": {name: round(times, 1) for name, times in names.most_common() if times >= 0.5},
    }


def read(path: Path) -> list[dict]:
    """What `--out` wrote: a dict for each scheme and M with the keys of `per_weight`; raises Error for another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = [
            {
                "scheme": str(c["scheme"]),
                "M": int(c["M"]),
                **c,
                "cycles": {name: float(c["cycles"][name]) for name in BUSY},
            }
            for c in found["counts"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise Error(f"{path}: no counts of counts.py ({type(problem).__name__}: {problem}); count again") from None
    return known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--classes", type=cpu.names(CLASSES, "class"), metavar="NAME,…", default=tuple(CLASSES), help="of cpu.py"
    )
    parser.add_argument("--tokens", type=cli.tokens, metavar="M,…", default=TOKENS)
    parser.add_argument("--out", metavar="FILE.json", type=Path)
    args = parser.parse_args()
    if shutil.which("objdump") is None:
        parser.error("there is no objdump; install binutils")
    if args.out:
        try:
            results.writable(args.out)
        except Error as problem:
            parser.error(str(problem))
    meta = results.meta(results.processor(), f"instructions of a call, {FEATURES[1]} features less {FEATURES[0]}", {})
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # from core to core, a step takes ten times as long
    found = []
    for group in args.classes:
        for own in CLASSES[group].ours:
            scheme = qdsl.load(own.scheme, **own.params)
            for tokens in args.tokens:
                counts = per_weight(scheme, tokens)
                found.append({"scheme": results.scheme_label(scheme), "M": tokens, **counts})
                taken = ", ".join(f"{name} {value:g}" for name, value in counts["cycles"].items())
                print(
                    f"{found[-1]['scheme']}, M = {tokens}: {counts['instructions']:g} instructions; cycles: {taken}",
                    flush=True,
                )
    if args.out:
        args.out.write_text(json.dumps({"meta": asdict(meta), "counts": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
