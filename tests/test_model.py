"""The model of kernel times: near to what was measured, and sane where nothing was."""

from __future__ import annotations

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
MEASURED = [  # on an H200: weight, variant, m, n, k, µs
    (F16, "m1_short", 1, 4096, 4096, 4.9),
    (F16, "m1", 1, 28672, 8192, 35.2),
    (F16, "m8", 8, 4096, 14336, 13.5),
    (F16, "m16", 16, 14336, 4096, 17.3),
    (F16, "m32", 32, 8192, 8192, 21.3),
    (BF16, "m32", 32, 8192, 8192, 33.4),
    (F16, "m64", 64, 28672, 8192, 122.5),
    (F16, "m256", 256, 8192, 8192, 107.9),
    (BF16, "m256", 256, 4096, 4096, 40.4),
    (F16, "any", 4096, 4096, 4096, 389.9),
    (F16, "any", 1024, 28672, 8192, 1399.5),
]


@pytest.mark.parametrize(("weight", "name", "m", "n", "k", "us"), MEASURED)
def test_predictions_are_near_to_what_was_measured(weight, name, m, n, k, us):
    hopper = target("cuda", "sm_90a")
    work = next(c.work for c in candidates(hopper, weight) if c.name == name)
    assert model.seconds(work, weight, hopper.gpu, m, n, k) * 1e6 == pytest.approx(us, rel=0.15)


def modelled(arch: str):
    gpu = target("cuda", arch)
    kernels = [c for c in candidates(gpu, F16) if c.work.multiplier == "mma"]
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
    for name, meant in {"m1_short": 1, "m8": 8, "m16": 16, "m32": 32, "m64": 64, "m256": 256}.items():
        assert meant / 2 <= ends[name] <= 2 * meant, ends
    assert ends["any"] is None


def test_a_gpu_without_room_holds_one_cta():
    works, _, _ = modelled("sm_80")
    a100, l40 = target("cuda", "sm_80").gpu, target("cuda", "sm_89").gpu
    assert works["m1_short"].residents(a100) == 2
    assert works["m1_short"].residents(l40) == 1


def test_products_and_decoding_overlap_with_wgmma():
    from dataclasses import replace

    gpu = target("cuda", "sm_90a").gpu
    works, _, _ = modelled("sm_90a")
    alone = replace(works["any"], multiplier="wgmma")
    assert model.seconds(alone, F16, gpu, 4096, 8192, 8192) < 0.6 * model.seconds(
        works["any"], F16, gpu, 4096, 8192, 8192
    )
    halves = replace(works["any"], split=2)
    assert model.seconds(halves, F16, gpu, 128, 2048, 16384) < model.seconds(works["any"], F16, gpu, 128, 2048, 16384)
