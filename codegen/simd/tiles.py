"""Products by tiles: 16 tokens by 64 bytes of inputs, by as many inputs by 16 features.

Two tiles of weights, a block's features, meet one or two of x. With one or two the weights' tiles are made while those before
them are multiplied; with more tokens, tiles of a whole group are made first, a panel, which all tokens use.

    tiles 0-3   sums: tokens t / 2, features t % 2
    tiles 4, 5  tokens
    tiles 6, 7  features
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import decode, primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.finish import Group, output
from qdsl.codegen.simd.state import HALVES, State, ceil_div, for_features, local, ramp
from qdsl.codegen.tir import f32, i64

AHEAD = 64  # words of a lane that are asked for before they are needed: 8 KiB
CACHE = 3 << 19  # bytes of x that leave room for the rest in a second cache of 2 MiB
TILES = 16  # of a panel, where one group has all inputs
ROW = i64(FEATURES * 4)  # bytes from a token's sums to the next


def few(s: State, block: tirx.Expr, tokens: int) -> None:
    """y for the features of a block, of up to 16 tokens or up to 32."""
    b, k = s.blocked, s.own.sizes["k"]
    entries, m = decode.table(b), s.own.sizes["m"]
    at_once, halves = b.tile_inputs, tokens // LANES
    operands = T.alloc_buffer((2, HALVES, at_once // b.depth, LANES), "int32", scope="global")
    acc = T.alloc_buffer((tokens, FEATURES), "float32", scope="global")
    part = T.alloc_buffer((tokens, FEATURES), s.kind, scope="global")
    ones = local((FEATURES,), s.kind) if s.weighed else None
    with T.serial(i64(0), m) as r:
        for_features(lambda v: store(acc, f32(0), r, v))
    _claim(s, part)
    primitives.call("tiles_open")
    with T.serial(i64(0), s.groups) as g:
        start = g * s.step
        end = T.min(start + s.step, k)
        first = T.floordiv(start, i64(at_once))
        count = ceil_div(end - start, at_once)
        if ones is not None:
            for_features(lambda v: store(ones, tirx.const(0, s.kind), v))
        _zero(halves)
        _make(s, block, first, operands, i64(0), entries)
        with T.serial(i64(1), count) as i:
            _make(s, block, first + i, operands, T.bitwise_and(i, i64(1)), entries)
            before = T.bitwise_and(i - i64(1), i64(1))
            _weigh(s, ones, operands, before, first + i - i64(1))
            _multiply(s, operands, before, first + i - i64(1), i64(0), halves)
        last = T.bitwise_and(count - i64(1), i64(1))
        _weigh(s, ones, operands, last, first + count - i64(1))
        _multiply(s, operands, last, first + count - i64(1), i64(0), halves)
        _move("store", part, i64(0), halves)
        group = Group(s, block, start, end, (lambda v: ones[v]) if s.weighed else None)
        with T.serial(i64(0), m) as r:
            group.promote(r, g, lambda v: part[r, v], acc, r)
    primitives.call("tiles_close")
    with T.serial(i64(0), m) as r:
        output(s, r, block, lambda v: acc[r, v])


def chunks(s: State) -> tuple[tirx.Expr, tirx.Expr]:
    """(parts of the tokens whose x stays in a core's second cache while block after block uses it, pairs of tiles in one)."""
    pairs = T.floordiv(s.tokens, i64(2 * LANES))
    of_pair = s.padded * i64(2 * LANES * s.blocked.planes * 4 // s.blocked.depth)
    count = ceil_div(pairs, T.max(i64(1), T.floordiv(i64(CACHE), of_pair)))
    return count, ceil_div(pairs, count)


def many(s: State, block: tirx.Expr, first_pair: tirx.Expr, pairs: tirx.Expr, most: tirx.Expr) -> None:
    """y for the features of a block, of some pairs of tiles of tokens; `most` at the most."""
    b, k = s.blocked, s.own.sizes["k"]
    entries = decode.table(b)
    at_once, square = b.tile_inputs, i64(2 * LANES)
    whole = b.step is None  # a group is several panels: its sums are kept between them
    tiles = TILES if whole else b.step // at_once
    operands = T.alloc_buffer((i64(tiles), i64(HALVES), i64(at_once // b.depth), i64(LANES)), "int32", scope="global")
    acc = T.alloc_buffer((most * square, i64(FEATURES)), "float32", scope="global")
    part = T.alloc_buffer((most * square if whole else square, i64(FEATURES)), s.kind, scope="global")
    ones = local((FEATURES,), s.kind) if s.weighed else None
    zero, token = tirx.const(0, s.kind), first_pair * square
    rows = T.min(pairs * square, s.own.sizes["m"] - token)
    with T.serial(i64(0), pairs * square) as r:
        for_features(lambda v: store(acc, f32(0), r, v))
        if whole:
            for_features(lambda v: store(part, zero, r, v))
    if not whole:
        _claim(s, part)
    if ones is not None:
        for_features(lambda v: store(ones, zero, v))
    primitives.call("tiles_open")
    with T.serial(i64(0), ceil_div(k, tiles * at_once)) as g:
        start = g * i64(tiles * at_once)
        end = T.min(start + i64(tiles * at_once), k)
        first, count = g * i64(tiles), ceil_div(end - start, at_once)
        if ones is not None and not whole:
            for_features(lambda v: store(ones, zero, v))
        with T.serial(i64(0), count) as i:
            _make(s, block, first + i, operands, i, entries)
            _weigh(s, ones, operands, i, first + i)
        group = None if whole else Group(s, block, start, end, (lambda v: ones[v]) if s.weighed else None)
        with T.serial(i64(0), pairs) as p:
            row = p * square
            if whole:
                _move("load", part, row, 2)
            else:
                _zero(2)
            with T.serial(i64(0), count) as i:
                _multiply(s, operands, i, first + i, first_pair + p, 2)
            _move("store", part, row if whole else i64(0), 2)
            if group is not None:
                with T.serial(i64(0), square) as r:
                    group.promote(token + row + r, g, lambda v: part[r, v], acc, row + r)
    primitives.call("tiles_close")
    if whole:
        group = Group(s, block, i64(0), k, (lambda v: ones[v]) if s.weighed else None)
        with T.serial(i64(0), rows) as r:
            group.promote(token + r, i64(0), lambda v: part[r, v], acc, r)
    with T.serial(i64(0), rows) as r:
        output(s, token + r, block, lambda v: acc[r, v])


def _make(s: State, block, tile, operands, to, entries) -> None:
    """The two tiles of weights of 64 bytes' inputs; those beyond the last are zeros."""
    b = s.blocked
    weights, per_word = s.own.buffers[b.code], b.inputs // b.depth
    words = b.tile_inputs // b.inputs
    first, end = tile * i64(words), ceil_div(s.own.sizes["k"], b.inputs)

    def word(w: tirx.Expr, row: tirx.Expr) -> None:
        for u in range(HALVES):
            primitives.prefetch(T.address_of(weights[block, w + i64(AHEAD), i64(u * LANES)]))
            held = weights[block, w, ramp(u * LANES)]
            for q, v in enumerate(decode.operands(b, s.plan.scheme.code.dtype, held, entries)):
                store(operands, v, to, i64(u), row + i64(q), ramp(0))

    with T.If(first + i64(words) <= end):
        with T.Then():
            for w in range(words):
                word(first + i64(w), i64(w * per_word))
        with T.Else(), T.serial(i64(0), i64(words)) as w:
            with T.If(first + w < end):
                with T.Then():
                    word(first + w, w * i64(per_word))
                with T.Else():
                    for u in range(HALVES):
                        for q in range(per_word):
                            zero = primitives.splat(tirx.const(0, "int32"))
                            store(operands, zero, to, i64(u), w * i64(per_word) + i64(q), ramp(0))


def _weigh(s: State, ones, operands, at, tile) -> None:
    """The sums of a tile's operands."""
    if ones is None:
        return
    b = s.blocked
    with T.serial(i64(0), i64(b.tile_inputs // b.depth)) as i:
        for u in range(HALVES):
            one = s.one(tile * i64(b.tile_inputs) + i * i64(b.depth))
            held = primitives.dot(ones[ramp(u * LANES)], operands[at, i64(u), i, ramp(0)], one)
            store(ones, held, ramp(u * LANES))


def _claim(s: State, part: tirx.Buffer) -> None:
    """TVM keeps of a buffer what it sees used, and does not see what tiles store: so the last element is, too."""
    rows, width = part.shape
    store(part, tirx.const(0, s.kind), rows - i64(1), width - i64(1))


def _zero(halves: int) -> None:
    for t in range(2 * halves):
        primitives.call(f"tile_zero_{t}")


def _move(what: str, part: tirx.Buffer, row: tirx.Expr, halves: int) -> None:
    """Sums to memory or from there."""
    for t in range(2 * halves):
        place = T.address_of(part[row + i64(t // 2 * LANES), i64(t % 2 * LANES)])
        primitives.call(f"tile_{what}_{t}", place, ROW)


def _multiply(s: State, operands, at, tile, pair, halves: int) -> None:
    """sums += the products of one or both tiles of a pair of tokens' with two of weights."""
    b = s.blocked
    for u in range(HALVES):
        primitives.call(f"tile_load_{6 + u}", T.address_of(operands[at, i64(u), i64(0), i64(0)]), i64(LANES * 4))
    for plane in range(b.planes):
        for half in range(halves):
            place = T.address_of(s.x[pair, tile, i64(plane), i64(half), i64(0), i64(0)])
            primitives.call(f"tile_load_{4 + half}", place, i64(b.tile_inputs * 4 // b.depth))
        for t in range(2 * halves):
            primitives.call(f"tile_product_{t}")
