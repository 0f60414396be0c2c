"""Tensor-core linear layers with 4-bit weights and 16-bit compute: Weight, Tile -> tirx PrimFunc.

    y[m, n] = epilogue(sum over k of x[m, k] * (q[n, k] - zero[n, k // group]) * scale[n, k // group])

M, N and K are run-time values and every M, N, K >= 1 is right. Sums are held in float32 and rounded once; a
row's result does not depend on the other rows, nor on how many there are.

Output features are the 16-row side (A) of mma.m16n8k16, tokens its 8-column side (B):

             k: 2t 2t+1   8+2t 8+2t+1            token: 2t   2t+1
    feature c   [ reg 0 ]  [ reg 2 ]                  [ d0 ] [ d1 ]     lane = 4 c + t
    feature c+8 [ reg 1 ]  [ reg 3 ]                  [ d2 ] [ d3 ]     c = 0..7, t = 0..3

The codes are stored as these registers, so a lane's codes for 16 features by 64 of k are one 16-byte load:

    q[o, i, lane = 4 c + t, s] holds feature 16 o + 8 r + c, input 64 i + 16 s + 8 h + 2 t + p
                               in nibble 4 p + 2 h + r:    bit 28  24  20  16  12   8   4   0
                                                             p  1   1   1   1   0   0   0   0
                                                      register  3   2   1   0   3   2   1   0

and one mask takes both 16-bit halves of a register out of a word. Scales are [o, k // group, c, r]; zeros
likewise, or as nibbles r of the bytes [o, k // group, c].

The warps of a CTA form teams. Each team has its own share of k and its own ring of cp.async stages, and waits
for no other before the partial sums are added:

    k ->   | slice 0 | slice 1 | slice 2 | slice 3 | slice 4 | ...     a slice is `Tile.slice` tiles of 64
           | team 0  | team 1  | team 0  | team 1  | team 0  | ...     one slice fills one stage

Scale and zero meet the codes in one of two places (`Tile.correct`): few tokens correct the sums of a group,
many tokens correct the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ITEM_BYTES = {**BYTES, "uint32": 4, "uint8": 1}
SHARED = 99 * 1024  # bytes that one CTA can have on every GPU since sm_80

Extra = tuple[str, Callable, str]  # name, (M, N, K) -> shape, dtype
Epilogue = Callable[[tirx.Expr, tirx.Expr, tirx.Expr, Mapping[str, tirx.Buffer]], tirx.Expr]


@dataclass(frozen=True)
class Half:
    """What the main loop needs to know about a 16-bit float type.

    A nibble or-ed into the bits of `bias` is the number bias + q. If the mantissa is wide enough, the nibble
    above is taken without a shift, as bias + 16 q: `wide` is 16 then, otherwise 1.
    """

    ptx: str
    one: int  # bits of 1.0
    magic: int  # bits of `bias`
    bias: int
    wide: int


HALVES = {
    "float16": Half("f16", 0x3C00, 0x6400, 1024, 16),
    "bfloat16": Half("bf16", 0x3F80, 0x4300, 128, 1),
}


@dataclass(frozen=True)
class Weight:
    """How a code becomes a weight: w = (q - bias - zero) * scale, one scale and zero per group along k."""

    compute: str  # "float16" or "bfloat16": type of x and of the multiplier
    bias: int  # constant zero point; 8 for symmetric u4, 0 if there is none
    zero: str | None  # type of the loaded zero: "u4" (two in a byte) or a float; None: there is none
    scale: str | None  # type of the loaded scale; None: there is none, or the epilogue applies it
    group: int | None  # extent of a group: 16, 32 or a multiple of 64; None: all of K is one group
    signed: bool  # codes are two's complement

    def __post_init__(self):
        assert self.compute in HALVES, f"no 16-bit multiplier for {self.compute}"
        assert self.zero in (None, "u4", *BYTES) and self.scale in (None, *BYTES), self
        assert self.group is None or self.group in (16, 32) or self.group % 64 == 0, f"group {self.group}"
        assert 0 <= self.offset <= 48, f"bias {self.bias} leaves the exact range of the bit trick"

    @property
    def half(self) -> Half:
        return HALVES[self.compute]

    @property
    def offset(self) -> int:
        """The constant zero point of a nibble read as unsigned. Flipping bit 3 of an i4 code adds 8 to it."""
        return self.bias + 8 * self.signed

    def factor(self, register: int) -> int:
        """What q is multiplied by in a register of the A fragment (see Half)."""
        return self.half.wide if register % 2 else 1

    @property
    def grouped(self) -> dict[str, str]:
        """The types of what is loaded per group, by role."""
        return {role: dtype for role, dtype in (("scale", self.scale), ("zero", self.zero)) if dtype}


@dataclass(frozen=True)
class Tile:
    """The part of y that one CTA computes, and how its warps share the work."""

    name: str
    m_max: int | None  # meant for M up to this (right for every M); None: no limit
    correct: str  # where scale and zero are applied: "sums" or "weights"
    tokens: int  # tokens of one CTA
    features: int  # output features of one CTA
    split: tuple[int, int, int]  # warps of a team along tokens and features, teams along k
    slice: int  # tiles of 64 along k in one stage
    stages: int  # stages of a team's ring
    resident: int  # CTAs that an SM must be able to hold: a limit on registers
    k_max: int | None = None  # meant for K up to this (right for every K); None: no limit

    def __post_init__(self):
        assert self.correct in ("sums", "weights"), self
        assert self.stages >= 2, f"{self}: one stage cannot be filled while it is read"
        assert self.team_threads == 32 or self.teams < 16, f"{self}: there are 16 barriers"
        for extent in (self.tokens, self.features // 16, *self.split, self.slice):
            assert extent and extent & (extent - 1) == 0, f"{self}: {extent} is not a power of two"

    @property
    def teams(self) -> int:
        return self.split[2]

    @property
    def team_threads(self) -> int:
        return 32 * self.split[0] * self.split[1]

    @property
    def threads(self) -> int:
        return self.teams * self.team_threads

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens of one warp."""
        return -(-self.tokens // 8) // self.split[0]

    @property
    def feature_tiles(self) -> int:
        """Tiles of 16 features of one warp."""
        return self.features // 16 // self.split[1]

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of an mma result that matter: i // 2 is feature c or c + 8, i % 2 token 2t or 2t + 1."""
        return (0, 2) if self.tokens == 1 else (0, 1, 2, 3)

    @property
    def partials(self) -> tuple[int, int, int]:
        """Shape of the partial sums; 4 words of padding put the lanes that store one register in 32 banks."""
        return (self.teams, self.tokens, self.features + 4)

    def __str__(self):
        m = "any m" if self.m_max is None else f"m <= {self.m_max}"
        m += "" if self.k_max is None else f", k <= {self.k_max}"
        warps = "x".join(map(str, self.split))
        return (
            f"{self.name}: {m}, {self.tokens} tokens x {self.features} features, {warps} warps, "
            f"{self.stages} stages of {64 * self.slice}, corrects {self.correct}"
        )


def tiles() -> tuple[Tile, ...]:
    """The default tiles, by rising m_max."""
    return (
        Tile("m1_short", 1, "sums", tokens=1, features=16, split=(1, 1, 8), slice=4, stages=3, resident=3, k_max=4096),
        Tile("m1", 1, "sums", tokens=1, features=32, split=(1, 1, 8), slice=4, stages=2, resident=2),
        Tile("m8", 8, "sums", tokens=8, features=32, split=(1, 1, 4), slice=4, stages=2, resident=2),
        Tile("m16", 16, "sums", tokens=16, features=32, split=(1, 1, 8), slice=2, stages=2, resident=2),
        Tile("m64", 64, "weights", tokens=32, features=64, split=(1, 1, 4), slice=2, stages=2, resident=2),
        Tile("m256", 256, "weights", tokens=64, features=64, split=(1, 1, 4), slice=1, stages=2, resident=1),
        Tile("any", None, "weights", tokens=128, features=128, split=(2, 2, 1), slice=2, stages=2, resident=1),
    )


def lower(
    name: str,
    weight: Weight,
    tile: Tile,
    extra: Sequence[Extra] = (),
    epilogue: Epilogue = lambda acc, m, n, buffers: acc,
    output: str | None = None,
) -> tirx.PrimFunc:
    """The kernel (x, q, [s], [z], *extra, y); y has the type `output`, by default that of x."""
    tile = fitted(weight, tile)
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        own, others = _declare(weight, tile, extra, output or weight.compute)
        T.device_entry()
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.resident}):
            k = _enter(weight, tile, own)
            _store_partials(k, _main_loop(k))
            _reduce(k, epilogue, others, own["y"])
    return builder.get()


