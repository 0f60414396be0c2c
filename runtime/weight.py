"""The exact weight behind a layer's buffers: kernel layout -> bit patterns -> float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from qdsl.manifest import Buffer
from qdsl.reference import decode_weight
from qdsl.runtime.buffer import inputs_of, unpacked
from qdsl.scheme import Group, Scheme, Var

_ROWS = 1 << 22  # elements decoded at a time: a few temporaries of 8 bytes each


def patterns(
    scheme: Scheme, buffers: Mapping[str, torch.Tensor], layouts: Mapping[str, Buffer], n: int, k: int
) -> dict[str, np.ndarray]:
    """Logical bit patterns of every weight tensor, out of its buffer."""
    sizes, held = {"e": 1, "m": 1, "n": n, "k": k}, scheme.weight.loaded
    inputs = inputs_of(scheme, {t.name: (layouts[t.name], buffers[t.name]) for t in held}, k)
    return {t.name: unpacked(layouts[t.name], t, buffers[t.name], t.shape(sizes, scheme), inputs) for t in held}


def decoded(scheme: Scheme, given: Mapping[str, np.ndarray], n: int, k: int) -> np.ndarray:
    """The weight [n, k] in float64, without rounding."""
    result = np.empty((n, k))
    for rows in _bands(scheme, n, k):
        result[rows] = decode_weight(scheme, _band(scheme, given, rows), rows.stop - rows.start, k)
    return result


def rounded(scheme: Scheme, given: Mapping[str, np.ndarray], n: int, k: int, kind) -> np.ndarray:
    """Bit patterns of the weight [n, k] in the format `kind`, rounded once from the exact value."""
    result = np.empty((n, k), kind.storage)
    for rows in _bands(scheme, n, k):
        result[rows] = kind.encode(decode_weight(scheme, _band(scheme, given, rows), rows.stop - rows.start, k))
    return result


def _bands(scheme: Scheme, n: int, k: int) -> Iterator[slice]:
    """Runs of rows that no group of rows crosses."""
    groups = [i.size or n for t in scheme.weight.loaded for i in t.index if isinstance(i, Group) and i.axis == "n"]
    unit = math.lcm(*groups) if groups else 1
    step = max(unit, _ROWS // max(k, 1) // unit * unit)
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def _band(scheme: Scheme, given: Mapping[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    part = {}
    for t in scheme.weight.loaded:
        cut = []
        for i in t.index:
            if i == Var("n"):
                cut.append(rows)
            elif isinstance(i, Group) and i.axis == "n" and i.size is not None:
                cut.append(slice(rows.start // i.size, -(-rows.stop // i.size)))
            else:
                cut.append(slice(None))
        part[t.name] = given[t.name][tuple(cut)]
    return part
