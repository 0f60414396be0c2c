"""The kernels that a main loop can be compiled to, for one target and weight: what the plan lists and the tables name.

Another kind of kernel is another `Candidate` here; plan, code generation, model and tables take it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from qdsl.codegen.cuda import mma
from qdsl.codegen.cuda.model import Work
from qdsl.codegen.cuda.stage import Stage, fitted, pool_bytes
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import Target


@dataclass(frozen=True)
class Candidate:
    """One kernel.

    lower       (function's name, extra buffers, epilogue) -> the kernel
    work        its tile, as the model of times knows it
    order       names the order in which a row's products are summed (`Stage.order`)
    k_multiple  what k must be a multiple of
    """

    name: str
    lower: Callable[..., tirx.PrimFunc]
    work: Work
    order: str
    k_multiple: int = 1


def candidates(target: Target, weight: Weight) -> tuple[Candidate, ...]:
    """Every kernel for a weight on a target, by rising number of tokens."""
    return tuple(_mma(target, weight, tile) for tile in mma.tiles())


def _mma(target: Target, weight: Weight, tile: mma.Tile) -> Candidate:
    def lower(name: str, extra, epilogue) -> tirx.PrimFunc:
        return mma.lower(name, weight, tile, extra, epilogue, overlapped=target.dependent_launch)

    small = fitted(weight, tile)
    packed = weight.zero in (None, "u4") and weight.scale in (None, weight.compute)
    work = Work(
        tokens=tile.tokens,
        features=tile.features,
        teams=tile.teams,
        slice=64 * small.slice,
        stages=small.stages,
        threads=tile.threads,
        resident=tile.resident,
        shared=pool_bytes(weight, small),
        multiplier="mma",
        decode="sums" if tile.correct == "sums" else "weights" if packed else "floats",
    )
    return Candidate(tile.name, lower, work, Stage(weight, small).order)
