"""The example that users run first, and the decoders that everything else is compared with."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import decoders

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "quickstart.py"
DATA = ROOT / "tests" / "data" / "awq_g128"


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, EXAMPLE, *args], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_quickstart_loads_a_checkpoint_and_its_logits_are_right(target):
    pytest.importorskip("transformers")
    done = run("--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 quantized layers" in done.stdout
    error = float(re.search(r"logit error: (\S+)", done.stdout)[1])
    assert 0 < error <= {"cpu": 1e-5, "cuda": 2e-3}[target]
    tokens = re.search(r"generated tokens: (.*)", done.stdout)[1].split()
    assert len(tokens) == 16 and all(0 <= int(t) < 512 for t in tokens)


def test_the_quickstart_names_a_directory_that_is_no_checkpoint(tmp_path):
    pytest.importorskip("transformers")
    done = run(str(tmp_path / "absent"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'absent'}: no config.json")


def test_the_decoder_rounded_once_is_the_writers_own_decoding():
    stored = load_file(DATA / "model.safetensors")
    published = load_file(DATA / "reference_dequant.safetensors")
    assert len(published) == 3
    for name, expected in published.items():
        found = decoders.awq(stored, name.removesuffix("weight"))
        np.testing.assert_array_equal(found.astype(np.float16).view(np.uint16), expected.view(np.uint16), err_msg=name)


def test_the_quickstart_decodes_as_the_loops_do():
    pytest.importorskip("transformers")
    decode = runpy.run_path(str(EXAMPLE))["decode_awq"]
    stored = load_file(DATA / "model.safetensors")
    for name in stored:
        if name.endswith("qweight"):
            prefix = name.removesuffix("qweight")
            found = decode(*(stored[prefix + kind] for kind in ("qweight", "qzeros", "scales")))
            np.testing.assert_array_equal(found, decoders.awq(stored, prefix))
