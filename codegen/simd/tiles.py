"""Products by tiles: 16 tokens by 64 bytes of inputs, by as many inputs by 16 features.

Two tiles of weights, a block's features, meet one or two of x.  With one, the weights' tiles are made while those before them
are multiplied; with more tokens, many are made first, a panel, which all tokens use.

    tiles 0-3   sums: tokens t / 2, features t % 2
    tiles 4, 5  tokens
    tiles 6, 7  features

Where the sums of x's planes are kept apart, two tiles of tokens are two planes of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.simd import decode, primitives
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.finish import Group, Of, output
from qdsl.codegen.simd.state import HALVES, State, ceil_div, div, for_features, local, mod, ramp
from qdsl.codegen.tir import f32, i64, u32

EARLIER, SLOTS = 2, 4  # steps that weights are made before they are multiplied, and room for them
AHEAD = 64  # words of a lane that are asked for before they are needed: 8 KiB
TILES = 8  # of a panel, where groups do not end it
PAIRS, BLOCKS = 16, 16  # of a piece of work at most: 512 tokens by 512 features, 1 MiB of sums
TILE, NEAR = 1 << 10, 1 << 20  # bytes of a tile, and those that stay in a core's second cache
SIGNS = 0x80808080  # of the bytes of a lane
ROW = i64(FEATURES * 4)  # bytes from a token's sums to the next

Actions = Sequence[Callable[[], None]]  # each writes an instruction


def few(s: State, block: tirx.Expr, stacked: bool) -> None:
    """y for the features of a block, of up to 16 tokens.

    Tiles of weights are made two steps before they are multiplied: what has been stored just now can't be loaded yet, and all
    that follows would wait.  Likewise groups take turns with the tiles of sums, whose products take long: those of a group are
    stored while the next one's are multiplied, and scaled after that.

    stacked   whether a tile has all planes of its tokens, one after the other: with fewer rows, a product takes less time
    """
    b, k, m = s.blocked, s.own.sizes["k"], s.own.sizes["m"]
    entries, at_once = decode.table(b), b.tile_inputs
    operands = T.alloc_buffer((SLOTS, HALVES, at_once // b.depth, LANES), "int32", scope="global")
    acc = T.alloc_buffer((LANES, FEATURES), "float32", scope="global")
    halves = b.apart if not stacked else 1  # tiles of tokens
    part = T.alloc_buffer((halves * LANES, FEATURES), s.kind, scope="global")
    turns = 2 // halves
    ones = [local((FEATURES,), s.kind) for _ in range(turns)] if s.weighed else None
    last = T.bind(ceil_div(k, at_once))
    each = b.step // at_once if b.step else None
    planes, apart = (b.planes, m) if stacked else (b.apart, i64(LANES))  # of sums, and the rows between them
    with T.serial(i64(0), m) as r:
        for_features(lambda v: store(acc, f32(0), r, v))
    _claim(s, part)
    primitives.call("tiles_open", m * i64(planes if stacked else 1))

    def make(tile: tirx.Expr, meanwhile: Actions = ()) -> None:
        less = _less(s, block, tile * i64(at_once))
        _make(s, block, tile, operands, tile & i64(SLOTS - 1), entries, less=less, ask=True, meanwhile=meanwhile)

    def step(tile: tirx.Expr, turn: int) -> None:
        at, soon = tile & i64(SLOTS - 1), tile + i64(AHEAD * b.inputs // at_once - 1) if b.direct else None
        if ones is not None:
            _weigh(s, ones[turn], operands, at, tile)
        products = _products(s, block, operands, at, tile, _few_rows(s, tile, turn, stacked), soon)
        if b.direct:
            _in_turn(products)
            return
        with T.If(tile + i64(EARLIER) < last):
            with T.Then():
                make(tile + i64(EARLIER), products)
            with T.Else():
                _in_turn(products)

    def stored(turn: int) -> None:
        _move("store", part, halves, i64(0), first=2 * turn)

    def promote(g: tirx.Expr, turn: int) -> None:
        start = g * s.step
        end = T.bind(T.min(start + s.step, k))
        group = Group(s, block, start, end, (lambda v: ones[turn][v]) if ones is not None else None)
        with T.serial(i64(0), m) as r:
            group.promote(r, g, _sums(s, part, r, planes=planes, apart=apart), acc, r)

    def group(g: tirx.Expr, turn: int) -> None:
        first = T.bind(g * i64(each)) if each else i64(0)
        end = T.bind(T.min(first + i64(each), last)) if each else last
        if ones is not None:
            for_features(lambda v: store(ones[turn], tirx.const(0, s.kind), v))
        _zero(halves, first=2 * turn)
        step(first, turn)
        before = (turn + 1) % turns
        if turns > 1 and each:
            with T.If(g > i64(0)), T.Then():
                stored(before)
        with T.serial(first + i64(1), end) as tile:
            step(tile, turn)
        if turns > 1 and each:
            with T.If(g > i64(0)), T.Then():
                promote(g - i64(1), before)
        else:
            stored(turn)
            promote(g, turn)

    if not b.direct:
        for tile in range(EARLIER):
            with T.If(i64(tile) < last), T.Then():
                make(i64(tile))
    if each is None:
        group(i64(0), 0)
    elif turns == 1:
        with T.serial(i64(0), s.groups) as g:
            group(g, 0)
    else:
        with T.serial(i64(0), ceil_div(s.groups, 2)) as pair:
            group(pair * i64(2), 0)
            with T.If(pair * i64(2) + i64(1) < s.groups), T.Then():
                group(pair * i64(2) + i64(1), 1)
        for turn in range(2):
            with T.If(s.groups & i64(1) == i64(1 - turn)), T.Then():
                stored(turn)
                promote(s.groups - i64(1), turn)
    primitives.call("tiles_close")
    with T.serial(i64(0), m) as r:
        output(s, r, block, lambda v: acc[r, v])


@dataclass(frozen=True)
class Work:
    """How many tokens' worth of `many` is cut up: pieces of `pairs` pairs of tiles of tokens by `blocks` blocks of features,
    whose x of a panel and whose sums stay in a core's second cache, while the panel of one block stays in the first.  All of x
    is read for each piece: where it does not stay there, pieces have twice the features."""

    chunks: tirx.Expr
    pairs: tirx.Expr
    rows: tirx.Expr
    blocks: tirx.Expr

    @property
    def pieces(self) -> tirx.Expr:
        return self.chunks * self.rows


def work(s: State, blocks: tirx.Expr) -> Work:
    """Pieces large enough to be worth a panel, and so many that threads have several each."""
    threads = T.cast(T.call_extern("int32", "omp_get_max_threads"), "int64")
    pairs = div(s.tokens, i64(2 * LANES))
    chunks = T.bind(ceil_div(pairs, max(1, PAIRS // s.blocked.planes)))
    each = T.bind(ceil_div(pairs, chunks))
    of_input = 2 * LANES * s.blocked.planes * 4 // s.blocked.depth  # bytes of x, of a pair
    most = T.if_then_else(each * s.padded * i64(of_input) <= i64(NEAR), i64(BLOCKS // 2), i64(BLOCKS))
    together = T.bind(T.max(i64(1), T.min(most, div(blocks, threads * i64(2)))))
    return Work(chunks, each, T.bind(ceil_div(blocks, together)), together)


def many(s: State, first_block: tirx.Expr, blocks: tirx.Expr, first_pair: tirx.Expr, pairs: tirx.Expr) -> None:
    """y for the features of some blocks, of some pairs of tiles of tokens."""
    b, k = s.blocked, s.own.sizes["k"]
    entries = decode.table(b, s.folds)
    at_once, square, at_a_time = b.tile_inputs, i64(2 * LANES), 2 // b.apart
    whole = b.step is None or s.folds  # what is summed goes on from panel to panel, its sums are kept between them
    groups = max(1, TILES * at_once // b.step) if b.step and s.folds else 1
    made = groups * b.step // at_once if b.step else TILES
    operands = T.alloc_buffer((i64(made), i64(HALVES), i64(at_once // b.depth), i64(LANES)), "int32", scope="global")
    tiles = _of_panel(s, pairs) if b.direct and whole else i64(made)
    most = i64(PAIRS // b.planes) * square
    rows = i64(b.apart if whole else 1)  # of `kept`, for a token
    kept = T.alloc_buffer((i64(BLOCKS), most * rows, i64(FEATURES)), s.kind if whole else "float32", scope="global")
    part = None if whole else T.alloc_buffer((i64(1), square, i64(FEATURES)), s.kind, scope="global")
    ones = T.alloc_buffer((i64(BLOCKS), i64(FEATURES)), s.kind, scope="global") if s.weighed else None
    token, turns, of_turn = first_pair * square, T.bind(pairs * i64(b.apart)), at_a_time * LANES
    each = T.bind(ceil_div(i64(at_once // b.inputs), turns))  # words of a tile that are asked for at a turn
    with T.serial(i64(0), blocks) as n:
        with T.serial(i64(0), pairs * square * rows) as r:
            for_features(lambda v: store(kept, tirx.const(0, s.kind if whole else "float32"), n, r, v))
        if ones is not None:
            for_features(lambda v: store(ones, tirx.const(0, s.kind), n, v))
    if part is not None:
        _claim(s, part)
    primitives.call("tiles_open", i64(LANES))
    with T.serial(i64(0), ceil_div(k, tiles * i64(at_once))) as g, T.serial(i64(0), blocks) as n:
        block = first_block + n
        start = g * tiles * i64(at_once)
        end = T.bind(T.min(start + tiles * i64(at_once), k))
        first, count = g * tiles, T.bind(ceil_div(end - start, at_once))
        if ones is not None and not whole:
            for_features(lambda v: store(ones, tirx.const(0, s.kind), n, v))
        if s.folds:
            with T.serial(i64(0), ceil_div(end - start, b.step)) as j:
                of_group = b.step // at_once
                group = Group(s, block, start + j * i64(b.step), end, None)
                with T.serial(i64(0), T.min(i64(of_group), count - j * i64(of_group))) as i:
                    at = j * i64(of_group) + i
                    _make(s, block, first + at, operands, at, entries, group)
        else:
            less = _less(s, block, start)
            with T.serial(i64(0), count) as i:
                _make(s, block, first + i, operands, i, entries, less=less)
                _weigh(s, ones, operands, i, first + i, n)
        if not whole:
            group = Group(s, block, start, end, (lambda v: ones[n, v]) if s.weighed else None)

        def promote(p: tirx.Expr, begin: tirx.Expr, end: tirx.Expr) -> None:
            """Some of a turn's tokens."""
            with T.serial(begin, end) as r:
                row = p * i64(of_turn) + r
                group.promote(token + row, g, _sums(s, part, i64(0), r), kept, n, row)

        def multiplied(p: tirx.Expr) -> None:
            """By a turn's tokens; between steps, sums of those before them are scaled: tiles and vectors work side by side, as
            far as a processor looks ahead, which is some 500 instructions."""
            some = -(-of_turn // made)
            with T.serial(i64(0), count) as i:
                if b.direct and whole:
                    _ask(s, block + i64(1), first + i, p, each)
                else:
                    _ask(s, block, first + i + tiles, p, each)
                pair, half = first_pair + div(p, i64(b.apart)), mod(p, b.apart)
                _in_turn(_products(s, block, operands, i, first + i, _rows(s, pair, first + i, half, at_a_time)))
                if not whole:
                    with T.If(p > i64(0)), T.Then():
                        promote(
                            p - i64(1),
                            T.min(i64(of_turn), i * i64(some)),
                            T.min(i64(of_turn), (i + i64(1)) * i64(some)),
                        )
            if not whole:
                with T.If(p > i64(0)), T.Then():
                    promote(p - i64(1), T.min(i64(of_turn), count * i64(some)), i64(of_turn))

        with T.serial(i64(0), turns) as p:
            if whole:
                _move("load", kept, 2, n, p * square)
            else:
                _zero(2)
            multiplied(p)
            _move("store", *((kept, 2, n, p * square) if whole else (part, 2, i64(0), i64(0))))
        if not whole:
            promote(turns - i64(1), i64(0), i64(of_turn))
    primitives.call("tiles_close")
    with T.serial(i64(0), blocks) as n:
        if whole and not s.folds:
            group = Group(s, first_block + n, i64(0), k, (lambda v: ones[n, v]) if s.weighed else None)
        with T.serial(i64(0), T.min(pairs * square, s.own.sizes["m"] - token)) as r:
            if whole and not s.folds:
                at = r if b.apart == 1 else div(r, LANES) * square + mod(r, LANES)
                output(s, token + r, first_block + n, group.promoted(token + r, i64(0), _sums(s, kept, n, at)))
            else:
                output(s, token + r, first_block + n, lambda v: kept[n, r, v])


def _of_panel(s: State, pairs: tirx.Expr) -> tirx.Expr:
    """Tiles of a panel of weights that need not be made.  For few tokens as many as stay in a core's second cache beside those
    after them and x, so that sums are kept but a few times; for more, the first cache gives weights faster."""
    each = (pairs * i64(s.blocked.planes) + i64(HALVES)) * i64(HALVES * TILE)
    all_ = ceil_div(s.own.sizes["k"], s.blocked.tile_inputs)
    panels = ceil_div(all_ * each, i64(NEAR))
    return T.bind(T.if_then_else(pairs <= i64(2), ceil_div(all_, panels), i64(TILES)))


def _less(s: State, block: tirx.Expr, start: tirx.Expr) -> tirx.Buffer | None:
    """What makes signed bytes of operands: by as much as they have too much less than what flips the sign of all bytes."""
    b = s.blocked
    if not b.signed or b.direct:
        return None
    found = local((FEATURES,), "uint32")

    def too_much(v: tirx.Expr) -> tirx.Expr:
        if not b.zero:
            return u32(b.offset)
        zero = s.own.element(b.zero, {"n": block * i64(FEATURES) + v, "k": start})
        return T.cast(zero + tirx.const(b.offset, "int32"), "uint32")

    for_features(lambda v: store(found, u32(SIGNS) - too_much(v) * u32(0x01010101), v))
    return found


def _make(
    s: State,
    block,
    tile,
    operands,
    to,
    entries,
    group: Group | None = None,
    *,
    less=None,
    ask=False,
    meanwhile: Actions = (),
) -> None:
    """The two tiles of weights of 64 bytes' inputs, those beyond the last zeros; finished ones of a given group.

    meanwhile   what else is done, some of it after each line of codes: tiles multiply while memory is waited for
    """
    b = s.blocked
    weights, per_word, code = s.own.buffers[b.code], b.inputs // b.depth, s.plan.scheme.code.dtype
    words = b.tile_inputs // b.inputs
    if b.direct:
        return
    first, end = tile * i64(words), ceil_div(s.own.sizes["k"], b.inputs)

    def line(w: tirx.Expr, u: int, row: tirx.Expr) -> None:
        if ask:
            primitives.prefetch(T.address_of(weights[block, w + i64(AHEAD), i64(u * LANES)]))
        held = T.bind(weights[block, w, ramp(u * LANES)])
        if group is None:
            vectors = decode.operands(b, code, held, entries)
        else:
            scale, more = (f[ramp(u * LANES)] if f is not None else None for f in (group.scale, group.correction))
            vectors = decode.finished(b, code, held, entries, scale, more)
        for q, v in enumerate(vectors):
            if less is not None:  # no byte borrows from the next one
                v = T.reinterpret("uint32x16", v) + less[ramp(u * LANES)] ^ primitives.splat(u32(SIGNS))
                v = primitives.bits(v)
            store(operands, v, to, i64(u), row + i64(q), ramp(0))

    with T.If(first + i64(words) <= end):
        with T.Then():
            for at in range(words * HALVES):
                w, u = divmod(at, HALVES)
                line(first + i64(w), u, i64(w * per_word))
                _in_turn(
                    meanwhile[at * len(meanwhile) // (words * HALVES) : (at + 1) * len(meanwhile) // (words * HALVES)]
                )
        with T.Else():
            with T.serial(i64(0), i64(words)) as w, T.If(first + w < end):
                with T.Then():
                    for u in range(HALVES):
                        line(first + w, u, w * per_word)
                with T.Else():
                    for u in range(HALVES):
                        for q in range(per_word):
                            zero = primitives.splat(tirx.const(0, "int32"))
                            store(operands, zero, to, i64(u), w * i64(per_word) + i64(q), ramp(0))
            _in_turn(meanwhile)


def _weigh(s: State, ones, operands, at, tile, *of) -> None:
    """The sums of a tile's operands."""
    if ones is None:
        return
    b = s.blocked
    with T.serial(i64(0), i64(b.tile_inputs // b.depth)) as i:
        for u in range(HALVES):
            one = s.one(tile * i64(b.tile_inputs) + i * i64(b.depth))
            held = primitives.dot(ones[(*of, ramp(u * LANES))], operands[at, i64(u), i, ramp(0)], one)
            store(ones, held, *of, ramp(u * LANES))


def _claim(s: State, part: tirx.Buffer) -> None:
    """TVM keeps of a buffer what it sees used, and does not see what tiles store: so the last element is, too."""
    store(part, tirx.const(0, s.kind), *(extent - i64(1) for extent in part.shape))


def _zero(halves: int, first: int = 0) -> None:
    for t in range(first, first + 2 * halves):
        primitives.call(f"tile_zero_{t}")


def _move(what: str, part: tirx.Buffer, halves: int, *place, first: int = 0) -> None:
    """Sums, of the tiles from the `first` on, to memory or from there."""
    *of, row = place
    for t in range(2 * halves):
        at = T.address_of(part[(*of, row + i64(t // 2 * LANES), i64(t % 2 * LANES))])
        primitives.call(f"tile_{what}_{first + t}", at, ROW)


def _sums(s: State, part: tirx.Buffer, *place, planes: int = 0, apart: tirx.Expr | None = None) -> Of:
    """Those of a row's planes, as those of a token: of what is kept apart, a tile's rows from each other, if nothing is said."""
    *of, row = place
    planes, apart = planes or s.blocked.apart, i64(LANES) if apart is None else apart
    return lambda v: s.joined([part[(*of, row + i64(p) * apart, v)] for p in range(planes)])


Rows = list[tuple[int, tirx.Expr]]  # tiles of x to be multiplied: the number of the tile, 0 or 1, and the address


def _rows(s: State, pair: tirx.Expr, tile: tirx.Expr, first: tirx.Expr, halves: int) -> Rows:
    """One or both tiles of a pair of tokens', from the `first` on."""
    b = s.blocked

    def at(plane: int, half: int) -> tirx.Expr:
        return T.address_of(s.x[s.row(pair, tile, plane, (first + i64(half)) * i64(LANES)), i64(0)])

    return [
        (plane * halves + half if b.apart > 1 else half, at(plane, half))
        for plane in range(b.planes)
        for half in range(halves)
    ]


def _few_rows(s: State, tile: tirx.Expr, turn: int, stacked: bool) -> Rows:
    """The only tile of tokens', of all planes together or of one after the other."""
    b = s.blocked
    at = [T.address_of(s.x[s.row(i64(0), tile, plane, i64(0)), i64(0)]) for plane in range(b.planes)]
    if stacked:
        return [(turn, at[0])]
    return list(enumerate(at)) if b.apart > 1 else [(turn, place) for place in at]


def _products(s: State, block, operands, at, tile, rows: Rows, soon: tirx.Expr | None = None) -> Actions:
    """sums += the products of tiles of tokens' with two of weights, instruction by instruction.

    soon   a tile whose words are asked for meanwhile, some with each instruction: those asked for together wait for each other
    """
    b = s.blocked
    steps = HALVES + 3 * len(rows)
    found: list[Callable[[], None]] = []

    def add(name: str, *args) -> None:
        part, each = i64(len(found)), ceil_div(i64(b.tile_inputs // b.inputs), steps)

        def instruction() -> None:
            primitives.call(name, *args)
            if soon is not None:
                _ask(s, block, soon, part, each, primitives.prefetch_near)

        found.append(instruction)

    def of_weights(u: int) -> None:
        place, line = operands[at, i64(u), i64(0), i64(0)], LANES
        if b.direct:
            place, line = s.own.buffers[b.code][block, tile * i64(b.tile_inputs // b.inputs), i64(u * LANES)], FEATURES
        add(f"tile_load_{6 + u}", T.address_of(place), i64(line * 4))

    for number, (half, place) in enumerate(rows):
        add(f"tile_load_{4 + half}", place, i64(b.tile_inputs * 4 // b.depth))
        for t in range(HALVES):
            if number == 0:
                of_weights(t)
            add(f"tile_product_{2 * half + t}")
    return found


def _in_turn(actions: Actions) -> None:
    for act in actions:
        act()


def _ask(s: State, block, tile, part: tirx.Expr, each: tirx.Expr, prefetch=primitives.prefetch) -> None:
    """One part, of `each` words of a lane, of a tile is asked for: memory works while tiles multiply."""
    words = i64(s.blocked.tile_inputs // s.blocked.inputs)
    with T.serial(part * each, T.min(words, part * each + each)) as w:
        for u in range(HALVES):
            at = s.own.buffers[s.blocked.code][block, tile * words + w, i64(u * LANES)]
            prefetch(T.address_of(at))
