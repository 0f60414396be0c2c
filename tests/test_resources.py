"""Every tensor-core kernel through nvcc, without a GPU: registers, spills, and what ptxas warns of."""

from __future__ import annotations

from dataclasses import replace

import pytest

import qdsl
from qdsl.cache import nvcc
from qdsl.codegen.cuda import hopper, host, main_loop, mma, warp, wgmma
from qdsl.codegen.cuda.byte_weight import ByteWeight
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Shared, Weight
from qdsl.codegen.plan import plan
from qdsl.codegen.target import target
from qdsl.dtype import dtype

AWQ = Weight("float16", 0, "u4", "float16", 128)
MIXED = Weight("bfloat16", 0, "u4", "float16", 128)
SYMMETRIC = Weight("bfloat16", 8, None, "float32", None)
AWKWARD = Weight("float16", 0, "float32", "float32", 16)  # the most bytes of scales and zeros
INT8 = Weight("bfloat16", 0, None, None, None, dtype("i8"))
NVFP4 = Weight("bfloat16", 0, None, "e4m3", 16, dtype("e2m1"))
TABLE = Weight("bfloat16", 0, None, "float16", 48, dtype("u5"), tuple(i / 8 - 1 for i in range(24)))
E4M3 = ByteWeight(dtype("e4m3"), dtype("e4m3"), "bfloat16", 64, "float32", Shared(128, 64), "float32")
NIBBLES = ByteWeight(dtype("i8"), dtype("i4"), "bfloat16", 64, "float32")
INT8_BY_MMA = ByteWeight(dtype("i8"), dtype("i8"), "bfloat16", corrected=True, matrices=False)
E4M3_BY_MMA = replace(E4M3, matrices=False)
# Of Hopper's kernels those that come within a register or two of their limit. Another weight changes a few registers, so
# the others are compiled for one weight, or for all with --every-kernel.
TIGHT = {"w256", "w152", "w128_wide", "w128", "w128_split", "w32_wide", "t8_tall", "t16", "t16_split", "h16", "any"}


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc, or its wheels")
@pytest.mark.parametrize(
    ("arch", "weight", "spilled"),
    [
        ("sm_80", AWQ, 0),
        ("sm_90a", AWQ, 0),
        ("sm_90a", SYMMETRIC, 8),  # two registers, outside of the loop
        ("sm_90a", MIXED, 0),
        ("sm_90a", INT8, 0),
        ("sm_90a", NVFP4, 8),
        ("sm_80", TABLE, 0),
        ("sm_90a", E4M3, 64),  # 256 tokens: sums, products and their factors
        ("sm_90a", NIBBLES, 8),
        ("sm_80", INT8_BY_MMA, 0),
        ("sm_89", E4M3_BY_MMA, 0),
    ],
    ids=[
        "sm_80",
        "sm_90a",
        "symmetric",
        "mixed",
        "int8",
        "nvfp4",
        "table",
        "blocks",
        "nibbles",
        "bytes-sm_80",
        "bytes-sm_89",
    ],
)
def test_nothing_spills_and_no_wgmma_waits_for_the_compiler(arch, weight, spilled, tmp_path, request):
    """Run with -s to read the registers. ptxas warns where it waits after every wgmma, which costs half the speed."""
    goal = target("cuda", arch)
    kernels = candidates(goal, weight)
    many = arch == "sm_90a" and isinstance(weight, Weight) and weight is not AWQ
    if many and not request.config.getoption("--every-kernel"):
        kernels = [c for c in kernels if c.name in TIGHT]
        assert len(kernels) == len(TIGHT)
    functions = {c.name: c.lower(c.name) for c in kernels}
    source = tmp_path / "kernels.cu"
    source.write_text(host.emit(functions, goal, overlapped=goal.dependent_launch))
    found, losses = host.resources(source, goal)
    assert found.keys() == functions.keys()
    for name, used in found.items():
        print(f"{arch} {name}: {used}")
    assert {name: used.spilled for name, used in found.items() if used.spilled > spilled} == {}
    assert losses == []


HOPPER = {tile.name: tile for tile in (*warp.tiles(), *wgmma.tiles())}


