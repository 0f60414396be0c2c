"""The tensor-core main loop without a GPU: bit tricks, tiles, generated sources."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.backend.cuda.host import export_cuda_host
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import mma
from qdsl.codegen.cuda.decode import HALVES
from qdsl.codegen.cuda.reduce import Epilogue
from qdsl.codegen.cuda.stage import SHARED, Stage, fitted, pool_bytes
from qdsl.codegen.cuda.tile import Tile
from qdsl.codegen.cuda.weight import Weight
from qdsl.dtype import dtype

TILES = {tile.name: tile for tile in mma.tiles()}
AWKWARD = Weight("float16", 0, "float32", "float32", 16)  # the most bytes of scales and zeros


def source(functions: dict, arch: str = "sm_80") -> str:
    target = tvm.target.Target({"kind": "cuda", "arch": arch}).with_host(tvm.target.Target("cuda_host"))
    return export_cuda_host(tvm.compile(tvm.IRModule(functions), target=target, tir_pipeline="tirx").mod)


def test_a_scale_of_many_bits_is_two_bf16_numbers():
    """`Weight.arithmetic` "split": next to exact, for every f16 scale and f32 scales at random, before the one rounding."""

    def bf16(values: np.ndarray) -> np.ndarray:
        return values.astype(ml_dtypes.bfloat16).astype(np.float64)

    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    floats = np.random.default_rng(0).uniform(0.5, 1, 20_000).astype(np.float32) * 2.0 ** np.arange(-20, 0).repeat(1000)
    for scales in (halves[np.isfinite(halves)].astype(np.float64), floats):
        high = bf16(scales)
        low = bf16(scales - high)
        for code in (1, 3, 31, -77, 127, 255):
            found = bf16(code * high + bf16(code * low))
            assert (np.abs(found - code * scales) <= 1.01 * 2.0**-8 * np.abs(code * scales)).all()
    for scale in ("float16", "float32"):
        assert Weight("bfloat16", 40, "u4", scale, 128).arithmetic == "split"
        assert Weight("float16", 0, "u4", scale, 128).arithmetic == ("packed" if scale == "float16" else "floats")


def test_tiles_print():
    assert [str(tile) for tile in mma.tiles()] == [
        "m1_short: 1 tokens x 16 features, 1x1x8 warps, 3 stages of 256, corrects sums",
        "m1: 1 tokens x 32 features, 1x1x8 warps, 2 stages of 256, corrects sums",
        "m8: 8 tokens x 32 features, 1x1x4 warps, 2 stages of 256, corrects sums",
        "m16: 16 tokens x 32 features, 1x1x8 warps, 2 stages of 128, corrects sums",
        "m32: 32 tokens x 32 features, 1x1x4 warps, 3 stages of 128, corrects weights",
        "m64: 32 tokens x 64 features, 1x1x4 warps, 2 stages of 128, corrects weights",
        "m256: 64 tokens x 64 features, 1x1x4 warps, 2 stages of 64, corrects weights",
        "any: 128 tokens x 128 features, 2x2x1 warps, 2 stages of 128, corrects weights",
    ]


@pytest.mark.parametrize("name", TILES)
def test_tiles_fit_every_gpu(name):
    tile = TILES[name]
    assert tile.threads <= 1024
    for weight in (Weight("bfloat16", 8, None, "bfloat16", 128), AWKWARD):
        small = fitted(weight, tile)
        assert pool_bytes(weight, small) <= SHARED
        stage = Stage(weight, small)
        assert stage.offset() % 128 == 0 and stage.offset("x") % 128 == 0 and stage.offset("scale") % 16 == 0


@pytest.mark.parametrize(
    ("group", "correct", "slice_", "step"),
    [
        (None, "sums", 4, 128),
        (256, "sums", 4, 128),
        (192, "sums", 2, 64),
        (128, "sums", 1, 64),
        (32, "sums", 2, 32),
        (None, "weights", 2, 64),
        (192, "weights", 1, 64),
        (16, "weights", 2, 16),
    ],
)
def test_a_step_lies_in_one_group_and_is_short(group, correct, slice_, step):
    tile = Tile("t", correct, 32, 32, (1, 1, 1), slice_, 2, 1)
    assert Stage(Weight("float16", 8, None, "float16", group), tile).step == step


def test_the_order_of_sums_is_told_by_who_has_which_slice():
    weight = Weight("float16", 0, "u4", "float16", 128)

    def order(tile: Tile, weight: Weight = weight) -> str:
        return Stage(weight, fitted(weight, tile)).order

    assert order(TILES["m16"]) == "mma 8 teams by 128, scales sums of 128"
    assert order(TILES["m16"], replace(weight, zero="float16")) == "mma 8 teams by 128, corrects sums of 128"
    assert order(TILES["any"]) == "mma 1 team, corrects weights"
    assert order(TILES["m1"]) == order(TILES["m1_short"]) and order(TILES["m32"]) == order(TILES["m64"])
    assert order(replace(TILES["any"], slice=1, stages=4, tokens=64)) == order(TILES["any"]), "one team has all slices"
    assert order(replace(TILES["m32"], slice=1)) != order(TILES["m32"])
    assert order(replace(TILES["m8"], split=(1, 1, 8))) != order(TILES["m8"])
    groups = [replace(weight, group=group) for group in (32, 64)]
    assert len({order(TILES["m8"], w) for w in groups}) == 2, "a sum that is corrected is rounded"
    assert len({order(TILES["m32"], w) for w in groups}) == 1


@pytest.mark.parametrize("zero", [None, "u4", "float16"])
@pytest.mark.parametrize("group", [16, 32, 64, 192, None])
@pytest.mark.parametrize("compute", HALVES)
def test_sources(compute, group, zero):
    weight = Weight(compute, 0 if zero else 8, zero, compute, group, dtype("u4" if zero else "i4"))
    functions = {name: mma.lower(name, weight, TILES[name]) for name in ("m1", "m64")}
    text = source(functions)
    half = weight.half.ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32" in text
    for name in functions:
        assert re.search(rf"__global__ void __launch_bounds__\({TILES[name].threads}, \d+\) {name}_kernel\(", text)
    # Float zeros of another type go through float32.
    assert (f"fma.rn.{half}x2" in text) == (zero in (None, "u4", compute))


CLUSTER = Tile("c8", "sums", tokens=8, features=64, split=(1, 2, 4), slice=2, stages=4, resident=1, cluster=4)


def test_a_cluster_shares_k():
    assert str(CLUSTER) == "c8: 8 tokens x 64 features, 1x2x4 warps, 4 CTAs along k, 4 stages of 128, corrects sums"
    weight = Weight("float16", 0, "u4", "float16", 128)
    assert Stage(weight, CLUSTER).order == "mma 4 CTAs by 128, of 4 teams by 128, corrects sums of 128"
    function = mma.lower("linear", weight, CLUSTER, overlapped=True, shared=227 * 1024)
    text = source({"linear": function}, "sm_90a")
    assert "clusterDim.x = " in text and "mapa.shared::cluster" in text
    assert text.count("_cluster_arrive_release_aligned();") == 2  # sums are stored; sums are read


def test_more_shared_memory_holds_more_stages():
    weight, tile = Weight("float16", 0, "u4", "float16", 128), replace(CLUSTER, split=(1, 1, 8))
    assert (fitted(weight, tile).stages, fitted(weight, tile, 227 * 1024).stages) == (2, 4)
    assert fitted(weight, TILES["m8"], 227 * 1024) == fitted(weight, TILES["m8"])


def test_codes_that_are_read_once_leave_the_cache_first():
    weight = Weight("float16", 0, "u4", "float16", 128)
    small, large = (source({"linear": mma.lower("linear", weight, TILES[name])}) for name in ("m8", "any"))
    assert re.search(r"cp.async.cg.shared.global.L2::cache_hint \[%0\], \[%1\], 16, %2", small)
    assert "cache_hint" not in large


def test_epilogue_reads_extra_buffers():
    extent = tirx.Var("B", "int64")
    extra = [("s", lambda m, n, k: (n,), "float32"), ("b", lambda m, n, k: (extent,), "float16")]

    def load(buffers, name, m, n):
        value = buffers[name][n]
        return value if name == "s" else T.if_then_else(extent > 0, T.cast(value, "float32"), T.float32(0))

    def finish(sums, m, features, load):
        return sums[0] * load("s", m, features[0]) + load("b", m, features[0])

    epilogue = Epilogue(finish, load, {"s": "n", "b": "n"})

    weight = Weight("bfloat16", 8, None, None, None)
    function = mma.lower("linear", weight, TILES["m8"], extra, epilogue, "float32")
    assert re.findall(r"(\w+): T.Buffer", function.script()) == ["x", "q", "s", "b", "y"]
    assert "nv_bfloat16* __restrict__" in source({"linear": function})
