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
F16 = Weight("float16", 0, "u4", "float16", 128)
BF16 = Weight("bfloat16", 0, "u4", "float16", 128)
MEASURED = [  # on an H200, f16, in chains: variant, m, n, k, µs
    ("h1", 1, 4096, 4096, 4.3),
    ("h8", 2, 28672, 8192, 33.6),
    ("h16", 16, 4096, 4096, 5.3),
    ("t1", 1, 4096, 4096, 4.3),
    ("t1_wide", 1, 28672, 8192, 33.1),
    ("t8", 2, 4096, 4096, 4.5),
    ("t8_long", 8, 4096, 4096, 4.3),
    ("t8_split", 2, 4096, 14336, 10.3),
    ("t8_wide", 2, 8192, 8192, 10.4),
    ("t8_wide_long", 2, 14336, 4096, 10.8),
    ("t8_tall", 1, 14336, 4096, 9.5),
    ("t16", 16, 4096, 4096, 5.5),
    ("t16_split", 16, 4096, 14336, 12.5),
    ("t16_wide", 16, 8192, 8192, 12.6),
    ("t16_broad", 16, 28672, 8192, 40.0),
    ("t16_alone", 16, 8192, 8192, 13.3),
    ("w32", 32, 14336, 4096, 13.8),
    ("w32_wide", 32, 28672, 8192, 46.7),
    ("w32_narrow", 32, 4096, 4096, 6.7),
    ("w64", 64, 14336, 4096, 17.7),
    ("w64_wide", 64, 28672, 8192, 59.0),
    ("w128", 128, 14336, 4096, 24.6),
    ("w128_wide", 256, 28672, 8192, 171.3),
    ("w128_split", 128, 8192, 8192, 27.9),
    ("w152", 4096, 4096, 4096, 200.8),
    ("w256", 4096, 4096, 14336, 686.6),
    ("w64_tail", 64, 4096, 4096, 8.1),
    ("w64_tail_wide", 64, 8192, 8192, 19.0),
    ("w32_tail", 32, 8192, 8192, 15.8),
    ("w128_tail", 256, 4096, 14336, 45.4),
    ("w256_tail", 256, 14336, 4096, 44.7),
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
    (1, 4096, 4096): {"h1": 4.3, "t1": 4.3, "t8": 4.5, "h8": 4.7, "t8_long": 5.0},
    (1, 8192, 8192): {"h1": 10.2, "t1_wide": 10.4, "h8": 10.5, "t8_wide": 10.5, "t1": 10.9},
    (8, 14336, 4096): {"t8_tall": 9.5, "t8_wide_long": 10.3, "t8_wide": 10.6, "t16_wide": 11.9, "h8": 12.0},
    (8, 8192, 8192): {"t8_wide_long": 10.2, "t8_wide": 10.3, "t8": 10.7, "h8": 11.2, "t8_long": 11.4},
    (8, 4096, 14336): {"t8_long": 9.9, "t8_split": 10.4, "t8": 10.7, "h8": 11.3, "t16_split": 12.4},
    (16, 4096, 14336): {"t16_split": 12.5, "h16": 13.4, "t8_wide_long": 14.2, "t16": 14.9, "t8_wide": 15.2},
    (16, 8192, 8192): {"t16_wide": 12.6, "t16_split": 13.2, "t16": 13.3, "h16": 14.0, "t8_tall": 14.9},
    (32, 14336, 4096): {"w32": 13.8, "w32_tail": 16.2, "w64": 18.6, "w64_tail_wide": 19.0, "t16_broad": 20.8},
    (64, 28672, 8192): {"w64_wide": 59.0, "w64_tail_wide": 65.0, "w64": 65.5, "w64_tail": 66.6, "w128_wide": 79.8},
    (64, 4096, 14336): {"w64_tail": 18.4, "w32_tail": 25.3, "w32_narrow": 28.0, "w64_tail_wide": 28.2, "w32": 40.2},
    (128, 8192, 8192): {"w128_split": 27.9, "w128_tail": 28.9, "w64_tail_wide": 31.9, "w64": 32.5, "w64_tail": 36.6},
    (128, 4096, 4096): {"w64_tail": 10.8, "w64_tail_wide": 11.9, "w128_split": 15.3, "w128_tail": 15.4, "w64": 16.8},
    (256, 4096, 4096): {"w128_split": 16.4, "w128_tail": 16.6, "w128": 22.4, "w152": 25.8, "w256_tail": 26.3},
    (256, 28672, 8192): {"w128_wide": 171.3, "w256": 175.6, "w256_tail": 176.3, "w128_tail": 177.8, "w128": 185.5},
    (1024, 14336, 4096): {"w256_tail": 165.3, "w152": 167.9, "w128": 177.4, "w128_tail": 179.5, "w128_wide": 183.8},
    (4096, 4096, 14336): {"w256": 686.6, "w256_tail": 703.2, "w152": 733.3},
}


def work_of(arch: str, name: str):
    return next(c.work for c in candidates(target("cuda", arch), F16) if c.name == name)


@pytest.mark.parametrize(("name", "m", "n", "k", "us"), MEASURED)
def test_predictions_are_near_to_what_was_measured(name, m, n, k, us):
    gpu = target("cuda", "sm_90a").gpu
    assert model.seconds(work_of("sm_90a", name), F16, gpu, m, n, k) * 1e6 == pytest.approx(us, rel=0.15)


def test_every_tile_was_measured_but_these():
    names = {c.name for c in candidates(target("cuda", "sm_90a"), F16) if c.work}
    assert names - {name for name, *_ in MEASURED} == {"any"}


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
    assert times[chosen] <= 1.2 * min(times.values()), chosen


def modelled(arch: str):
    gpu = target("cuda", arch)
    kernels = [c for c in candidates(gpu, F16) if c.work]
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
    """Every m gets a kernel that was as fast as any."""
    _, _, table = modelled("sm_90a")
    free = table.nearest(4096, 4096).free
    meant = {1: {"t1", "h1"}, 8: {"t8", "t8_long", "h8"}, 16: {"t16", "h16"}, 32: {"w32_narrow", "w32_tail", "t16_wide"},
             64: {"w64_tail"}, 128: {"w64_tail"}, 256: {"w128_split", "w128_tail"}, 4096: {"w256", "w256_tail", "w152", "w128_wide"}}  # fmt: skip
    assert all(at(free, m) in names for m, names in meant.items()), free
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
    assert model.seconds(alone, F16, gpu, 4096, 8192, 8192) < 0.65 * model.seconds(
        works["any"], F16, gpu, 4096, 8192, 8192
    )
    halves = replace(works["any"], split=2)
    assert model.seconds(halves, F16, gpu, 128, 2048, 16384) < model.seconds(works["any"], F16, gpu, 128, 2048, 16384)


def test_a_short_last_round_is_shared():
    gpu = target("cuda", "sm_90a").gpu
    works, _, _ = modelled("sm_90a")
    for m, n, shared in ((1024, 14336, True), (256, 14336, False), (4096, 14336, False)):
        whole, tail = (model.seconds(works[name], F16, gpu, m, n, 4096) for name in ("w256", "w256_tail"))
        assert (tail < 0.95 * whole) == shared
