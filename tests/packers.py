"""Published packing rules, re-implemented one element at a time: what `qdsl.layout` is tested against.

Nothing here uses qdsl.  Every function takes logical elements as unsigned integers, [n, k] unless it says otherwise,
and returns the stored words as uint64 values.
"""

from __future__ import annotations

import numpy as np


def autoawq_gemm(q: np.ndarray) -> np.ndarray:
    """[k, n / 8] int32 words of 4-bit codes; nibble i of a word holds column order[i]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    n, k = q.shape
    out = np.zeros((k, n // 8), np.uint64)
    for row in range(k):
        for word in range(n // 8):
            for i in range(8):
                out[row, word] |= np.uint64(int(q[8 * word + order[i], row]) << (4 * i))
    return out


def modelslim_row_pairs(q: np.ndarray) -> np.ndarray:
    """[n / 2, k] bytes of 4-bit codes: row 2 r in the low half of byte row r, row 2 r + 1 in the high half."""
    n, k = q.shape
    out = np.zeros((n // 2, k), np.uint64)
    for row in range(n):
        for column in range(k):
            out[row // 2, column] |= np.uint64(int(q[row, column]) << (4 * (row % 2)))
    return out


def modelslim_scale_in_i64(s: np.ndarray) -> np.ndarray:
    """[n] int64 words: the bits of an f32 each, as the NPU's operator wants the scale of an f16 model."""
    return np.array([int(np.float32(value).view(np.uint32)) for value in s], np.uint64)


