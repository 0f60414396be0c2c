"""What a call of a layer costs the host: `python benchmarks/host_cost.py [--shape KxN] [--scheme NAME]`.

Wall clock per call at M = 1, without waiting for the GPU, of QuantLinear.forward and of F.linear of the same shape; their
difference is what qdsl adds.  A call may allocate its output and nothing else, which torch's allocator is asked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

import qdsl
from qdsl import cli, reference
from qdsl.diagnostic import Error
from qdsl.runtime import QuantLinear
from qdsl.runtime.bench import dense_dtype
from qdsl.runtime.timing import place

GOAL_US = 12.0
BURSTS, CALLS = 50, 200  # calls of a burst fit a GPU's queue, so that none waits for the GPU


def host_us(call: Callable[[], object], device: torch.device) -> float:
    """Median over bursts of the host's µs per call; the GPU is idle when a burst begins."""
    times = []
    for _ in range(BURSTS):
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / CALLS)
    _synchronize(device)
    return statistics.median(times)


def extra_allocations(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """(allocations, bytes) per call on the GPU beyond the output's own."""
    y = call()
    torch.cuda.synchronize()
    size = -(-y.nbytes // 512) * 512  # the allocator's unit
    before = torch.cuda.memory_stats()
    for _ in range(CALLS):
        call()
    after = torch.cuda.memory_stats()
    count, total = (
        (after[name] - before[name]) / CALLS for name in ("allocation.all.allocated", "allocated_bytes.all.allocated")
    )
    return count - 1, total - size


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def layer_of(scheme: qdsl.Scheme, k: int, n: int, device: torch.device) -> QuantLinear:
    patterns = reference.random_patterns(scheme, np.random.default_rng(0), n, k)
    patterns = {name: p for name, p in patterns.items() if not scheme.tensor(name).optional}
    bias = any(t.role == "bias" and not t.optional for t in scheme.output.tensors)
    return QuantLinear(scheme, k, n, bias, device).set_patterns(patterns).prepare()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="awq4", metavar="SCHEME")
    parser.add_argument("--shape", type=cli.shapes, metavar="KxN", help="default 4096x4096 on a GPU, 128x16 on a CPU")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a CPU does the product within the call, so there it has to be a small one
    k, n = args.shape[0] if args.shape else (4096, 4096) if device.type == "cuda" else (128, 16)
    try:
        scheme = qdsl.load(args.scheme)
        layer = layer_of(scheme, k, n, device)
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    x = torch.randn(1, k, device=device).to(layer.dtype)
    kind = dense_dtype(scheme, device)
    w, given = torch.randn(n, k, device=device).to(kind), x.to(kind)
    with torch.inference_mode():
        for _ in range(CALLS):
            layer(x), functional.linear(given, w)
        ours = host_us(lambda: layer(x), device)
        dense = host_us(lambda: functional.linear(given, w), device)
        extra = extra_allocations(lambda: layer(x)) if device.type == "cuda" else None
    added, failed = ours - dense, ours - dense > GOAL_US
    print(f"{scheme.bound}, K {k}, N {n}, M 1 on {place(device)}; median of {BURSTS} bursts of {CALLS} calls")
    print(f"{'QuantLinear.forward':24}{ours:8.2f} us\n{'F.linear':24}{dense:8.2f} us")
    print(f"{'difference':24}{added:8.2f} us   goal {GOAL_US:g} us: {'missed' if failed else 'met'}")
    if extra is None:
        print("allocations: not counted on a CPU")
    else:
        failed |= extra != (0, 0)
        print(f"allocations beyond the output: {extra[0]:g} a call, {extra[1]:g} bytes")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
