"""Compile what the GPU scripts need, on a machine with the compiler: `python benchmarks/gpu_artifacts.py DIR [SCHEME…]`.

Without names of schemes, all that are shipped: `w4a16.py` runs awq4 and gptq_sym alone.  DIR then goes to a GPU machine, where QDSL_ARTIFACTS=DIR makes it known; no compiler is needed there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import qdsl

ARCHS = ("sm_80", "sm_90a")
# Every shipped scheme as declared, and the parameters that change the kernels.
MORE: dict[str, tuple[dict[str, object], ...]] = {
    "awq4": ({"act": "bf16"}, {"group": 32}, {"group": 64}, {"group": "k"}, {"act": "bf16", "scale_type": "bf16"}),
    "gptq": (
        *({"bits": bits} for bits in (2, 3, 5, 6, 7, 8)),
        {"act": "bf16"},
        {"group": 20},
    ),
    "gptq_sym": ({"bits": 3}, {"bits": 8}, {"act": "bf16", "group": 64}, {"group": "k"}),
    "gptq_actorder": ({"group": 32}, {"bits": 3, "act": "bf16"}, {"bits": 8, "group": 40}),
    "gptq_sym_actorder": ({"bits": 8, "act": "bf16"},),
    "fp8_block": ({"fmt": "e5m2"}, {"scale_type": "e8m0"}),
    "fp8_block_ue8m0": ({"fmt": "e5m2", "act": "f16"},),
    "fp8_static": ({"fmt": "e5m2", "act": "f16"},),
    "fp8_tensor_dynamic": ({"fmt": "e5m2", "act": "f16"},),
    "fp8a16_block": ({"scale_type": "e8m0"}, {"fmt": "e5m2", "act": "f16", "block": 48}),
    "fp8a16_channel": ({"fmt": "e5m2"}, {"act": "f16"}),
    "fp8a16_tensor": ({"fmt": "e5m2", "act": "f16"},),
    "hqq": ({"bits": 2}, {"bits": 8, "act": "bf16"}),
    "mxfp4": ({"act": "f16"},),
    "mxfp4a8": ({"fmt": "e2m1", "act": "f16"},),
    "mxfp8": ({"fmt": "e5m2", "act": "f16"},),
    "mxfp8a8": ({"fmt": "e5m2", "act": "f16"},),
    "nf4": ({"act": "bf16"}, {"group": 128}),
    "nvfp4a16": ({"act": "f16"},),
    "w4a4": ({"act": "bf16", "scale_type": "f32"},),
    "w4a4_flatquant": ({"act": "f16"},),
    "w4a8": ({"act": "bf16"},),
    "w4a8_dynamic": ({"act": "f16"},),
    "w4a8_fp8": ({"act": "f16", "group": "k"},),
    "w4a8_group": ({"group": 20}, {"group": 128}),
    "w8a16": ({"act": "f16"},),
    "w8a16_asym": ({"group": 128, "act": "f16", "zero_type": "f32"},),
    "w8a16_group": ({"act": "f16", "group": 32},),
    "w8a8_mix": ({"act": "f16"},),
}


def variants() -> list[qdsl.Scheme]:
    """Every (scheme, parameters) that is verified on a GPU."""
    return [qdsl.load(name, **params) for name in qdsl.shipped() for params in ({}, *MORE.get(name, ()))]


def main(directory: Path, names: Sequence[str]) -> None:
    schemes = [scheme for scheme in variants() if not names or scheme.name in names]
    for at, scheme in enumerate(schemes, 1):
        start = time.perf_counter()
        name = "-".join([scheme.name, *(str(v) for v in scheme.params.values())])
        qdsl.compile(scheme, "cuda", ARCHS, out=directory / name)
        print(f"{at}/{len(schemes)} {scheme.bound}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
