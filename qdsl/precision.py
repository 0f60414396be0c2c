"""What kernels keep of numbers beyond what a scheme's types say: the reference's bound is by that much wider."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """How exact some kernels are; by default as exact as the types that are declared.

    offset  what a bit trick leaves in each code until its group is corrected
    kept    bits below its largest term that the multiplier keeps of a sum; None: a float32, or all
    x_bits  bits below the largest of a token that are kept of x; None: all
    """

    offset: float = 0.0
    kept: int | None = None
    x_bits: int | None = None

    @staticmethod
    def least(each: Iterable[Precision]) -> Precision:
        """That which all of several kernels have."""
        every = tuple(each)
        return Precision(
            max(own.offset for own in every),
            min((own.kept for own in every if own.kept is not None), default=None),
            min((own.x_bits for own in every if own.x_bits is not None), default=None),
        )


DECLARED = Precision()
