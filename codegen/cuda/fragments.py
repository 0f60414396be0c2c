"""Registers of mma.m16n8k16: codes and tokens out of a stage, codes as 16-bit floats, the instruction.

Output features are the 16-row side (A) of mma.m16n8k16, tokens its 8-column side (B):

             k: 2t 2t+1   8+2t 8+2t+1            token: 2t   2t+1
    feature c   [ reg 0 ]  [ reg 2 ]                  [ d0 ] [ d1 ]     lane = 4 c + t
    feature c+8 [ reg 1 ]  [ reg 3 ]                  [ d2 ] [ d3 ]     c = 0..7, t = 0..3

The codes are stored as these registers, so a lane's codes for 16 features by 64 of k are one 16-byte load:

    q[o, i, lane = 4 c + t, s] holds feature 16 o + 8 r + c, input 64 i + 16 s + 8 h + 2 t + p
                               in nibble 4 p + 2 h + r:    bit 28  24  20  16  12   8   4   0
                                                             p  1   1   1   1   0   0   0   0
                                                      register  3   2   1   0   3   2   1   0

and one mask takes both 16-bit halves of a register out of a word. That is for codes of 4 bits; `decode` has the others.
Scales are [o, k // group, c, r]; zeros
likewise, or as nibbles r of the bytes [o, k // group, c].
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import ptx
from qdsl.codegen.cuda.decode import words_of
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.weight import Weight


def load_codes(k: Kernel, view, slot, i):
    """The lane's words of k tile i, for every feature tile (`decode.words_of`)."""
    return [load_block(k, view, slot, f, i) for f in range(k.tile.feature_tiles)]


def load_block(k: Kernel, view, slot, f: int, i) -> list:
    """Those for feature tile f."""
    lanes, count = words_of(k.weight.unit_bits)
    width = next(w for w in (4, 2, 1) if count % w == 0)
    load = f"ld.shared.v{width}.b32" if width > 1 else "ld.shared.b32"
    registers = T.alloc_local([lanes // 32 * count], "uint32")
    words = [registers[j] for j in range(lanes // 32 * count)]
    for lot in range(lanes // 32):
        for j in range(0, count, width):
            lane = k.lane + 32 * lot if lot else k.lane
            ptx(load, *words[lot * count + j :][:width], view.ptr(slot, k.block(f), i, lane, j))
    return words


def load_tokens(k: Kernel, view, slot, first, s: int, loaded):
    """The B fragments of time s after k tile `first`: a pair of registers per token tile.

    An ldmatrix.x4 reads four 8 x 8 matrices, lane l naming row l % 8 of matrix l // 8: both k halves of two
    token tiles or, if there is one token tile, of two times. Fewer than 8 tokens are repeated to fill one.
    """
    pairs = []
    if k.tile.token_tiles == 1 and s % 2:
        return loaded[s - 1][1:]
    for j in range(0, k.tile.token_tiles, 2):
        b = T.alloc_local([4], "uint32")
        address = view.ptr(slot, *token_place(k, first, s, j))
        ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(b[i] for i in range(4)), address)
        pairs += [(b[0], b[1]), (b[2], b[3])]
    return pairs


def token_place(k: Kernel, first, s: int, j: int):
    """The lane's place in x for that ldmatrix, from token tile j on."""
    tile, lane = k.tile, k.lane
    if tile.token_tiles == 1:
        row, piece = lane % min(8, tile.tokens), lane // 8
    else:
        row, piece = lane // 16 * 8 + lane % 8, lane // 8 % 2
    swizzled = piece ^ (row % 8) ^ (2 * s % 8)  # where FillTokens puts piece + 2 s, modulo 8
    return tile.x_index(first + s // 4, k.token_warp * (8 * tile.token_tiles) + 8 * j + row, swizzled * 8)


def mma(weight: Weight, d, first: int, a, b, start: bool):
    """d[first : first + 4] += a b; with `start`, = a b."""
    half = weight.half.ptx
    out = [d[first + i] for i in range(4)]
    c = [T.float32(0)] * 4 if start else out
    ptx(f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32", *out, *a, *b, *c)
