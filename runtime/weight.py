"""The exact weight behind a layer's buffers: kernel layout -> bit patterns -> float64; and bit patterns out of floats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from qdsl import reference
from qdsl.diagnostic import Error
from qdsl.manifest import Buffer
from qdsl.reference import bands, decode_weight, in_band
from qdsl.runtime import repack
from qdsl.runtime.buffer import inputs_of, unpacked
from qdsl.scheme import Scheme

_ELEMENTS = 1 << 22  # decoded at a time: a few temporaries of 8 bytes each


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
    for rows in bands(scheme, n, k, _ELEMENTS):
        result[rows] = decode_weight(scheme, _band(scheme, given, rows), rows.stop - rows.start, k)
    return result


def rounded(scheme: Scheme, given: Mapping[str, np.ndarray], n: int, k: int, kind) -> np.ndarray:
    """Bit patterns of the weight [n, k] in the format `kind`, rounded once from the exact value."""
    result = np.empty((n, k), kind.storage)
    for rows in bands(scheme, n, k, _ELEMENTS):
        result[rows] = kind.encode(decode_weight(scheme, _band(scheme, given, rows), rows.stop - rows.start, k))
    return result


def _band(scheme: Scheme, given: Mapping[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    return {t.name: given[t.name][in_band(t, rows)] for t in scheme.weight.loaded}


def quantized(scheme: Scheme, floats: torch.Tensor) -> dict[str, np.ndarray]:
    """Bit patterns of every weight tensor, from a float weight [n, k] of any torch type, by the scheme's `quantize` block.

    Raises Error where a number is not finite, or a scale beyond its type.
    """
    if floats.numel() and not all(end.isfinite() for end in torch.aminmax(floats)):  # NaN is both ends
        at = (~torch.isfinite(floats)).nonzero()[0].tolist()
        raise Error(f"the weight is {floats[tuple(at)].item()} at {at}; only finite numbers can be quantized")
    stored = repack.format_of(floats.dtype)  # none of float64
    found = reference.quantize(scheme, repack.bits_of(floats) if stored else floats.cpu().numpy(), stored=stored)
    for name, patterns in found.items():
        kind = scheme.tensor(name).dtype
        if kind.is_float and scheme.tensor(name).role != "code":
            wrong = ~np.isfinite(kind.decode(patterns))
            if wrong.any():
                at = np.argwhere(wrong)[0].tolist()
                raise Error(
                    f"{scheme.bound}: `{name}` at {at} is beyond {kind}; it needs a wider type, or smaller weights"
                )
    return found