def test_hopper_tiles_fit_and_print():
    assert len(HOPPER) == len(warp.tiles()) + len(wgmma.tiles())
    for tile in HOPPER.values():
        assert hopper.fitted(AWQ, tile) == tile, f"{tile} does not fit the weight it was made for"
        assert hopper.pool_bytes(AWKWARD, hopper.fitted(AWKWARD, tile)) <= hopper.SHARED
    assert str(HOPPER["t8_split"]) == (
        "t8_split: 8 tokens x 64 features, 2x4 warps, 16 stages of 128, corrects sums, 2 CTAs along k"
    )
    assert str(HOPPER["w32_narrow"]) == (
        "w32_narrow: 32 tokens x 64 features, 1x2 warpgroups, 6 stages of 256, 2 CTAs along k"
    )
    assert str(HOPPER["w256_tail"]) == (
        "w256_tail: 256 tokens x 128 features, 2x1 warpgroups, 5 stages of 64, persistent, the last round in halves"
    )


def test_equal_orders_of_hopper_tiles():
    order = {name: hopper.order(AWQ, tile) for name, tile in HOPPER.items()}
    assert order["w64"] == order["w128"] == order["w256"] == "wgmma 1 team"
    assert order["w32"] == "wgmma 2 teams by 128"
    assert order["w32_narrow"] == "wgmma 2 CTAs by 256, of 2 teams by 256"
    assert order["t8_wide"] == "mma 4 teams by 128, corrects sums of 128"
    assert order["t16_wide"] == "mma 4 teams by 128, scales sums of 128", "zero points are taken off codes"
    assert order["t16"] == mma_order("h16") == "mma 8 teams by 128, scales sums of 128"
    floats = Weight("bfloat16", 0, None, "bfloat16", 128, dtype("e4m3"))
    assert hopper.order(floats, HOPPER["t8_wide"]) == hopper.order(floats, HOPPER["t16_wide"]), "there are none"
    assert {name for name, names in order.items() if names is None} == {
        n for n in HOPPER if n.endswith(("tail", "tail_wide"))
    }


def mma_order(name: str) -> str:
    return next(c.order for c in candidates(target("cuda", "sm_90a"), AWQ) if c.name == name)


def test_a_chain_of_kernels_overlaps_from_sm_90_on():
    for arch, overlapped in (("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_90a", True), ("sm_120", True)):
        goal = target("cuda", arch)
        assert goal.dependent_launch is overlapped
    for arch in ("sm_80", "sm_90"):
        goal = target("cuda", arch)
        kernel = mma.lower("linear", AWQ, mma.tiles()[0], overlapped=goal.dependent_launch)
        text = host.emit({"linear": kernel}, goal, goal.dependent_launch)
        assert ("griddepcontrol.wait" in text) == goal.dependent_launch
        assert ("ProgrammaticStreamSerialization" in text) == goal.dependent_launch


@pytest.mark.parametrize(
    ("name", "kernel", "waits"),
    [
        ("fp8_block", "w16", 3),  # the lane that asks for codes before it waits, the warp of scales, and the consumers
        ("fp8_dynamic", "w16", 2),  # no scales of groups of x
        ("fp8_block", "w128_turned", 1),  # everyone, at once
        ("awq4", "w64_tail", 1),
    ],
)
def test_all_who_read_what_the_predecessor_computes_wait_for_it(name, kernel, waits):
    """What the emulation can't see: there, a kernel begins when the one before has ended."""
    planned = plan(qdsl.load(name), target("cuda", "sm_90a"))
    (function,) = main_loop.lower(planned, [f"linear_{kernel}"]).values()
    text = host.emit({kernel: function}, planned.target, overlapped=True)
    assert text.count("tvm_builtin_ptx_griddepcontrol_wait();") == waits


@pytest.mark.parametrize("name", [tile.name for tile in warp.tiles()])
def test_few_tokens_release_a_slot_when_all_of_it_has_been_used(name):
    """At the end of a stage ptxas would do so while loads are on their way, which the emulation can't see either."""
    text = host.emit({"linear": hopper.lower("linear", AWQ, HOPPER[name])}, target("cuda", "sm_90a"), overlapped=True)
    body = text[text.index(" linear_kernel(") :]
    assert body.count("mbarrier_arrive_nocount") == 1
    assert body.index("mbarrier_arrive_nocount") < body.index("mma_sync_aligned")


def test_tensor_maps_need_no_driver_library():
    goal = target("cuda", "sm_90a")
    text = host.emit({"linear": hopper.lower("linear", AWQ, HOPPER["w32"])}, goal, overlapped=True)
    assert host.MULTIPROCESSORS not in text
    persistent = host.emit({"linear": hopper.lower("linear", AWQ, HOPPER["w256"])}, goal, overlapped=True)
    assert persistent.count(host.MULTIPROCESSORS + "()") >= 3  # defined, declared, called
    assert "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16" in text and "cp.async.bulk.tensor.3d" in text
    assert text.index("#define cuTensorMapEncodeTiled") < text.index("cuTensorMapEncodeTiled(static_cast")