@dataclass(frozen=True)
class Stage:
    """What one stage holds, operand after operand. Shared memory begins with the stages of all teams."""

    weight: Weight
    tile: Tile

    @property
    def step(self) -> int:
        """Extent along k that shares one scale and zero, within one stage.

        A sum that is corrected afterwards is at most 128 long: the codes are off by up to 1024, and a longer
        sum of such numbers loses the bits that matter.
        """
        longest = min(64 * self.tile.slice, 128) if self.tile.correct == "sums" else 64
        return math.gcd(self.weight.group or longest, longest)

    @property
    def steps(self) -> int:
        return 64 * self.tile.slice // self.step

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type by operand."""
        tile = self.tile
        blocks = tile.features // 16
        shapes = {
            "q": ((blocks, tile.slice, 32, 4), "uint32"),
            "x": ((tile.tokens, 64 * tile.slice), self.weight.compute),
        }
        for role, dtype in self.weight.grouped.items():
            shapes[role] = ((blocks, self.steps, group_bytes(dtype)), "uint8")
        return shapes

    def offset(self, operand: str | None = None) -> int:
        """First byte of the operand; without an operand, the bytes of a stage.

        Stages, q and x begin on 128 bytes: copies that straddle those lines of shared memory were measured to
        cost up to a third of the speed. Scales and zeros are small and begin on 16 bytes.
        """
        end = 0
        for name, (shape, dtype) in self.shapes.items():
            if name == operand:
                return end
            end += -(-math.prod(shape) * ITEM_BYTES[dtype] // 16) * 16
        return -(-end // 128) * 128


@dataclass(frozen=True)
class View:
    """One operand in the stages of the thread's team."""

    buffer: tirx.Buffer  # [team, stage, number]
    team: tirx.Expr
    start: int
    shape: tuple[int, ...]

    def index(self, stage, *index) -> list:
        flat = 0
        for i, extent in zip(index, self.shape, strict=True):
            flat = flat * extent + i
        return [self.team, stage, self.start + flat]

    def ptr(self, stage, *index):
        return self.buffer.ptr_to(self.index(stage, *index))


