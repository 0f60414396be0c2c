"""The model of kernel times: near to what was measured, and sane where nothing was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdsl.choice import TOKENS, Key, at
from qdsl.codegen.cuda import model
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import GPUS, target
from qdsl.manifest import Variant

KEY = Key("f16", "f16", "u4", 128)
F16 = Weight("float16", 0, "u4", "float16", 128, False)
BF16 = Weight("bfloat16", 0, "u4", "float16", 128, False)
MEASURED = [  # on an H200, f16, launched before their predecessors end: variant, m, n, k, µs
    ("h1_short", 1, 28672, 8192, 34.1),
    ("h1", 1, 4096, 4096, 4.4),
    ("h1_deep", 1, 28672, 8192, 32.9),
    ("h1_wide", 1, 14336, 4096, 11.0),
    ("h8", 8, 8192, 8192, 11.6),
    ("h8_deep", 8, 4096, 4096, 4.8),
    ("h8_wide", 8, 14336, 4096, 10.9),
    ("h16", 16, 4096, 14336, 14.2),
    ("h16_wide", 16, 14336, 4096, 12.8),
    ("h16_split", 16, 8192, 8192, 13.6),
    ("w32", 32, 14336, 4096, 14.8),
    ("w32_wide", 32, 28672, 8192, 45.6),
    ("w32_split", 32, 8192, 8192, 16.2),
    ("w32_narrow", 32, 4096, 4096, 7.0),
    ("w64", 64, 14336, 4096, 17.9),
    ("w64", 64, 4096, 14336, 51.0),
    ("w64_wide", 64, 28672, 8192, 59.0),
    ("w64_split", 64, 8192, 8192, 19.2),
    ("w64_narrow", 64, 4096, 14336, 17.7),
    ("w128", 128, 14336, 4096, 25.5),
    ("w128", 256, 8192, 8192, 48.4),
    ("w128_wide", 128, 28672, 8192, 87.2),
    ("w128_split", 256, 4096, 4096, 16.1),
    ("w128_narrow", 128, 4096, 14336, 26.0),
    ("w152", 1024, 14336, 4096, 177.2),
    ("w256", 256, 4096, 14336, 132.6),
    ("w256", 1024, 8192, 8192, 189.9),
    ("w256_pair", 4096, 28672, 8192, 2870.7),
    ("w256_pairs", 4096, 14336, 4096, 700.8),
]
ONE_BY_ONE = [  # the kernels of sm_80 on the same GPU: weight, variant, m, n, k, µs
    (F16, "m1_short", 1, 4096, 4096, 4.9),
    (F16, "m1", 1, 28672, 8192, 34.7),
    (F16, "m8", 8, 4096, 14336, 13.5),
    (F16, "m16", 16, 14336, 4096, 16.9),
    (F16, "m32", 32, 8192, 8192, 21.3),
    (BF16, "m32", 32, 8192, 8192, 33.4),
    (F16, "m64", 64, 8192, 8192, 34.9),
    (F16, "m256", 256, 8192, 8192, 107.9),
    (BF16, "m256", 256, 4096, 4096, 40.4),
    (F16, "any", 4096, 4096, 4096, 389.9),
    (F16, "any", 1024, 28672, 8192, 1399.5),
]
RIVALS = {  # on an H200, f16: m, n, k -> µs of what was timed
    (1, 4096, 4096): {"h1": 4.7, "h1_deep": 4.9, "h1_short": 5.5, "h1_wide": 5.9},
    (1, 8192, 8192): {"h1": 10.9, "h1_wide": 11.0, "h1_short": 13.7, "h1_deep": 14.5},
    (8, 14336, 4096): {"h8_wide": 10.9, "h8": 12.3, "h8_deep": 12.4},
    (8, 8192, 8192): {"h8": 11.6, "h8_deep": 11.9, "h8_wide": 12.9},
    (16, 4096, 14336): {"h16": 14.2, "h16_split": 14.4, "w32_narrow": 16.4, "h16_wide": 23.6, "w32": 47.3},
    (16, 8192, 8192): {"h16_split": 13.6, "h16": 14.6, "h16_wide": 15.0, "w32_split": 17.3, "w32_narrow": 22.7},
    (32, 14336, 4096): {"w32": 14.8, "w32_split": 19.2, "w32_wide": 24.5, "w32_narrow": 26.0},
    (64, 28672, 8192): {"w64_wide": 59.0, "w64": 61.9, "w64_split": 77.4, "w64_narrow": 82.8},
    (64, 4096, 14336): {"w64_narrow": 17.7, "w64_split": 28.6, "w64": 51.0, "w64_wide": 93.9},
    (128, 8192, 8192): {"w128_split": 27.8, "w128_narrow": 33.1, "w128": 44.4, "w152": 49.5, "w256": 77.9},
    (128, 4096, 14336): {"w128_narrow": 26.0, "w128_split": 41.6, "w128": 74.1, "w128_wide": 133.0, "w256": 132.9},
    (256, 4096, 4096): {"w128_split": 16.1, "w128_narrow": 20.7, "w128": 23.7, "w152": 26.0, "w256": 41.1},
    (256, 28672, 8192): {"w256": 178.5, "w128_wide": 187.1, "w128": 214.3, "w128_split": 215.4, "w152": 236.8},
    (1024, 8192, 8192): {"w256": 179.3, "w256_pair": 180.9, "w128_wide": 187.3, "w152": 237.0},
    (4096, 4096, 14336): {"w256_pair": 623.6, "w256": 675.5, "w256_pairs": 682.3, "w128_wide": 686.2, "w152": 771.2},
}


def work_of(arch: str, name: str):
    return next(c.work for c in candidates(target("cuda", arch), F16) if c.name == name)


@pytest.mark.parametrize(("name", "m", "n", "k", "us"), MEASURED)
def test_predictions_are_near_to_what_was_measured(name, m, n, k, us):
    gpu = target("cuda", "sm_90a").gpu
    assert model.seconds(work_of("sm_90a", name), F16, gpu, m, n, k) * 1e6 == pytest.approx(us, rel=0.14)


def test_every_tile_was_measured_but_these():
    names = {c.name for c in candidates(target("cuda", "sm_90a"), F16)}
    ahead = {f"{name}_ahead" for name in ("h1", "h8", "h16", "w32", "w64")}
    assert names - {name for name, *_ in MEASURED} == {"h8_pair", "h16_pair", "w256_split", "any", *ahead}


@pytest.mark.parametrize(("weight", "name", "m", "n", "k", "us"), ONE_BY_ONE)
def test_predictions_without_overlap(weight, name, m, n, k, us):
    """In bf16 weights were made in float32 then."""
    work = replace(work_of("sm_80", name), **({"decode": "floats"} if weight is BF16 else {}))
    assert not work.overlapped
    gpu = target("cuda", "sm_90").gpu
    assert model.seconds(work, weight, gpu, m, n, k) * 1e6 == pytest.approx(us, rel=0.16)


@pytest.mark.parametrize("shape", RIVALS)
def test_little_is_lost_by_the_choice(shape):
    gpu, times = target("cuda", "sm_90a").gpu, RIVALS[shape]
    chosen = min(times, key=lambda name: model.seconds(work_of("sm_90a", name), F16, gpu, *shape))
    assert times[chosen] <= 1.12 * min(times.values()), chosen


def modelled(arch: str):
    gpu = target("cuda", arch)
    kernels = candidates(gpu, F16)
    variants = tuple(Variant(c.name, (), c.k_multiple, c.order) for c in kernels)
    works = {c.name: c.work for c in kernels}
    return works, variants, model.table(KEY, F16, gpu.gpu, works, variants)


@pytest.mark.parametrize("arch", GPUS)
def test_a_modelled_table_is_sane(arch):
    works, variants, table = modelled(arch)
    assert not table.problems(variants)
    for row in table.rows:
        chosen = [works[at(row.free, m)] for m in TOKENS]
        assert [w.tokens for w in chosen] == sorted(w.tokens for w in chosen), "more tokens never get a smaller tile"
        assert chosen[0].tokens == 1
        assert all(w.tokens <= 32 for m, w in zip(TOKENS, chosen, strict=True) if m <= 8)
        assert chosen[-1].tokens >= 32 if row.n < 4096 else chosen[-1].tokens >= 64


def test_on_hopper_the_model_agrees_with_what_was_found_by_hand():
    """Where a tile was meant to end, the model ends it within a factor of two."""
    _, _, table = modelled("sm_90a")
    ends = {name: end for end, name in table.nearest(4096, 4096).free}
    meant = {"h1": 1, "h8": 8, "h16": 16, "w32_narrow": 32, "w64_narrow": 64, "w128_narrow": 128, "w128_split": 256}
    for name, end in meant.items():
        assert end / 2 <= ends[name] <= 2 * end, ends
    assert {name for name, end in ends.items() if end is None} <= {"w256", "w256_pair", "w256_pairs"}
    assert {"any"} == {name for end, name in table.spare.free if end is None}


def test_a_gpu_without_room_holds_one_cta():
    works, _, _ = modelled("sm_80")
    a100, l40 = target("cuda", "sm_80").gpu, target("cuda", "sm_89").gpu
    assert works["m1_short"].residents(a100) == 2
    assert works["m1_short"].residents(l40) == 1


def test_products_and_decoding_overlap_with_wgmma():
    gpu = target("cuda", "sm_90a").gpu
    works, _, _ = modelled("sm_90a")
    alone = replace(works["any"], multiplier="wgmma")
    assert model.seconds(alone, F16, gpu, 4096, 8192, 8192) < 0.6 * model.seconds(
        works["any"], F16, gpu, 4096, 8192, 8192
    )
    halves = replace(works["any"], split=2)
    assert model.seconds(halves, F16, gpu, 128, 2048, 16384) < model.seconds(works["any"], F16, gpu, 128, 2048, 16384)
