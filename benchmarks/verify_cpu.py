"""Verify schemes at every level of this machine's CPU: `python benchmarks/verify_cpu.py [SCHEME…] [--out FILE]`.

Shows, for each, the worst error of all cases over its bound; prints and exits as failed where one is above.  Schemes are
verified side by side, each by one thread: compiling takes most of the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path

import torch

import qdsl
from qdsl.diagnostic import Error
from qdsl.runtime.processor import cpu_levels
from qdsl.runtime.timing import device_name
from qdsl.runtime.verify import Report, verify

LEVELS = cpu_levels()[::-1]


def reports(name: str) -> list[Report]:
    """Of a scheme at every level."""
    torch.set_num_threads(1)
    return [verify(qdsl.load(name), "cpu", level) for level in LEVELS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help="default: all that are shipped")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="schemes at a time (default: cores)"
    )
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    names, failed = args.schemes or list(qdsl.shipped()), []
    try:  # of all, before the first takes its minutes
        bound = [str(qdsl.load(name).bound) for name in names]
    except Error as e:
        parser.error(str(e))
    width = max(map(len, bound)) + 1
    lines = [
        f"qdsl verify on {device_name(torch.device('cpu'))}, torch {torch.__version__}: worst error over its bound",
        f"{'scheme':{width}}{'cases':>7}" + "".join(f"{level:>16}" for level in LEVELS),
    ]
    print("\n".join(lines), flush=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for scheme, found in zip(bound, pool.imap(reports, names), strict=True):
            failed += [str(report) for report in found if not report.passed]
            shown = "".join(f"{f'{r.worst:.3f}' if r.passed else 'WRONG':>16}" for r in found)
            lines.append(f"{scheme:{width}}{sum(r.cases for r in found):7}{shown}")
            print(lines[-1], flush=True)
    print("\n".join(failed or ["all ok"]))
    if args.out:
        args.out.write_text("\n".join([*lines, *failed]) + "\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
