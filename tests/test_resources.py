"""Every tensor-core kernel through nvcc, without a GPU: registers, spills, and what ptxas warns of."""

from __future__ import annotations

import pytest

from qdsl.cache import nvcc
from qdsl.codegen.cuda import host, mma, wgmma
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import target

AWQ = Weight("float16", 0, "u4", "float16", 128, False)
MIXED = Weight("bfloat16", 0, "u4", "float16", 128, False)
SYMMETRIC = Weight("bfloat16", 8, None, "float32", None, False)
AWKWARD = Weight("float16", 0, "float32", "float32", 16, False)  # the most bytes of scales and zeros


def plain(acc, m, n, buffers):
    return acc


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc, or its wheels")
@pytest.mark.parametrize(
    ("arch", "weight"),
    [("sm_80", AWQ), ("sm_90a", AWQ), ("sm_90a", SYMMETRIC), ("sm_90a", MIXED)],
    ids=["sm_80", "sm_90a", "symmetric", "mixed"],
)
def test_nothing_spills_and_no_wgmma_waits_for_the_compiler(arch, weight, tmp_path):
    """Run with -s to read the registers. ptxas warns where it waits after every wgmma, which costs half the speed."""
    goal = target("cuda", arch)
    kernels = candidates(goal, weight)
    functions = {c.name: c.lower(c.name, (), plain) for c in kernels}
    source = tmp_path / "kernels.cu"
    source.write_text(host.emit(functions, goal, overlapped=goal.dependent_launch))
    found, losses = host.resources(source, goal)
    assert found.keys() == functions.keys()
    for name, used in found.items():
        print(f"{arch} {name}: {used}")
    assert {name: used.spilled for name, used in found.items() if used.spilled} == {}
    assert losses == []


def test_warpgroup_tiles_fit_and_print():
    names = [tile.name for tile in wgmma.tiles()]
    assert len(set(names)) == len(names)
    for tile in wgmma.tiles():
        assert wgmma.pool_bytes(AWQ, tile) <= wgmma.SHARED, f"{tile} does not even fit the weight it was made for"
        assert wgmma.pool_bytes(AWKWARD, wgmma.fitted(AWKWARD, tile)) <= wgmma.SHARED
    by_name = {tile.name: tile for tile in wgmma.tiles()}
    assert str(by_name["w64_narrow"]) == (
        "w64_narrow: 64 tokens x 64 features, 1x2 warpgroups, 4 stages of 256, 2 CTAs along k"
    )
    assert str(by_name["w256_pairs"]) == (
        "w256_pairs: 256 tokens x 128 features, 2x1 warpgroups, 3 stages of 128, 2 CTAs with the same tokens, persistent"
    )


def test_equal_orders_of_warpgroup_tiles():
    order = {tile.name: wgmma.order(tile) for tile in wgmma.tiles()}
    assert order["w64"] == order["w128"] == order["w256"] == order["w256_pair"] == "wgmma 1 team"
    assert order["w32"] == "wgmma 2 teams by 128"
    assert order["w64_narrow"] == "wgmma 2 CTAs by 256, of 2 teams by 256"


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


def test_codes_are_asked_for_before_the_wait():
    goal = target("cuda", "sm_90a")
    tiles = {tile.name: tile for tile in (*mma.hopper_tiles(), *wgmma.tiles())}
    for name, lower in (("h8_ahead", mma.lower), ("w64_ahead", wgmma.lower), ("h8", mma.lower)):
        options = {"overlapped": True, "shared": wgmma.SHARED} if lower is mma.lower else {}
        text = host.emit({"linear": lower("linear", AWQ, tiles[name], **options)}, goal, overlapped=True)
        kernel = text[text.rindex("__global__") :]
        asked, waited = kernel.find("bulk_prefetch"), kernel.index("griddepcontrol_wait")
        assert (0 < asked < waited) == bool(tiles[name].ahead)


def test_tensor_maps_need_no_driver_library():
    goal = target("cuda", "sm_90a")
    by_name = {tile.name: tile for tile in wgmma.tiles()}
    text = host.emit({"linear": wgmma.lower("linear", AWQ, by_name["w32"])}, goal, overlapped=True)
    assert host.MULTIPROCESSORS not in text
    persistent = host.emit({"linear": wgmma.lower("linear", AWQ, by_name["w256"])}, goal, overlapped=True)
    assert persistent.count(host.MULTIPROCESSORS + "()") >= 3  # defined, declared, called
    assert "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16" in text and "cp.async.bulk.tensor.3d" in text
    assert text.index("#define cuTensorMapEncodeTiled") < text.index("cuTensorMapEncodeTiled(static_cast")
