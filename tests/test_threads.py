"""Kernels of the CPU run on torch's own threads: as many as torch was told, none beside them, and none for little work."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading, time
import torch
from qdsl.runtime import QuantLinear

def started(before):
    '''Threads that were not there before; those of the compiler may end meanwhile.'''
    return threads() - before

def threads():
    return set(os.listdir("/proc/self/task"))

def busy():
    '''CPU time of all threads but this one, in clock ticks.'''
    own, spent = threading.get_native_id(), 0
    for task in os.listdir("/proc/self/task"):
        if int(task) != own:
            spent += sum(map(int, open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[11:13]))
    return spent

def layer(n, k):
    return QuantLinear("w8a16", k, n, dtype=torch.float32).quantize(torch.ones(n, k))

with torch.inference_mode():
    torch.set_num_threads(1)
    small, large = layer(64, 128), layer(512, 1024)
    x, y = torch.ones(4, 128), torch.ones(16, 1024)
    expected = small(x), large(y)
    torch.set_num_threads(2)
    alone = threads()
    assert torch.equal(small(x), expected[0])
    assert not started(alone), "little work wakes nobody"
    assert torch.equal(large(y), expected[1])
    second = started(alone)
    assert len(second) == 1, "a second thread"
    for _ in range(20):
        torch.randn(512, 512) @ torch.randn(512, 512)
        large(y).exp_()
    assert started(alone) == second, "which is torch's, too"

    torch.set_num_threads(1)
    time.sleep(0.3)  # until the other one waits no more
    before, start = busy(), time.process_time()
    while time.process_time() - start < 0.3:
        large(y)
    assert busy() == before, "one thread was asked for"

    def elsewhere():
        before = threads()
        assert torch.equal(large(y), expected[1])
        counted.append(started(before))

    counted = []
    thread = threading.Thread(target=elsewhere)
    thread.start(); thread.join()
    assert counted == [set()], f"a thread of the user's own started {counted}"
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_there_is_one_pool_of_as_many_threads_as_torch_has():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
