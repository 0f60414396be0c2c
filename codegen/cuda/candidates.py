"""The kernels that a main loop can be compiled to, for one target and weight: what the plan lists and the tables name.

Another kind of kernel is another `Candidate` here; plan, code generation, model and tables take it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from qdsl.codegen.cuda import mma
from qdsl.codegen.cuda.stage import Stage, fitted
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.target import Target


@dataclass(frozen=True)
class Candidate:
    """One kernel.

    lower       (function's name, extra buffers, epilogue) -> the kernel
    order       names the order in which a row's products are summed (`Stage.order`)
    k_multiple  what k must be a multiple of
    """

    name: str
    lower: Callable[..., tirx.PrimFunc]
    order: str
    k_multiple: int = 1


def candidates(target: Target, weight: Weight) -> tuple[Candidate, ...]:
    """Every kernel for a weight on a target, by rising number of tokens."""
    return tuple(
        Candidate(tile.name, partial(_lower_mma, weight, tile), Stage(weight, fitted(weight, tile)).order)
        for tile in mma.tiles()
    )


def _lower_mma(weight: Weight, tile: mma.Tile, name: str, extra, epilogue) -> tirx.PrimFunc:
    return mma.lower(name, weight, tile, extra, epilogue)
