"""Verify schemes at every level of this machine's CPU: `python benchmarks/verify_cpu.py [SCHEME…] [--out FILE]`.

Shows, for each, the worst error of all cases over its bound; prints and exits as failed where one is above.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import qdsl
from qdsl.diagnostic import Error
from qdsl.runtime.processor import cpu_levels
from qdsl.runtime.timing import device_name
from qdsl.runtime.verify import verify


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help="default: all that are shipped")
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    try:  # of all, before the first takes its minutes
        schemes = [qdsl.load(name) for name in args.schemes or qdsl.shipped()]
        levels, failed = cpu_levels()[::-1], []
    except Error as e:
        parser.error(str(e))
    lines = [
        f"qdsl verify on {device_name(torch.device('cpu'))}, torch {torch.__version__}: worst error over its bound",
        f"{'scheme':50}{'cases':>7}" + "".join(f"{level:>16}" for level in levels),
    ]
    print("\n".join(lines), flush=True)
    for scheme in schemes:
        reports = [verify(scheme, "cpu", level) for level in levels]
        failed += [str(report) for report in reports if not report.passed]
        shown = "".join(f"{f'{r.worst:.3f}' if r.passed else 'WRONG':>16}" for r in reports)
        lines.append(f"{scheme.bound!s:50}{sum(r.cases for r in reports):7}{shown}")
        print(lines[-1], flush=True)
    print("\n".join(failed or ["all ok"]))
    if args.out:
        args.out.write_text("\n".join([*lines, *failed]) + "\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
