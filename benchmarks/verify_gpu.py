"""Verify every artifact under QDSL_ARTIFACTS on this machine's GPU: `python benchmarks/verify_gpu.py [--out FILE]`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import qdsl
from qdsl.runtime.verify import verify


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this needs a CUDA GPU, and torch sees none; `qdsl verify` checks the CPU's kernels")
    if "QDSL_ARTIFACTS" not in os.environ:
        raise SystemExit("error: QDSL_ARTIFACTS names no artifacts; make some with benchmarks/gpu_artifacts.py")
    lines = [
        f"qdsl verify on {torch.cuda.get_device_name()}, torch {torch.__version__}",
        f"{'scheme':60}{'cases':>6}{'error/bound':>13}  result",
    ]
    failed = []
    for root in os.environ["QDSL_ARTIFACTS"].split(os.pathsep):
        for path in sorted(Path(root).iterdir()):
            start = time.perf_counter()
            m = qdsl.open_artifact(path).manifest
            scheme = qdsl.parse(m.text, m.scheme, **m.params)
            try:
                report = verify(scheme, "cuda")
            except Exception as problem:
                failed.append(f"{scheme.bound}: {type(problem).__name__}: {problem}")
                lines.append(f"{scheme.bound:60}{'':6}{'':13}  did not run")
                continue
            lines.append(f"{scheme.bound:60}{report.cases:6}{report.worst:13.3f}  {'ok' if report.passed else 'WRONG'}")
            if not report.passed:
                failed.append(str(report))
            print(lines[-1], f"{time.perf_counter() - start:.1f} s", flush=True)
    print("\n".join([*failed, *lines]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
