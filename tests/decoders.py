"""Decoders of published checkpoint formats in plain loops, independent of qdsl's layouts.

Each returns the weight [n, k] in float64, exactly as the format defines it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# AWQ "gemm": nibble i of a word, counted from the lowest, holds column AWQ_COLUMNS[i] of the word's eight.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(tensors: Mapping[str, np.ndarray], prefix: str) -> np.ndarray:
    """w = (q - z) * s; qweight is [k, n / 8], qzeros [groups, n / 8], scales [groups, n]."""
    q = _awq_codes(tensors[prefix + "qweight"])
    z = _awq_codes(tensors[prefix + "qzeros"])
    s = tensors[prefix + "scales"].astype(np.float64)
    group = q.shape[0] // s.shape[0]
    w = np.empty((q.shape[1], q.shape[0]), np.float64)
    for k in range(q.shape[0]):
        w[:, k] = (q[k] - z[k // group]) * s[k // group]
    return w


def _awq_codes(words: np.ndarray) -> np.ndarray:
    codes = np.zeros((words.shape[0], 8 * words.shape[1]), np.int64)
    for row in range(words.shape[0]):
        for at in range(words.shape[1]):
            word = int(words[row, at]) & 0xFFFFFFFF
            for nibble, column in enumerate(AWQ_COLUMNS):
                codes[row, 8 * at + column] = (word >> (4 * nibble)) & 15
    return codes
