"""4-bit weights, 16-bit activations on one GPU, beside cuBLAS: `python benchmarks/w4a16.py [--out FILE.json]`.

From prebuilt artifacts (QDSL_ARTIFACTS).  Each cell is the median of CUDA graph replays over weights rotated through
more than 400 MB, so that the L2 cache is cold; outputs are checked against float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

import numpy as np
import torch
import tvm_ffi

import qdsl
import qdsl.reference
from qdsl.artifact import Artifact

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))  # K, N
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
ROTATE = 400 << 20
BANDWIDTH, FLOPS = 4.3e12, 890e12  # measured on an H200: bytes/s read, dense 16-bit operations/s
ARCH = {9: "sm_90a"}


def find(scheme: qdsl.Scheme) -> Artifact:
    for root in os.environ["QDSL_ARTIFACTS"].split(os.pathsep):
        for path in Path(root).iterdir():
            artifact = qdsl.open_artifact(path)
            if (
                artifact.manifest.text == scheme.text
                and qdsl.parse(scheme.text, **artifact.manifest.params).params == scheme.params
            ):
                return artifact
    raise SystemExit(f"no artifact of {scheme.bound} under QDSL_ARTIFACTS")


def random_buffers(scheme: qdsl.Scheme, artifact: Artifact, n: int, k: int) -> dict[str, torch.Tensor]:
    """Random kernel-layout tensors: any bits are codes; scales are around 1/100."""
    buffers = {}
    for b in artifact.manifest.buffers:
        tensor = scheme.tensor(b.tensor)
        shape = b.layout.stored_shape(tensor.shape({"m": 1, "n": n, "k": k, "e": 1}, scheme))
        dtype = getattr(torch, b.dtype)
        if tensor.optional:
            buffers[b.tensor] = torch.empty([0] * len(shape), dtype=dtype, device="cuda")
        elif dtype.is_floating_point:
            buffers[b.tensor] = (torch.rand(shape, device="cuda") * 0.01 + 0.005).to(dtype)
        else:
            words = torch.randint(
                -(2**31), 2**31 - 1, (math.prod(shape) * dtype.itemsize // 4 + 1,), dtype=torch.int32, device="cuda"
            )
            buffers[b.tensor] = words.view(torch.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return buffers


def dense(scheme: qdsl.Scheme, artifact: Artifact, buffers: dict[str, torch.Tensor], n: int, k: int) -> torch.Tensor:
    """The exact weight in float64, through the layouts and the reference."""
    patterns = {}
    for b in artifact.manifest.buffers:
        tensor = scheme.tensor(b.tensor)
        if not tensor.optional:
            words = buffers[b.tensor].cpu().view(getattr(torch, f"uint{b.layout.word}")).numpy()
            patterns[b.tensor] = b.layout.unpack(words, tensor.shape({"m": 1, "n": n, "k": k, "e": 1}, scheme))
    return torch.from_numpy(np.array(qdsl.reference.decode_weight(scheme, patterns, n, k))).cuda()


def median_us(call, copies: int) -> float:
    """Median time of one call, from graphs that run through every copy of the weights."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 24 // copies)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for c in range(copies):
                call(c)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeats * copies))
    return statistics.median(times[2:])


def cell(scheme: qdsl.Scheme, artifact: Artifact, library, n: int, k: int, tokens: tuple[int, ...]) -> list[dict]:
    dtype = torch.float16 if scheme.output.dtype.name == "f16" else torch.bfloat16
    first = random_buffers(scheme, artifact, n, k)
    weight_bytes = sum(t.numel() * t.element_size() for t in first.values())
    copies = ROTATE // weight_bytes + 1
    rotated = [first] + [{name: t.clone() for name, t in first.items()} for _ in range(copies - 1)]
    exact = dense(scheme, artifact, first, n, k)
    w16 = [exact.to(dtype) for _ in range(ROTATE // (2 * n * k) + 1)]
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda").to(dtype)
        y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        variant = next(v for v in artifact.manifest.variants if (v.m_max or m) >= m and (v.k_max or k) >= k)
        (step,) = variant.steps
        function = library[step.function]

        def ours(c: int, function=function, step=step, x=x, y=y) -> None:
            function(*[{"x": x, "y": y}.get(a, rotated[c].get(a)) for a in step.args])

        ours(0)
        truth = x.double() @ exact.t()
        error = ((y.double() - truth).norm() / truth.norm()).item()
        assert error < 6e-3, f"wrong result at m={m} n={n} k={k}: {error}"
        out = torch.empty_like(y)
        floor = max((weight_bytes + 2 * m * (n + k)) / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
        rows.append({"K": k, "N": n, "M": m, "variant": variant.name, "us": median_us(ours, copies),
                     "cublas_us": median_us(lambda c, x=x, out=out: torch.matmul(x, w16[c].t(), out=out), len(w16)),
                     "floor_us": floor, "relative_error": error})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all cells as JSON")
    parser.add_argument("--act", default="f16", choices=("f16", "bf16"))
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    args = parser.parse_args()
    scheme = qdsl.load("awq4", act=args.act)
    artifact = find(scheme)
    major, minor = torch.cuda.get_device_capability()
    arch = ARCH.get(major, f"sm_{major}{minor}")
    library = tvm_ffi.load_module(str(artifact.library(arch if arch in artifact.manifest.libraries else "sm_80")))
    rows = []
    print(
        f"{scheme.bound} on {torch.cuda.get_device_name()}, us\n{'K':>6}{'N':>7}{'M':>6} {'variant':>8}{'qdsl':>9}{'cuBLAS':>9}{'floor':>8}{'error':>9}"
    )
    for k, n in SHAPES:
        for row in cell(scheme, artifact, library, n, k, tuple(args.tokens)):
            rows.append(row)
            print(
                f"{k:6}{n:7}{row['M']:6} {row['variant']:>8}{row['us']:9.1f}{row['cublas_us']:9.1f}{row['floor_us']:8.1f}{row['relative_error']:9.1e}",
                flush=True,
            )
    if args.out:
        args.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "scheme": scheme.bound, "cells": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