def autogptq(q: np.ndarray, bits: int) -> np.ndarray:
    """[k * bits / 32, n] int32 words: AutoGPTQ's loop, whose 3-bit codes 10 and 21 straddle two words."""
    n, k = q.shape
    codes = q.T.astype(np.uint64)
    out = np.zeros((k * bits // 32, n), np.uint64)
    u = np.uint64
    if bits in (2, 4, 8):
        per_word = 32 // bits
        for row in range(len(out)):
            for j in range(per_word):
                out[row] |= codes[row * per_word + j] << u(bits * j)
        return out
    assert bits == 3, "AutoGPTQ packs 2, 3, 4 and 8 bits"
    for block in range(k // 32):
        v, row = codes[32 * block : 32 * block + 32], 3 * block
        for j in range(10):
            out[row] |= v[j] << u(3 * j)
        out[row] |= (v[10] & u(3)) << u(30)
        out[row + 1] |= v[10] >> u(2)
        for j in range(10):
            out[row + 1] |= v[11 + j] << u(3 * j + 1)
        out[row + 1] |= (v[21] & u(1)) << u(31)
        out[row + 2] |= v[21] >> u(1)
        for j in range(10):
            out[row + 2] |= v[22 + j] << u(3 * j + 2)
    return out


PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def gptq_planar(q: np.ndarray, bits: int) -> np.ndarray:
    """[k * bits / 32, n] int32 words: blocks of 32 codes, each split in bit planes, the low plane's words first."""
    n, k = q.shape
    out = np.zeros((k * bits // 32, n), np.uint64)
    for column in range(n):
        for block in range(k // 32):
            row, low = block * bits, 0
            for width in PLANES[bits]:
                for j in range(32):
                    part = (int(q[column, 32 * block + j]) >> low) & ((1 << width) - 1)
                    out[row + j * width // 32, column] |= np.uint64(part << (j * width % 32))
                row, low = row + width, low + width
    return out


def compressed_tensors_dense(q: np.ndarray, bits: int) -> np.ndarray:
    """[n, ceil(k * bits / 32)] int32 words: one stream of bits, lowest first (compressed-tensors from 0.12)."""
    n, k = q.shape
    out = np.zeros((n, -(-k * bits // 32)), np.uint64)
    for row in range(n):
        for j in range(k):
            for b in range(bits):
                at = j * bits + b
                out[row, at // 32] |= np.uint64((int(q[row, j]) >> b & 1) << (at % 32))
    return out


def compressed_tensors_padded(q: np.ndarray, bits: int) -> np.ndarray:
    """[n, ceil(k / (32 // bits))] int32 words: whole codes only, the top bits of a word unused (up to 0.11)."""
    n, k = q.shape
    per_word = 32 // bits
    out = np.zeros((n, -(-k // per_word)), np.uint64)
    for row in range(n):
        for j in range(k):
            out[row, j // per_word] |= np.uint64(int(q[row, j]) << (bits * (j % per_word)))
    return out


def bitsandbytes_nf4(q: np.ndarray) -> np.ndarray:
    """[n * k / 2, 1] bytes: row-major pairs, the first of a pair in the high nibble."""
    flat = q.reshape(-1)
    out = np.zeros((len(flat) // 2, 1), np.uint64)
    for i in range(len(out)):
        out[i, 0] = int(flat[2 * i]) << 4 | int(flat[2 * i + 1])
    return out


def gguf_q4_0(q: np.ndarray) -> np.ndarray:
    """[n, k / 32, 16] bytes: byte j of a block holds element j below element j + 16."""
    n, k = q.shape
    out = np.zeros((n, k // 32, 16), np.uint64)
    for row in range(n):
        for block in range(k // 32):
            for j in range(16):
                out[row, block, j] = int(q[row, 32 * block + j]) | int(q[row, 32 * block + 16 + j]) << 4
    return out


def low_nibble_first(q: np.ndarray) -> np.ndarray:
    """[n, k / 2] bytes: even k in the low nibble (NVFP4, MXFP4)."""
    n, k = q.shape
    out = np.zeros((n, k // 2), np.uint64)
    for row in range(n):
        for j in range(k):
            out[row, j // 2] |= np.uint64(int(q[row, j]) << (4 * (j % 2)))
    return out


def marlin_weight(q: np.ndarray) -> np.ndarray:
    """[k / 16, n / 16 * 32] int32 words: Marlin's permutation of 16 x 64 tiles for m16n8k16 fragments."""
    perm: list[int] = []
    for i in range(32):
        column = i // 4
        one = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                one.append(16 * row + column + 8 * block)
        for j in range(4):
            perm += [p + 256 * j for p in one]
    interleave = (0, 2, 4, 6, 1, 3, 5, 7)
    perm = [perm[8 * i + interleave[j]] for i in range(len(perm) // 8) for j in range(8)]
    n, k = q.shape
    out = np.zeros((k // 16, n * 16 // 8), np.uint64)
    for strip in range(k // 16):
        # Sixteen rows of k, cut into 16 x 16 tiles along n, each tile row-major.
        tiles = [q[16 * t + c, 16 * strip + r] for t in range(n // 16) for r in range(16) for c in range(16)]
        shuffled = [tiles[1024 * chunk + p] for chunk in range(len(tiles) // 1024) for p in perm]
        for i, code in enumerate(shuffled):
            out[strip, i // 8] |= np.uint64(int(code) << (4 * (i % 8)))
    return out


def marlin_grouped_scale(s: np.ndarray) -> np.ndarray:
    """[g, n] from s[n, g]: within 64 columns, an 8 x 8 transposition."""
    perm = [i + 8 * j for i in range(8) for j in range(8)]
    n, groups = s.shape
    out = np.zeros((groups, n), np.uint64)
    for g in range(groups):
        for column in range(n):
            out[g, column] = s[column // 64 * 64 + perm[column % 64], g]
    return out


def marlin_channel_scale(s: np.ndarray) -> np.ndarray:
    """[n] from s[n]: within 32 columns, the pairs a thread's accumulators need."""
    perm = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return np.array([s[column // 32 * 32 + perm[column % 32]] for column in range(len(s))], np.uint64)


def block_scale_swizzle(s: np.ndarray) -> np.ndarray:
    """[rows * columns] from s[row, column]: tiles of 128 x 4 scales stored as 32 x 16 bytes (cuBLAS, tcgen05)."""
    rows, columns = s.shape
    out = np.zeros(rows * columns, np.uint64)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = s[r, c]
    return out


def wgmma_weight(q: np.ndarray) -> np.ndarray:
    """[n / 64, k / 64, warp, lane, step] words: what a lane loads for wgmma with the weight as register operand A.

    Register r of a k-step holds rows c + 8 * (r % 2) and columns 2t + 8 * (r // 2) of the lane (c t); element e of the
    register is nibble r + 4e of the word, so that the two elements are 16 bits apart.
    """
    n, k = q.shape
    out = np.zeros((n // 64, k // 64, 4, 32, 4), np.uint64)
    for tile in range(n // 64):
        for block in range(k // 64):
            for warp in range(4):
                for lane in range(32):
                    for step in range(4):
                        for r in range(4):
                            for e in range(2):
                                row = 64 * tile + 16 * warp + lane // 4 + 8 * (r % 2)
                                column = 64 * block + 16 * step + 8 * (r // 2) + 2 * (lane % 4) + e
                                out[tile, block, warp, lane, step] |= np.uint64(int(q[row, column]) << (4 * r + 16 * e))
    return out
