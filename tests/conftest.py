"""Options and markers of the whole suite."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Threads of a kernel that is done sleep instead of waiting for the next one in a loop: tests share their cores with those
# of another process, and from small kernel to small kernel the loops take most of the time. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long one example takes is the machine's load, not the code's.
settings.register_profile("qdsl", deadline=None)
settings.load_profile("qdsl")


# Files whose tests run the kernels of the best level that the machine has; all others are about something else, and take those
# that compile in a tenth of the time.
BEST_LEVEL = {"test_levels", "test_quickstart", "test_simd", "test_threads", "test_verify"}


@pytest.fixture(autouse=True, scope="module")
def level(request):
    """The CPU level of a file's tests."""
    if request.path.stem in BEST_LEVEL or "QDSL_CPU_LEVEL" in os.environ or platform.machine() != "x86_64":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDSL_CPU_LEVEL", "x86-64-v2")
        _forget_levels()
        yield
    _forget_levels()


def _forget_levels():
    if module := sys.modules.get("qdsl.runtime.processor"):  # which takes seconds to import
        module.cpu_levels.cache_clear()


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected texts that tests compare with")
    parser.addoption(
        "--every-kernel", action="store_true", help="compile every kernel for every weight (test_resources.py)"
    )
    parser.addoption(
        "--every-level", action="store_true", help="run every scheme at every CPU level, and on QEMU (test_levels.py)"
    )
    parser.addoption("--schemes", type=int, default=8, help="how many random schemes to try (default 8)")
    parser.addoption("--damages", type=int, default=240, help="how many damaged checkpoints to try (default 240)")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return  # and torch, which takes seconds to import, stays out
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def golden(request):
    """Compare a text with a file, exactly; `--update-golden` writes the file instead."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest --update-golden and read what it writes"
        assert text == path.read_text()

    return compare
