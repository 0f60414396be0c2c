"""Declarations that nobody has thought of, from seeds: each compiles and is right, or is refused in words.

`pytest tests/test_random_schemes.py --schemes 500` tries as many.
"""

import os
import platform

from declarations import declaration

import qdsl
from qdsl.codegen.plan import plans
from qdsl.codegen.target import target
from qdsl.runtime.verify import verify

LEVEL = os.environ.get("QDSL_CPU_LEVEL") or ("x86-64-v2" if platform.machine() == "x86_64" else None)


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--schemes")))


def test_a_random_scheme_is_right_or_refused(seed):
    text = declaration(seed)
    try:
        scheme = qdsl.parse(text, f"s{seed}.q")
    except qdsl.SchemeError as problem:
        refused = str(problem)
    else:
        refused = ""
    if refused:
        assert "error[inexact-operand]" in refused, f"{text}\nonly what the compute type cannot hold is wrong in these"
        return
    for arch in ("sm_80", "sm_89", "sm_90a"):
        assert plans(scheme, target("cuda", arch))
    report = verify(scheme, "cpu", LEVEL)
    assert report.passed, f"{report}\n\n{text}"
