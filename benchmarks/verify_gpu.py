"""Verify every artifact under QDSL_ARTIFACTS on this machine's GPU: `python benchmarks/verify_gpu.py [--out FILE]`.

`qdsl verify` compares small shapes with float64. All kernels also multiply a shape that keeps every SM busy for many rounds, and
all of their outputs are compared with each other: what a kernel reads too early or too late shows there alone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

import qdsl
from qdsl import reference
from qdsl.artifact import Artifact
from qdsl.dtype import F32
from qdsl.runtime import QuantLinear
from qdsl.runtime.verify import verify
from qdsl.scheme import Scheme

M, N, K = 4096, 1024, 4096


def differing(scheme: Scheme, artifact: Artifact) -> str:
    """The kernels whose outputs differ from the first one's by more than both may be off, and in how many numbers.

    x is 1 and -1 at random: so the terms of every token are as large as those of a token of ones, and how far sums of any
    signs may be off is what the reference says of that one, and the rounding of y itself. Not of x that is transformed before
    it is quantized, whose terms are others.
    """
    parts = scheme.output.half[1] if scheme.output.half else 1
    transformed = any(block.transforms for block in scheme.activations)
    if transformed or parts > 1 or scheme.violated(N, K) is not None:
        return ""
    bias = any(t.role == "bias" for t in scheme.output.tensors)
    layer = QuantLinear(scheme, K, N, bias=bias, device="cuda", artifact=artifact)
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), N, K)
    given = {
        name: np.zeros_like(bits) if scheme.tensor(name).role == "bias" else bits for name, bits in patterns.items()
    }
    layer.set_patterns(given)
    manifest = layer.manifest
    of_ones = reference.linear(scheme, np.ones((1, K)), given, N, precision=manifest.precision)
    bound = torch.from_numpy(of_ones.bound[0]).cuda()
    signs = torch.randint(0, 2, (M, K), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    x, first, found = (2 * signs - 1).to(layer.dtype), None, []
    for name in layer.kernel.variants(K):
        y = torch.full((M, N), float("nan"), dtype=layer.dtype, device="cuda")
        layer.run_into(x, y, variant=name)
        if first is None:
            first, rounding = y.double(), 1.01 * scheme.output.dtype.unit + 32 * F32.unit
            bound = 2 * (bound + rounding * first.abs())
        elif wrong := int((~((y.double() - first).abs() <= bound)).sum()):
            found.append(f"{name} in {wrong} of {M * N}")
    return ", ".join(found)


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
            artifact = qdsl.open_artifact(path)
            m = artifact.manifest
            scheme = qdsl.parse(m.text, m.scheme, **m.params)
            try:
                report, other = verify(scheme, "cuda"), differing(scheme, artifact)
            except Exception as problem:
                failed.append(f"{scheme.bound}: {type(problem).__name__}: {problem}")
                lines.append(f"{scheme.bound:60}{'':6}{'':13}  did not run")
                continue
            passed = report.passed and not other
            lines.append(f"{scheme.bound:60}{report.cases:6}{report.worst:13.3f}  {'ok' if passed else 'WRONG'}")
            if not report.passed:
                failed.append(str(report))
            if other:
                failed.append(f"{scheme.bound}, m = {M}, n = {N}, k = {K}: differ from the first kernel: {other}")
            print(lines[-1], f"{time.perf_counter() - start:.1f} s", flush=True)
    print("\n".join([*failed, *lines]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
