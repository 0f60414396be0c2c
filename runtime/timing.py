"""How long one call takes on a device, and what the device is.

A time is a median: of CUDA graph replays on a GPU, of wall-clock samples on the CPU, both with weights that no cache holds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from qdsl import results

Call = Callable[[int], object]  # one product, with the copy of the weights of that number

GPU_ROTATION = 400 << 20  # bytes of weights that calls go through: several times the L2 cache of any GPU
SAMPLES = 9  # of a GPU
WARMING = 2  # of these, the first, while clocks rise: they are dropped
SAMPLE_US = 2000.0  # a sample of a GPU lasts no less, so that the first launch of its graph does not show
BUDGET_S = 0.5  # of wall clock for a median on the CPU


# ---- time --------------------------------------------------------------------------------------------------------
def median_us(call: Call, copies: int, device: torch.device, samples: int = SAMPLES) -> float:
    """Median time of one call in µs; calls go through the copies 0 … copies - 1 in turn.

    `samples` are taken on a GPU, of a CPU as many as a fixed time allows.
    """
    timed, times, started = Timed(call, copies, device), [], time.perf_counter()
    if timed.graph is not None:
        return medians_by_turns([timed], samples)[0]
    while len(times) < 3 or time.perf_counter() - started < BUDGET_S:
        times.append(timed.sample())
    return statistics.median(times)


def medians_by_turns(every: Sequence[Timed], samples: int = SAMPLES) -> list[float]:
    """Median times of several calls in µs, of samples that they take one after the other, there and back.

    So all see the same clocks: a GPU at its limit of power slows down, and what is measured first would be ahead by up to 14 %.
    """
    times: dict[int, list[float]] = {at: [] for at in range(len(every))}
    for round_ in range(samples):
        for at in times if round_ % 2 == 0 else reversed(times):
            times[at].append(every[at].sample())
    return [statistics.median(own[WARMING:]) for own in times.values()]


class Timed:
    """A call, ready for samples of its time, in µs: of a few in a row on a CPU.

    On a GPU, of a graph of many, replayed: what a call costs a busy GPU, without its launch by the host.

    graph   None on a CPU
    count   calls of a row, or replays of the graph, that last long enough for a sample
    """

    def __init__(self, call: Call, copies: int, device: torch.device):
        with torch.no_grad():
            for c in range(copies):  # loads, compiles and allocates what the first call of each copy does
                call(c)
            self.call, self.copies, self.at, self.graph = call, copies, 0, None
            if device.type == "cuda":
                once = _elapsed_us(lambda: [call(c) for c in range(copies)])
                self.calls = copies * max(1, min(24 // copies, math.ceil(SAMPLE_US / max(once, 1.0))))
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    for c in range(self.calls):
                        call(c % copies)
                self.count = max(1, math.ceil(SAMPLE_US / max(_elapsed_us(self.graph.replay), 1.0)))
            else:
                start = time.perf_counter()
                call(0)
                once_s = time.perf_counter() - start
                self.count = max(1, min(1000, math.ceil(BUDGET_S / 50 / max(once_s, 1e-7))))

    def sample(self) -> float:
        if self.graph is not None:
            return _elapsed_us(self.graph.replay, self.count) / (self.count * self.calls)
        begin, first, self.at = time.perf_counter(), self.at, self.at + self.count
        with torch.no_grad():
            for c in range(first, self.at):
                self.call(c % self.copies)
        return (time.perf_counter() - begin) * 1e6 / self.count


def _elapsed_us(work: Callable[[], object], times: int = 1) -> float:
    """Of a GPU's work, done so many times, from its first call to its end."""
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


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