def group_bytes(dtype: str) -> int:
    """Bytes of one group of 16 features."""
    return 8 if dtype == "u4" else 16 * BYTES[dtype]


def pool_bytes(weight: Weight, tile: Tile) -> int:
    """Shared memory of a CTA: the stages, and later the partial sums in their place."""
    return max(tile.teams * tile.stages * Stage(weight, tile).offset(), 4 * math.prod(tile.partials))


def fitted(weight: Weight, tile: Tile) -> Tile:
    """The tile with as many stages, then as long slices, as fit into shared memory."""
    while pool_bytes(weight, tile) > SHARED:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            assert tile.slice > 1, f"{tile}: needs {pool_bytes(weight, tile)} bytes of shared memory"
            tile = replace(tile, slice=tile.slice // 2)
    return tile


@dataclass(frozen=True)
class Kernel:
    """The names in scope while a body is built. Sizes and ids are int32; row bases are computed in int64."""

    weight: Weight
    tile: Tile
    x: tirx.Buffer
    q: tirx.Buffer
    grouped: Mapping[str, tirx.Buffer]  # scale and zero by role
    M: tirx.Expr
    N: tirx.Expr
    K: tirx.Expr
    m0: tirx.Expr  # first token of the CTA
    o0: tirx.Expr  # first tile of 16 features of the CTA
    thread: tirx.Expr
    aligned: tirx.Expr  # rows of x begin on 16-byte boundaries
    pool: tirx.Buffer

    @property
    def k_tiles(self):
        return (self.K + 63) >> 6

    @property
    def o_tiles(self):
        return (self.N + 15) >> 4

    @property
    def team(self):
        return self.thread // self.tile.team_threads

    @property
    def team_thread(self):
        return self.thread % self.tile.team_threads

    @property
    def lane(self):
        return self.thread % 32

    @property
    def token_warp(self):
        return self.thread // 32 % self.tile.split[0]

    @property
    def feature_warp(self):
        return self.thread // (32 * self.tile.split[0]) % self.tile.split[1]

    def shared(self, shape, dtype):
        """The pool as an array."""
        return T.decl_buffer(shape, dtype, data=self.pool.data, scope="shared.dyn")

    def views(self) -> dict[str, View]:
        """The stages, by operand."""
        stage, views = Stage(self.weight, self.tile), {}
        for operand, (shape, dtype) in stage.shapes.items():
            item = ITEM_BYTES[dtype]
            buffer = self.shared((self.tile.teams, self.tile.stages, stage.offset() // item), dtype)
            views[operand] = View(buffer, self.team, stage.offset(operand) // item, shape)
        return views


def _declare(weight, tile, extra, output):
    """Parameters -> own buffers by role, extra buffers by name."""
    M, N, K = (tirx.Var(v, "int64") for v in "MNK")
    groups = _ceildiv(K, weight.group) if weight.group else 1
    shapes = {
        "x": ((M, K), weight.compute),
        "q": ((_ceildiv(N, 16), _ceildiv(K, 64), 32, 4), "uint32"),
    }
    for role, dtype in weight.grouped.items():
        tail, dtype = ((8,), "uint8") if dtype == "u4" else ((8, 2), dtype)
        shapes[role] = ((_ceildiv(N, 16), groups, *tail), dtype)
    own = [(role[0] if role in weight.grouped else role, *shape) for role, shape in shapes.items()]
    others = [(name, shape(M, N, K), dtype) for name, shape, dtype in extra]
    params = [*own, *others, ("y", (M, N), output)]
    handles = [T.arg(name, T.handle()) for name, _, _ in params]
    buffers = [
        IRBuilder.name(name, T.match_buffer(handle, shape, dtype))
        for handle, (name, shape, dtype) in zip(handles, params, strict=True)
    ]
    named = dict(zip((name for name, _, _ in others), buffers[len(own) : -1], strict=True))
    return {**dict(zip(shapes, buffers)), "y": buffers[-1]}, named


def _enter(weight, tile, buffers) -> Kernel:
    """The launch grid and the names in scope on the device."""
    (M, K), N = buffers["x"].shape, buffers["y"].shape[1]
    # Tiles of tokens and features share grid x: y and z end at 65,535.
    columns = T.cast(_ceildiv(N, tile.features), "int32")
    cta = T.cta_id([T.cast(_ceildiv(M, tile.tokens), "int32") * columns])
    thread = T.thread_id([tile.threads])
    pool = T.alloc_buffer((pool_bytes(weight, tile),), "uint8", scope="shared.dyn")
    place = T.alloc_local([2], "int32")
    with T.If(cta < columns):
        with T.Then():  # the usual case, spared the latency of a division
            _set(place, 0, 0)
            _set(place, 1, cta)
        with T.Else():
            _set(place, 0, tirx.truncdiv(cta, columns))
            _set(place, 1, tirx.truncmod(cta, columns))
    base = T.alloc_local([1], "uint64")
    _ptx("cvta.to.global.u64", base[0], buffers["x"].ptr_to([T.int64(0), T.int64(0)]))
    return Kernel(
        weight=weight,
        tile=tile,
        x=buffers["x"],
        q=buffers["q"],
        grouped={role: buffers[role] for role in weight.grouped},
        M=T.cast(M, "int32"),
        N=T.cast(N, "int32"),
        K=T.cast(K, "int32"),
        m0=place[0] * tile.tokens,
        o0=place[1] * (tile.features // 16),
        thread=thread,
        aligned=((T.cast(K, "uint64") * T.uint64(2) | base[0]) & T.uint64(15)) == T.uint64(0),
        pool=pool,
    )


def _ceildiv(extent, size: int):
    return tirx.truncdiv(extent + (size - 1), tirx.IntImm("int64", size))


def _wide(index):
    return T.cast(index, "int64")


def _set(buffer, i: int, value):
    T.buffer_store(buffer, value, [i])


def _zeros(n: int, dtype: str):
    buffer = T.alloc_local([n], dtype)
    for i in range(n):
        _set(buffer, i, tirx.const(0, dtype))
    return buffer


def _ptx(instruction: str, *operands, **options):
    T.evaluate(T.ptx[instruction](*operands, **options))


@contextmanager
def _when(condition):
    with T.If(condition), T.Then():
        yield


def _main_loop(k: Kernel):
    """-> the warp's accumulators, [feature tile, token tile, register] in one array.

    Round i fills a stage with slice i and multiplies slice i - ahead. One loop does both: a kernel that runs
    for a few microseconds should not wait for a second copy of its instructions.
    """
    tile = k.tile
    views, ahead = k.views(), tile.stages - 1
    stride, first = tile.teams * tile.slice, k.team * tile.slice
    count = (k.k_tiles - first + (stride - 1)) // stride  # slices of this team
    fills: list = [_FillCodes(k, views["q"], first)]
    fills += [_FillGroups(k, role, views[role], first) for role in k.weight.grouped]
    fills.append(_FillTokens(k, views["x"], first))
    acc = _zeros(4 * tile.feature_tiles * tile.token_tiles, "float32")
    with T.serial(0, count + ahead, unroll=False) as i:
        with _when(i >= ahead):
            _ptx("cp.async.wait_group", ahead - 1)
            _team_sync(k)  # slice i - ahead has landed, and nobody reads the slice before it any more
        with _when(i < count):
            for fill in fills:
                fill.start(tirx.truncmod(i, tile.stages))
                fill.advance(stride)
        _ptx("cp.async.commit_group")
        with _when(i >= ahead):
            _multiply(k, views, acc, tirx.truncmod(i - ahead, tile.stages))
    return acc


def _team_sync(k: Kernel):
    if k.tile.teams == 1:
        T.evaluate(T.cuda.cta_sync())
    elif k.tile.team_threads == 32:
        T.evaluate(T.cuda.warp_sync())
    else:  # barrier 0 is that of the CTA
        _ptx("bar.sync", T.cast(k.team + 1, "uint32"), T.uint32(k.tile.team_threads))


# Global memory -> stage
#
# Each thread of a team copies the same places of every slice. Where its first one lies is computed once, in
# 64 bits, and then advanced from slice to slice; the others are at distances that are constants or multiples
# of a row. What lies outside of a tensor becomes zero.


class _FillCodes:
    """16-byte pieces, one per lane of a block: a block is 16 features by 64 of k."""

    def __init__(self, k: Kernel, view, first):
        self.k, self.view = k, view
        warp = k.team_thread // 32
        self.f, self.i = warp // k.tile.slice, warp % k.tile.slice
        self.position = _register("int32", first + self.i)
        block = _wide(k.o0 + self.f) * self._row() + _wide(first + self.i)
        self.offset = _register("int64", block * 128 + _wide(k.lane * 4))

    def _row(self):
        return _ceildiv(_wide(self.k.K), 64)

    def start(self, slot):
        k, tile = self.k, self.k.tile
        warps, blocks = tile.team_threads // 32, tile.features // 16 * tile.slice
        for n in range(-(-blocks // warps)):
            f, i = divmod(n * warps, tile.slice)
            source = k.q.ptr_to([0, 0, 0, self.offset[0] + (f * self._row() + i) * 128])
            inside = tirx.all(k.o0 + self.f + f < k.o_tiles, self.position[0] + i < k.k_tiles)
            target = self.view.ptr(slot, self.f + f, self.i + i, k.lane, 0)
            _copy(target, source, 16, inside, None if warps <= blocks else k.team_thread < 32 * blocks)

    def advance(self, tiles: int):
        _set(self.position, 0, self.position[0] + tiles)
        _set(self.offset, 0, self.offset[0] + tiles * 128)


class _FillGroups:
    """Pieces of up to 16 bytes of the scales or zeros of 16 features and one group."""

    def __init__(self, k: Kernel, role: str, view, first):
        self.k, self.view, self.source, self.dtype = k, view, k.grouped[role], k.weight.grouped[role]
        self.stage = Stage(k.weight, k.tile)
        self.width = min(16, group_bytes(self.dtype))
        self.pieces = group_bytes(self.dtype) // self.width
        self.numbers = math.prod(int(n) for n in self.source.shape[2:])  # numbers of one group
        item = k.team_thread
        self.f = item // (self.stage.steps * self.pieces)
        self.step, self.piece = item // self.pieces % self.stage.steps, item % self.pieces
        self.position = _register("int32", first * 64 + self.step * self.stage.step)
        offset = _wide(k.o0 + self.f) * self._row() + _wide(self.piece * (self.numbers // self.pieces))
        self.offset = T.alloc_local([1], "int64")
        _ptx("mov.b64", self.offset[0], offset)  # what asm returns is kept, not computed again in every round

    def _row(self):
        return self.source.shape[1] * self.numbers

    def start(self, slot):
        k, threads, steps = self.k, self.k.tile.team_threads, self.stage.steps
        total = k.tile.features // 16 * steps * self.pieces
        for n in range(-(-total // threads)):
            f, rest = divmod(n * threads, steps * self.pieces)
            step = rest // self.pieces
            position = self.position[0] + step * self.stage.step
            g = T.cast(position, "uint32") // T.uint32(k.weight.group) if k.weight.group else T.int32(0)
            zeros = [0] * (len(self.source.shape) - 1)
            source = self.source.ptr_to([*zeros, self.offset[0] + f * self._row() + _wide(g) * self.numbers])
            inside = tirx.all(k.o0 + self.f + f < k.o_tiles, position < k.K)
            target = self.view.ptr(slot, self.f + f, self.step + step, self.piece * self.width)
            _copy(target, source, self.width, inside, None if total >= threads else k.team_thread < total)

    def advance(self, tiles: int):
        _set(self.position, 0, self.position[0] + tiles * 64)


class _FillTokens:
    """Pieces of eight numbers of a row of x; number by number if the pieces are not aligned.

    Piece c of row r is stored as piece c ^ (r % 8): the 8 rows that ldmatrix reads at once are in different
    banks, and no row leaves its 128-byte lines. Where r = r0 + r1 without carries, as below, that is
    (c ^ r0 % 8) ^ (r1 % 8).
    """

    def __init__(self, k: Kernel, view, first):
        self.k, self.view = k, view
        self.pieces = 8 * k.tile.slice
        self.r, self.c = k.team_thread // self.pieces, k.team_thread % self.pieces
        self.column = _register("int32", first * 64 + self.c * 8)
        self.offset = _register("int64", _wide(k.m0 + self.r) * _wide(k.K) + _wide(self.column[0]))

    def start(self, slot):
        with T.If(self.k.aligned):
            with T.Then():
                self._start_pieces(slot)
            with T.Else():
                self._copy_numbers(slot)

    def _start_pieces(self, slot):
        k, threads = self.k, self.k.tile.team_threads
        total = k.tile.tokens * self.pieces
        for n in range(-(-total // threads)):
            r, c = divmod(n * threads, self.pieces)
            source = k.x.ptr_to([0, self.offset[0] + (r * _wide(k.K) + c * 8)])
            inside = tirx.all(r < k.M - k.m0 - self.r, self.column[0] + c * 8 < k.K)
            target = self.view.ptr(slot, self.r + r, (self.c ^ (self.r % 8) ^ (r % 8)) * 8 + c * 8)
            _copy(target, source, 16, inside, None if total >= threads else k.team_thread < total)

    def _copy_numbers(self, slot):
        k, threads, columns = self.k, self.k.tile.team_threads, 8 * self.pieces
        first = self.column[0] - self.c * 8
        with T.serial(0, k.tile.tokens * columns // threads, unroll=False) as i:
            item = i * threads + k.team_thread
            r, c = item // columns, item % columns
            inside = tirx.all(k.m0 + r < k.M, first + c < k.K)
            number = k.x[_wide(k.m0 + r), _wide(first + c)]
            value = T.if_then_else(inside, number, tirx.const(0, k.weight.compute))
            T.buffer_store(self.view.buffer, value, self.view.index(slot, r, c ^ (r % 8 * 8)))

    def advance(self, tiles: int):
        _set(self.column, 0, self.column[0] + tiles * 64)
        _set(self.offset, 0, self.offset[0] + tiles * 64)


def _register(dtype: str, value):
    register = T.alloc_local([1], dtype)
    _set(register, 0, value)
    return register


def _copy(target, source, width: int, inside, exists):
    """cp.async of `width` bytes, or of zeros unless `inside`; none at all unless `exists` (None: it does)."""
    size = T.if_then_else(inside, T.uint32(width), T.uint32(0))
    options = {} if exists is None else {"pred": exists}
    cache = "cg" if width == 16 else "ca"
    _ptx(f"cp.async.{cache}.shared.global", target, source, width, size, **options)


# Stage -> accumulators


def _multiply(k: Kernel, views, acc, slot):
    """acc += the warp's features x tokens over one slice.

    The slice is unrolled, so that the compiler can move loads forward, unless the accumulators leave no
    registers for that; then one k tile is.
    """
    tile = k.tile
    steps = (_SumStep if tile.correct == "sums" else _WeightStep)(k)
    if tile.feature_tiles * tile.token_tiles < 32:
        _multiply_tiles(k, views, acc, slot, steps, 0, tile.slice)
    else:
        with T.serial(0, tile.slice, unroll=False) as i:
            _multiply_tiles(k, views, acc, slot, steps, i, 1)


def _multiply_tiles(k: Kernel, views, acc, slot, steps, first, count: int):
    """k tiles first .. first + count of the slice, 16 of k at a time. Operands are read one time ahead."""
    stage, last = Stage(k.weight, k.tile), 4 * count
    codes, tokens = {}, {}
    for s in range(last + 1):
        if s < last:
            if s % 4 == 0:
                codes[s // 4] = _load_codes(k, views["q"], slot, first + s // 4)
            tokens[s] = _load_tokens(k, views["x"], slot, first, s, tokens)
        now = s - 1
        if now < 0:
            continue
        if 16 * now % stage.step == 0:
            steps.begin(views, slot, first * 64 // stage.step + 16 * now // stage.step)
        for f in range(k.tile.feature_tiles):
            steps.multiply(acc, f, codes[now // 4][f][now % 4], tokens[now])
        if 16 * (now + 1) % stage.step == 0:
            steps.end(acc)


def _load_codes(k: Kernel, view, slot, i):
    """The lane's words of k tile i: four per feature tile."""
    words = []
    for f in range(k.tile.feature_tiles):
        registers = T.alloc_local([4], "uint32")
        address = view.ptr(slot, k.feature_warp * k.tile.feature_tiles + f, i, k.lane, 0)
        words.append([registers[s] for s in range(4)])
        _ptx("ld.shared.v4.b32", *words[-1], address)
    return words


def _load_tokens(k: Kernel, view, slot, first, s: int, loaded):
    """The B fragments of time s after k tile `first`: a pair of registers per token tile.

    An ldmatrix.x4 reads four 8 x 8 matrices, lane l naming row l % 8 of matrix l // 8: both k halves of two
    token tiles or, if there is one token tile, of two times. Fewer than 8 tokens are repeated to fill one.
    """
    tile, row0 = k.tile, k.token_warp * (8 * k.tile.token_tiles)
    pairs = []
    if tile.token_tiles == 1 and s % 2:
        return loaded[s - 1][1:]
    for j in range(0, tile.token_tiles, 2):
        if tile.token_tiles == 1:
            row, piece = k.lane % min(8, tile.tokens), k.lane // 8
        else:
            row, piece = 8 * j + k.lane // 16 * 8 + k.lane % 8, k.lane // 8 % 2
        b = T.alloc_local([4], "uint32")
        swizzled = piece ^ (row % 8) ^ (2 * s % 8)  # where _FillTokens puts piece + 2 s, modulo 8
        address = view.ptr(slot, row0 + row, (first + s // 4) * 64 + swizzled * 8)
        _ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(b[i] for i in range(4)), address)
        pairs += [(b[0], b[1]), (b[2], b[3])]
    return pairs


def _mma(weight: Weight, d, first: int, a, b, start: bool):
    """d[first : first + 4] += a b; with `start`, = a b."""
    half = weight.half.ptx
    out = [d[first + i] for i in range(4)]
    c = [T.float32(0)] * 4 if start else out
    _ptx(f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32", *out, *a, *b, *c)


def _biased(weight: Weight, word, register: int, out):
    """out = register 0..3 of the A fragment in `word`: both halves are bias + factor * q."""
    taken = 4 if weight.factor(register) > 1 else 0
    shift = 4 * register - taken
    pattern = weight.half.magic ^ (8 << taken if weight.signed else 0)
    shifted = word >> T.uint32(shift) if shift else word
    mask = (0xF << taken) * 0x10001
    _ptx("lop3.b32", out, shifted, T.uint32(mask), T.uint32(pattern * 0x10001), 0x6A)  # (a & b) ^ c


def _load_groups(k: Kernel, views, slot, f: int, step) -> dict[str, list]:
    """By role, the words of feature tile f that hold the values of features c and c + 8."""
    loaded = {}
    for role, dtype in k.weight.grouped.items():
        count = 2 if dtype == "float32" else 1
        words = T.alloc_local([count], "uint32")
        at = k.lane // 4 * (group_bytes(dtype) // 8)
        address = views[role].ptr(slot, k.feature_warp * k.tile.feature_tiles + f, step, at)
        loaded[role] = [words[i] for i in range(count)]
        load = "u8" if dtype == "u4" else "v2.b32" if count == 2 else "b32"
        _ptx(f"ld.shared.{load}", *loaded[role], address)
    return loaded


def _floats(dtype: str, words) -> list:
    """Loaded words -> the float32 values of features c and c + 8."""
    if dtype == "u4":
        return [T.cast(nibble, "float32") for nibble in (words[0] & T.uint32(15), words[0] >> T.uint32(4))]
    if dtype == "float32":
        return [T.reinterpret("float32", word) for word in words]
    low, high = words[0] & T.uint32(0xFFFF), words[0] >> T.uint32(16)
    if dtype == "bfloat16":
        return [T.reinterpret("float32", half << T.uint32(16)) for half in (low, high)]
    return [T.cast(T.reinterpret("float16", T.cast(half, "uint16")), "float32") for half in (low, high)]


class _SumStep:
    """A step that multiplies bias + factor * q and corrects the sum:

        acc += scale * (sum - (bias + factor * zero) * row_sum)

    One more mma, with ones as A, gives row_sum, the sum of x. Registers 1 and 3, features c + 8, may hold 16
    times their values (Weight.factor); that factor is divided out of the partial sums, exactly.
    """

    def __init__(self, k: Kernel):
        self.k, self.tile, self.weight = k, k.tile, k.weight
        tokens, features = self.tile.token_tiles, self.tile.feature_tiles
        self.sums = T.alloc_local([4 * features * tokens], "float32")
        self.row_sums = T.alloc_local([4 * tokens], "float32")
        self.a = T.alloc_local([4], "uint32")
        self.scale = T.alloc_local([2 * features], "float32")
        self.shift = T.alloc_local([2 * features], "float32")
        self.start = True

    def begin(self, views, slot, step: int):
        self.start = True
        for f in range(self.tile.feature_tiles):
            words = _load_groups(self.k, views, slot, f, step)
            if self.weight.scale:
                for r, value in enumerate(_floats(self.weight.scale, words["scale"])):
                    _set(self.scale, 2 * f + r, value)
            for r, value in enumerate(self._shifts(words.get("zero"))):
                _set(self.shift, 2 * f + r, value)

    def _shifts(self, words):
        weight = self.weight
        factors = [weight.factor(r) for r in range(2)]
        constants = [weight.half.bias + factor * weight.offset for factor in factors]
        if words is None:
            return [T.float32(constant) for constant in constants]
        if weight.zero != "u4":
            zeros = _floats(weight.zero, words)
            return [zeros[r] * T.float32(factors[r]) + T.float32(constants[r]) for r in range(2)]
        upper = words[0] & T.uint32(0xF0) if factors[1] == 16 else words[0] >> T.uint32(4)
        # An integer below 2^23 or-ed into the bits of 2^23 is 2^23 plus that integer.
        floats = [T.reinterpret("float32", n | T.uint32(0x4B000000)) for n in (words[0] & T.uint32(15), upper)]
        return [floats[r] + T.float32(constants[r] - 2**23) for r in range(2)]

    def multiply(self, acc, f: int, word, operands):
        for register in range(4):
            _biased(self.weight, word, register, self.a[register])
        a = [self.a[register] for register in range(4)]
        operands = operands[: self.tile.token_tiles]
        for j, b in enumerate(operands):
            _mma(self.weight, self.sums, 4 * (f * len(operands) + j), a, b, self.start)
        if f == self.tile.feature_tiles - 1:
            ones = [T.uint32(self.weight.half.one * 0x10001)] * 4
            for j, b in enumerate(operands):
                _mma(self.weight, self.row_sums, 4 * j, ones, b, self.start)
            self.start = False

    def end(self, acc):
        tokens = self.tile.token_tiles
        for f in range(self.tile.feature_tiles):
            for j in range(tokens):
                for i in self.tile.registers:
                    at, r = 4 * (f * tokens + j) + i, 2 * f + i // 2
                    value = self.sums[at] - self.shift[r] * self.row_sums[4 * j + i % 2]
                    _set(acc, at, acc[at] + (self.scale[r] * value if self.weight.scale else value))


class _WeightStep:
    """A step that multiplies finished weights: (bias + q) - (bias + zero), exact, times scale, rounded once.

    Integer zeros and scales of the compute type stay in packed 16-bit arithmetic; other types take the way
    through float32, where the difference and the product are rounded to 16 bits together.
    """

    def __init__(self, k: Kernel):
        self.k, self.tile, self.weight = k, k.tile, k.weight
        self.packed = self.weight.zero in (None, "u4") and self.weight.scale in (None, self.weight.compute)
        dtype = "uint32" if self.packed else "float32"
        self.a = T.alloc_local([4], "uint32")
        self.scale = T.alloc_local([2 * self.tile.feature_tiles], dtype)
        self.shift = T.alloc_local([2 * self.tile.feature_tiles], dtype)

    def begin(self, views, slot, step: int):
        for f in range(self.tile.feature_tiles):
            words = _load_groups(self.k, views, slot, f, step)
            if self.packed:
                self._pack(f, words)
                continue
            for role, target in (("scale", self.scale), ("zero", self.shift)):
                if role in words:
                    for r, value in enumerate(_floats(self.weight.grouped[role], words[role])):
                        _set(target, 2 * f + r, value)

    def _pack(self, f: int, words):
        """Scale and -(bias / factor + zero) as packed pairs of equal halves.

        From bias / factor upwards halves are equidistant in value and in bits: integers are added to bits.
        """
        half, offset = self.weight.half, self.weight.offset
        for r in range(2):
            shrink = 4 if self.weight.factor(r) == 16 else 0
            bits = 0x8000 + half.magic - (shrink << 10) + (offset << shrink)
            shift = T.uint32(bits * 0x10001)
            if self.weight.zero:
                nibble = words["zero"][0] & T.uint32(15) if r == 0 else words["zero"][0] >> T.uint32(4)
                shift = ((nibble << T.uint32(shrink)) + T.uint32(bits)) * T.uint32(0x10001)
            _set(self.shift, 2 * f + r, shift)
            if self.weight.scale:
                word = words["scale"][0]
                _ptx("prmt.b32", self.scale[2 * f + r], word, word, T.uint32(0x3232 if r else 0x1010))

    def multiply(self, acc, f: int, word, operands):
        for register in range(4):
            (self._packed_pair if self.packed else self._float_pair)(f, word, register)
        a = [self.a[register] for register in range(4)]
        operands = operands[: self.tile.token_tiles]
        for j, b in enumerate(operands):
            _mma(self.weight, acc, 4 * (f * len(operands) + j), a, b, start=False)

    def _packed_pair(self, f: int, word, register: int):
        half, out, r = self.weight.half, self.a[register], 2 * f + register % 2
        shrink = 4 if self.weight.factor(register) == 16 else 0
        fma, inverse = f"fma.rn.{half.ptx}x2", T.uint32((half.one - (shrink << 10)) * 0x10001)
        _biased(self.weight, word, register, out)
        _ptx(fma, out, out, inverse, self.shift[r])
        if self.weight.scale:
            _ptx(fma, out, out, self.scale[r], T.uint32(0x80008000))

    def _float_pair(self, f: int, word, register: int):
        r, flip = 2 * f + register % 2, 8 if self.weight.signed else 0
        values = []
        for p in range(2):
            nibble = (word >> T.uint32(16 * p + 4 * register)) & T.uint32(15)
            value = T.reinterpret("float32", nibble ^ T.uint32(0x4B000000 + flip))
            value = value - T.float32(2**23 + self.weight.offset)
            if self.weight.zero:
                value = value - self.shift[r]
            values.append(value * self.scale[r] if self.weight.scale else value)
        _ptx(f"cvt.rn.{self.weight.half.ptx}x2.f32", self.a[register], values[1], values[0])

    def end(self, acc):
        pass


# Accumulators -> y


def _store_partials(k: Kernel, acc):
    tile = k.tile
    T.evaluate(T.cuda.cta_sync())  # all teams are done with the stages
    partials = k.shared(tile.partials, "float32")
    for f in range(tile.feature_tiles):
        for j in range(tile.token_tiles):
            for i in tile.registers:
                token = (k.token_warp * tile.token_tiles + j) * 8 + k.lane % 4 * 2 + i % 2
                feature = (k.feature_warp * tile.feature_tiles + f) * 16 + i // 2 * 8 + k.lane // 4
                value = acc[4 * (f * tile.token_tiles + j) + i]
                if tile.correct == "sums":
                    value = value * T.float32(1 / k.weight.factor(i // 2))
                if tile.tokens >= 8:
                    T.buffer_store(partials, value, [k.team, token, feature])
                else:
                    with _when(token < tile.tokens):
                        T.buffer_store(partials, value, [k.team, token, feature])
    T.evaluate(T.cuda.cta_sync())


def _reduce(k: Kernel, epilogue: Epilogue, buffers, y):
    """Adds the teams' sums in order, applies the epilogue, rounds. Neighbouring threads store along a row."""
    tile = k.tile
    partials = k.shared(tile.partials, "float32")
    total = T.alloc_local([1], "float32")
    items = tile.tokens * tile.features
    with T.serial(0, -(-items // tile.threads)) as i:
        item = i * tile.threads + k.thread
        token, feature = item // tile.features, item % tile.features
        m, n = k.m0 + token, k.o0 * 16 + feature
        with _when(tirx.all(item < items, m < k.M, n < k.N)):
            _set(total, 0, partials[0, token, feature])
            for team in range(1, tile.teams):
                _set(total, 0, total[0] + partials[team, token, feature])
            value = epilogue(total[0], _wide(m), _wide(n), buffers)
            T.buffer_store(y, T.cast(value, str(y.dtype)), [_wide(m), _wide(n)])
