"""Plans as text: a change of a decision shows as a diff.  `pytest --update-golden` rewrites the files."""

from pathlib import Path

import pytest

import qdsl
from qdsl.codegen.pipeline import emit

CASES = [
    ("awq4", "cuda", "sm_80"),
    ("gptq_actorder", "cuda", "sm_90a"),
    ("fp8_block", "cuda", "sm_80"),
    ("w8a8_static", "cpu", "x86-64-v3"),
    ("w4a8", "cpu", "x86-64-v3"),
    ("nvfp4", "cpu", "x86-64-v4"),
    ("w4a16_int", "cpu", "sapphirerapids"),
    ("w4a4_flatquant", "cuda", "sm_80"),
    ("w8a8_mix", "cpu", "x86-64-v3"),
]


@pytest.mark.parametrize(("name", "kind", "arch"), CASES, ids=lambda v: v)
def test_plan(name, kind, arch, golden):
    path = Path(__file__).parent / "golden" / f"{name}-{arch}.plan.txt"
    golden(path, emit(qdsl.load(name), kind, arch, "plan") + "\n")
