"""The kernels that a main loop can be compiled to, for one target and weight: what the plan lists and the tables name.

Another kind of kernel is another `Candidate` here; plan, code generation, model and tables take it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from qdsl.codegen.cuda import hopper, mma, mma_bytes, stage, warp, wgmma
from qdsl.codegen.cuda.byte_weight import ByteWeight
from qdsl.codegen.cuda.model import Work
from qdsl.codegen.cuda.reduce import SUM
from qdsl.codegen.cuda.stage import SHARED, Stage
from qdsl.codegen.cuda.tile import Tile
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import Target


@dataclass(frozen=True)
class Candidate:
    """One kernel.

    lower       (function's name, extra buffers, epilogue, parts of the features) -> the kernel; of sums alone by default
    work        its tile, as the model of times knows it
    order       names the order in which a row's products are summed (`Stage.order`); None: it changes with m
    k_multiple  what k must be a multiple of
    """

    name: str
    lower: Callable[..., tirx.PrimFunc]
    work: Work
    order: str | None
    k_multiple: int = 1


def candidates(target: Target, weight: Weight) -> tuple[Candidate, ...]:
    """Every kernel for a weight on a target, by rising number of tokens; without those whose stages have no room."""
    assert not weight.problem, weight.problem
    found: list[Candidate | None]
    if isinstance(weight, ByteWeight) and weight.matrices:
        found = [_hopper(weight, tile) for tile in wgmma.byte_tiles(weight)]
    elif isinstance(weight, ByteWeight):
        found = [_mma(target, weight, tile, SHARED) for tile in mma_bytes.tiles(weight)]
    elif target.arch != "sm_90a":
        found = [_mma(target, weight, tile, SHARED) for tile in mma.tiles()]
    else:
        *few, most = (_mma(target, weight, tile, hopper.SHARED) for tile in mma.hopper_tiles())
        found = [*few, *(_hopper(weight, tile) for tile in (*warp.tiles(), *wgmma.tiles())), most]
    return tuple(kernel for kernel in found if kernel is not None)


def _mma(target: Target, weight: Weight, tile: Tile, shared: int) -> Candidate | None:
    def lower(name: str, extra=(), epilogue=SUM, parts: int = 1) -> tirx.PrimFunc:
        overlapped = target.dependent_launch
        return mma.lower(name, weight, tile, extra, epilogue, overlapped=overlapped, shared=shared, parts=parts)

    small = stage.fitted(weight, tile, shared)
    if small is None:
        return None
    work = Work(
        tokens=tile.tokens,
        features=tile.features,
        teams=tile.teams,
        slice=64 * weight.unit * small.slice,
        stages=small.stages,
        threads=tile.threads,
        resident=tile.resident,
        shared=stage.pool_bytes(weight, small),
        multiplier="mma",
        fed="cp.async",
        decode="sums" if tile.correct == "sums" else _decode(weight),
        split=tile.cluster,
        overlapped=target.dependent_launch,
    )
    return Candidate(tile.name, lower, work, Stage(weight, small).order, 1 if weight.unit == 1 else 8 * weight.unit)


def _hopper(weight: Weight, tile: warp.WarpTile | wgmma.WarpgroupTile) -> Candidate | None:
    def lower(name: str, extra=(), epilogue=SUM, parts: int = 1) -> tirx.PrimFunc:
        return hopper.lower(name, weight, tile, extra, epilogue, parts)

    small, few = hopper.fitted(weight, tile), isinstance(tile, warp.WarpTile)
    if small is None:
        return None
    work = Work(
        tokens=tile.tokens,
        features=tile.features,
        teams=tile.teams,
        slice=64 * weight.unit * small.slice,
        stages=small.stages // small.teams,
        threads=tile.threads,
        resident=tile.resident,
        shared=hopper.pool_bytes(weight, small),
        multiplier="mma" if few else "wgmma",
        fed="TMA",
        decode="sums" if few else _decode(weight),
        split=tile.split,
        tail=tile.tail,
        overlapped=not few or tile.resident > 1,  # few tokens: if a CTA finds room beside one of the predecessor
    )
    return Candidate(tile.name, lower, work, hopper.order(weight, small), k_multiple=8 * weight.unit)


def _decode(weight: Weight | ByteWeight) -> str:
    return {"floats": "floats", "bytes": "bytes"}.get(weight.arithmetic, "weights")
