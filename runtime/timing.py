"""How long one call takes on a device, and what the device is.

A time is a median: of CUDA graph replays on a GPU, of wall-clock samples on the CPU, both with weights that no cache holds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qdsl import results

Call = Callable[[int], object]  # one product, with the copy of the weights of that number

GPU_ROTATION = 400 << 20  # bytes of weights that calls go through: several times the L2 cache of any GPU
SAMPLES = 9  # of which the first two, while clocks rise, are dropped
SAMPLE_US = 2000.0  # a sample of a GPU lasts no less, so that the first launch of its graph does not show
BUDGET_S = 0.5  # of wall clock for a median on the CPU


# ---- time --------------------------------------------------------------------------------------------------------
def median_us(
    call: Call, copies: int, device: torch.device, samples: int = SAMPLES, enough: float = math.inf
) -> float:  # fmt: skip
    """Median time of one call in µs; calls go through the copies 0 … copies - 1 in turn.

    `samples` are taken on a GPU, or a single one if that is above `enough`; a CPU's are as many as a fixed time allows.
    """
    with torch.no_grad():
        return _graph_us(call, copies, samples, enough) if device.type == "cuda" else _wall_us(call, copies)


def _graph_us(call: Call, copies: int, samples: int, enough: float) -> float:
    """Graphs of many calls, replayed: what a call costs a busy GPU, without its launch by the host."""
    for c in range(copies):  # loads, compiles and allocates what the first call of each copy does
        call(c)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for c in range(copies):
        call(c)
    end.record()
    torch.cuda.synchronize()
    once = begin.elapsed_time(end) * 1e3
    rounds = max(1, min(24 // copies, math.ceil(SAMPLE_US / max(once, 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for c in range(copies):
                call(c)
    replays, times = 1, []
    for at in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        elapsed = begin.elapsed_time(end) * 1e3
        times.append(elapsed / (replays * rounds * copies))
        if at == 2 and times[2] > enough:
            break
        if at == 0:
            replays = max(1, math.ceil(SAMPLE_US / max(elapsed, 1.0)))
    return statistics.median(times[2:])


def _wall_us(call: Call, copies: int) -> float:
    """Samples of a few calls in a row, until the budget is spent; no fewer than three."""
    for c in range(copies):
        call(c)
    start = time.perf_counter()
    call(0)
    once = time.perf_counter() - start
    per_sample = max(1, min(1000, math.ceil(BUDGET_S / 50 / max(once, 1e-7))))
    samples, at, started = [], 0, time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - started < BUDGET_S:
        begin = time.perf_counter()
        for c in range(at, at + per_sample):
            call(c % copies)
        samples.append((time.perf_counter() - begin) * 1e6 / per_sample)
        at += per_sample
    return statistics.median(samples)


def rotation(device: torch.device) -> int:
    """Bytes of weights to go through so that no call finds its own in a cache."""
    return GPU_ROTATION if device.type == "cuda" else max(64 << 20, 2 * last_level_cache())


def last_level_cache() -> int:
    """Bytes of the outermost caches of all processors, as Linux tells; 0 where it does not."""
    found: dict[tuple[int, str], int] = {}
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, shared = ((index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            found[int(level), shared] = int(size[:-1]) * units[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    outermost = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == outermost)


# ---- the machine -------------------------------------------------------------------------------------------------
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else results.processor()


def threads(device: torch.device) -> int | None:
    """torch's threads on a CPU; None on a GPU."""
    return torch.get_num_threads() if device.type == "cpu" else None


def place(device: torch.device) -> str:
    count = threads(device)
    return device_name(device) + (f", {count} thread{'s' * (count > 1)}" if count else "")


def how(device: torch.device) -> str:
    """The method of `median_us`, in words."""
    times = "CUDA graph replays" if device.type == "cuda" else "wall clock over repeated calls"
    return (
        f"median of {times}, weights rotated over {rotation(device) >> 20} MiB, "
        f"every output checked against float64 before it is timed"
    )


def versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found
