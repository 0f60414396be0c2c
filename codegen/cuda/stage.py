"""Shared memory: what a stage of the ring holds, and the cp.async copies from global memory that fill it.

Each thread of a team copies the same places of every slice. Where its first one lies is computed once, in
64 bits, and then advanced from slice to slice; the others are at distances that are constants or multiples
of a row. What lies outside of a tensor becomes zero.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import tvm
from tvm import tirx
from tvm.sym import Analyzer
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when, wide
from qdsl.codegen.cuda.decode import small_float, words_of
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.tile import Tile
from qdsl.codegen.cuda.weight import BYTES, NIBBLES, Weight

ITEM_BYTES = {**BYTES, "uint32": 4, "uint16": 2, "uint8": 1}
READ_ONCE = 64  # tokens of a tile up to which its codes are hardly ever read by another CTA as well
ANALYZER = Analyzer()
SHARED = 99 * 1024  # bytes that one CTA can have on every GPU since sm_80


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
        longest = self.tile.longest_step
        return math.gcd(self.weight.group or longest, longest)

    @property
    def steps(self) -> int:
        return 64 * self.tile.slice // self.step

    @property
    def order(self) -> str:
        """Names the order in which the products of one number of y are summed; equal names, equal bits.

        A k tile is four mma of 16 of k. A team goes through its slices, and they through their k tiles, by rising k;
        the teams' sums are added team by team. So the order is told by who has which slice: the number of teams, and the
        length of a slice, unless one team has them all. Where sums are scaled, they are rounded after every step as
        well, and the step counts too, and whether zero points have been taken off codes or are taken off sums; corrected
        weights enter every mma finished. Tokens, features, warps and stages
        decide which register holds a sum, never what is added to it, nor when.
        """
        share = "1 team" if self.tile.teams == 1 else f"{self.tile.teams} teams by {64 * self.tile.slice}"
        if self.tile.cluster > 1:
            share = f"{self.tile.cluster} CTAs by {64 * self.tile.slice}, of {share}"
        if self.weight.sums == "uint32":
            return "integers"  # are summed exactly in any order
        if self.tile.correct == "sums":
            return f"mma {share}, {self.scaled}"
        return f"mma {share}, {f'adds sums of {self.step}' if self.weight.promoted else 'corrects weights'}"

    @property
    def scaled(self) -> str:
        """What is summed before it is scaled, and how much of it."""
        return f"{'scales' if self.weight.taken_off(self.tile.token_tiles) else 'corrects'} sums of {self.step}"

    @property
    def tiles_of_q(self) -> tuple[int, int]:
        """Blocks of 16 features by k tiles; the other way round if wgmma reads them, blocks side by side."""
        found = (self.tile.features // 16, self.tile.slice)
        return found[::-1] if self.weight.from_shared else found

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type by operand."""
        tile = self.tile
        blocks = tile.features // 16
        shapes = {
            "x": (tile.x_shape, self.weight.staged_x),
            "q": ((*self.tiles_of_q, *words_of(self.weight.unit_bits)), "uint32"),
        }
        for role, dtype in self.weight.grouped.items():
            size = BYTES[dtype] if self.weight.uniform else group_bytes(dtype)
            shapes[role] = ((blocks, self.steps, size), "uint8")
        if self.weight.token_scale:
            shapes["token_scale"] = ((self.steps, 4 * tile.tokens), "uint8")
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
        return -(-end // self.tile.swizzle) * self.tile.swizzle


def group_bytes(dtype: str) -> int:
    """Bytes of one group of 16 features."""
    return 8 if dtype in NIBBLES else 16 * BYTES[dtype]


def pool_bytes(weight: Weight, tile: Tile) -> int:
    return table_start(weight, tile) + weight.table_bytes(tile.looks_up_pairs)


def table_start(weight: Weight, tile: Tile) -> int:
    """The weight's table lies behind the stages, and later the partial sums in their place."""
    return max(tile.teams * tile.stages * Stage(weight, tile).offset(), 4 * math.prod(tile.partials))


def fitted(weight: Weight, tile: Tile, shared: int = SHARED) -> Tile | None:
    """The tile with as many stages, then as long slices, as fit into so many bytes of shared memory; None if none do."""
    while pool_bytes(weight, tile) > shared:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.slice > 1:
            tile = replace(tile, slice=tile.slice // 2)
        else:
            return None
    return tile


@dataclass(frozen=True)
class View:
    """One operand in the stages of the thread's team."""

    buffer: tirx.Buffer  # [team, stage, number]
    team: tirx.Expr
    start: int
    shape: tuple[int, ...]
    base: tirx.Expr | None  # shared address of the team's stages, if it is kept in a register

    def index(self, stage, *index) -> list:
        flat = 0
        for i, extent in zip(index, self.shape, strict=True):
            flat = flat * extent + i
        return [self.team, stage, self.start + flat]

    def ptr(self, stage, *index):
        *_, number = position = self.index(stage, *index)
        if self.base is None:
            return self.buffer.ptr_to(position)
        return self.base + T.cast(stage * (int(self.buffer.shape[2]) * self.item) + number * self.item, "uint32")

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return tvm.DataType(self.buffer.dtype).itemsize


@dataclass(frozen=True)
class KeptView(View):
    """The same with some places of the thread in registers: the compiler would compute them anew in every round."""

    kept: list[tuple[tirx.Expr, tirx.Expr]] = field(default_factory=list)  # number within a stage, register of bytes

    def keep(self, *index):
        """Keep a place that others are at constant distances from."""
        *_, number = self.index(0, *index)
        place = T.alloc_local([1], "uint32")
        ptx("mov.b32", place[0], T.cast(number * self.item, "uint32"))  # what asm returns is not computed again
        self.kept.append((number, place[0]))

    def ptr(self, stage, *index):
        *_, number = self.index(stage, *index)
        for other, place in self.kept:
            apart = ANALYZER.simplify(number - other)
            if isinstance(apart, tirx.IntImm):
                start = self.base + T.cast(stage * (int(self.buffer.shape[2]) * self.item), "uint32")
                return start + place + T.uint32(int(apart) * self.item)
        raise AssertionError(f"no place is kept from which {number} is at a constant distance")


def declare_views(k: Kernel, base=None) -> dict[str, View]:
    """The stages, by operand."""
    stage, views = Stage(k.weight, k.tile), {}
    for operand, (shape, dtype) in stage.shapes.items():
        item = ITEM_BYTES[dtype]
        buffer = k.shared((k.tile.rings, k.tile.stages, stage.offset() // item), dtype)
        views[operand] = View(
            buffer, k.team if k.tile.rings > 1 else T.int32(0), stage.offset(operand) // item, shape, base
        )
    return views


class FillCodes:
    """16-byte pieces of blocks, 16 features by 64 of k: a warp takes a block, a lane every 32nd piece."""

    def __init__(self, k: Kernel, view, first):
        self.k, self.view = k, view
        warp = k.team_thread // 32
        self.f, self.i = warp // k.tile.slice, warp % k.tile.slice
        self.position = register("int32", first)
        self.words = 32 * k.weight.unit_bits  # of a block
        block = wide(k.o0 + self.f) * self._row() + wide(first + self.i)
        self.offset = register("int64", block * self.words + wide(k.lane * 4))
        self.policy = evict_first() if k.tile.tokens <= READ_ONCE else None

    def _row(self):
        return ceildiv(wide(self.k.K), 64)

    def start(self, slot):
        k, tile = self.k, self.k.tile
        with T.If(tirx.all(k.o0 + tile.features // 16 <= k.o_tiles, self.position[0] + tile.slice <= k.k_tiles)):
            with T.Then():
                self._start(slot, whole=True)
            with T.Else():
                self._start(slot, whole=False)

    def _start(self, slot, whole: bool):
        k, tile = self.k, self.k.tile
        warps, blocks = tile.team_threads // 32, tile.features // 16 * tile.slice
        lots, rest = divmod(self.words // 4, 32)
        for n in range(-(-blocks // warps)):
            f, i = divmod(n * warps, tile.slice)
            inside = tirx.all(k.o0 + self.f + f < k.o_tiles, self.position[0] + self.i + i < k.k_tiles)
            for lot in range(lots + (rest > 0)):
                source = k.q.ptr_to([0, 0, 0, self.offset[0] + ((f * self._row() + i) * self.words + 128 * lot)])
                exists = None if warps <= blocks else k.team_thread < 32 * blocks
                if lot == lots:
                    exists = k.lane < rest if exists is None else tirx.all(exists, k.lane < rest)
                target = self.view.ptr(slot, self.f + f, self.i + i, 0, k.lane * 4 + 128 * lot)
                _copy(target, source, 16, None if whole else inside, exists, self.policy)

    def advance(self, tiles: int):
        assign(self.position, 0, self.position[0] + tiles)
        assign(self.offset, 0, self.offset[0] + tiles * self.words)


def copied(weight: Weight, role: str) -> bool:
    """Whether a role's numbers are copied by cp.async, which has no fewer than 4 bytes; others are loaded and stored."""
    if role == "token_scale":
        return BYTES[weight.token_scale] == 4
    return weight.place(role) is None or BYTES[weight.grouped[role]] == 4


def fill_of(k: Kernel, role: str, view, first):
    """The copies of a role's numbers: scales, zeros or offsets."""
    return (FillShared if k.weight.place(role) else FillGroups)(k, role, view, first)


class FillGroups:
    """Pieces of up to 16 bytes of the scales or zeros of 16 features and one group."""

    def __init__(self, k: Kernel, role: str, view, first):
        self.k, self.view, self.source, self.dtype = k, view, k.grouped[role], k.weight.grouped[role]
        self.stage = Stage(k.weight, k.tile)
        self.width = min(16, group_bytes(self.dtype))
        self.pieces = group_bytes(self.dtype) // self.width
        self.numbers = math.prod(int(n) for n in self.source.shape[2:])  # numbers of one group
        item = k.filler
        self.f = item // (self.stage.steps * self.pieces)
        self.step, self.piece = item // self.pieces % self.stage.steps, item % self.pieces
        self.position = register("int32", first * 64 + self.step * self.stage.step)
        offset = wide(k.o0 + self.f) * self._row() + wide(self.piece * (self.numbers // self.pieces))
        self.offset = T.alloc_local([1], "int64")
        ptx("mov.b64", self.offset[0], offset)  # what asm returns is kept, not computed again in every round

    def _row(self):
        return self.source.shape[1] * self.numbers

    def start(self, slot):
        k, threads, steps = self.k, self.k.tile.fillers, self.stage.steps
        total = k.tile.features // 16 * steps * self.pieces
        for n in range(-(-total // threads)):
            f, rest = divmod(n * threads, steps * self.pieces)
            step = rest // self.pieces
            position = self.position[0] + step * self.stage.step
            g = T.cast(position, "uint32") // T.uint32(k.weight.group) if k.weight.group else T.int32(0)
            zeros = [0] * (len(self.source.shape) - 1)
            source = self.source.ptr_to([*zeros, self.offset[0] + f * self._row() + wide(g) * self.numbers])
            inside = tirx.all(k.o0 + self.f + f < k.o_tiles, position < k.K)
            target = self.view.ptr(slot, self.f + f, self.step + step, self.piece * self.width)
            _copy(target, source, self.width, inside, None if total >= threads else k.filler < total)

    def advance(self, tiles: int):
        assign(self.position, 0, self.position[0] + tiles * 64)


class FillShared:
    """Scales, zeros or offsets as they are declared, a row for so many features: every thread of a stage brings some to
    where its features look for theirs. They are few: after the first of a line, the L1 cache has the others.
    """

    def __init__(self, k: Kernel, role: str, view, first):
        self.k, self.view, self.source, self.dtype = k, view, k.grouped[role], k.weight.grouped[role]
        self.role, self.place, self.stage = role, k.weight.place(role), Stage(k.weight, k.tile)
        self.position = register("int32", first * 64)
        self.bytes = group_bytes(self.dtype) // (8 if self.dtype in NIBBLES else 16)

    def start(self, slot):
        k, threads, steps = self.k, self.k.tile.fillers, self.stage.steps
        numbers = 1 if k.weight.uniform else group_bytes(self.dtype) // self.bytes
        total = k.tile.features // 16 * steps * numbers
        words = k.shared((k.tile.rings, k.tile.stages, self.stage.offset() // self.bytes), str(self.source.dtype))
        for n in range(-(-total // threads)):
            item = n * threads + k.filler
            f, step, number = item // (steps * numbers), item // numbers % steps, item % numbers
            first = (k.o0 + f) * 16
            at = self.view.index(slot, f, step, number * self.bytes)
            at[2] = at[2] // self.bytes
            if copied(k.weight, self.role):
                source = self.source.ptr_to(self._place(first + number % 2 * 8 + number // 2, step))
                _copy(self.view.ptr(slot, f, step, number * 4), source, 4, None, item < total)
                continue
            with when(item < total):
                if self.dtype in NIBBLES:
                    value = self._value(first + number, step) | self._value(first + 8 + number, step) << T.uint8(4)
                else:
                    value = self._value(first + number % 2 * 8 + number // 2, step)
                T.buffer_store(words, value, at)

    def _value(self, feature, step):
        return self.source[tuple(self._place(feature, step))]

    def _place(self, feature, step) -> list:
        """Where the number of a feature in a step is, both within the weight."""
        k, own = self.k, self.k.block_outputs
        if k.parts > 1:  # which is of another part than its neighbours
            feature = feature % 16 // own * k.N + tirx.min(feature // 16 * own + feature % own, k.N - 1)
        else:
            feature = tirx.min(feature, k.N - 1)
        row = feature // self.place.features if self.place.features else T.int32(0)
        position = tirx.min(self.position[0] + step * self.stage.step, k.K - 1)
        return [wide(row), wide(position // self.place.inputs if self.place.inputs else T.int32(0))]

    def advance(self, tiles: int):
        assign(self.position, 0, self.position[0] + tiles * 64)


def whole_rows(k: Kernel):
    """Whether the scales of tokens in shared memory are those in global memory, whose rows begin on 16 bytes: then they are
    copied row by row, and no warp has to do so number by number, which was measured to slow down those who multiply."""
    if not copied(k.weight, "token_scale"):
        return T.bool(False)
    base = T.alloc_local([1], "uint64")
    ptx("cvta.to.global.u64", base[0], k.token_scale.ptr_to([T.int64(0), T.int64(0)]))
    return tirx.all(k.M % 4 == 0, base[0] % T.uint64(16) == T.uint64(0))


class FillTokenScales:
    """The scales of a stage's tokens and groups, [k // group, m], a copy for each: as float32, powers of two as well.

    whole  whether TMA copies whole rows instead; None: it never does
    """

    def __init__(self, k: Kernel, view, first, whole=None):
        self.k, self.view, self.stage = k, view, Stage(k.weight, k.tile)
        self.position = register("int32", first * 64)
        self.whole = None if whole is None else register("int32", T.cast(whole, "int32"))

    def start(self, slot):
        with nullcontext() if self.whole is None else when(self.whole[0] == 0):
            self._start(slot)

    def _start(self, slot):
        k, tile = self.k, self.k.tile
        total = tile.tokens * self.stage.steps
        for n in range(-(-total // tile.fillers)):
            item = n * tile.fillers + k.filler
            step, token = item // tile.tokens, item % tile.tokens
            group = tirx.min(self.position[0] + step * self.stage.step, k.K - 1) // k.weight.group
            place = [wide(group), wide(tirx.min(k.m0 + token, k.M - 1))]
            exists = None if total % tile.fillers == 0 else item < total
            if copied(k.weight, "token_scale"):
                _copy(self.view.ptr(slot, step, token * 4), k.token_scale.ptr_to(place), 4, None, exists)
                continue
            held = k.shared((tile.rings, tile.stages, self.stage.offset() // 4), "float32")
            at = self.view.index(slot, step, token * 4)
            at[2] = at[2] // 4
            with when(item < total):
                T.buffer_store(
                    held, small_float(k.weight.token_scale, T.cast(k.token_scale[tuple(place)], "uint32")), at
                )

    def advance(self, tiles: int):
        assign(self.position, 0, self.position[0] + tiles * 64)


class FillTokens:
    """Pieces of eight numbers of a row of x; number by number if the pieces are not aligned.

    Piece c of row r is stored as piece c ^ (r % 8): the 8 rows that ldmatrix reads at once are in different
    banks, and no row leaves its 128-byte lines. Where r = r0 + r1 without carries, as below, that is
    (c ^ r0 % 8) ^ (r1 % 8).
    """

    def __init__(self, k: Kernel, view, first):
        self.k, self.view = k, view
        self.pieces = 8 * k.tile.slice
        self.r, self.c = k.team_thread // self.pieces, k.team_thread % self.pieces
        self.column = register("int32", first * 64 + self.c * 8)
        self.offset = register("int64", wide(k.m0 + self.r) * wide(k.K) + wide(self.column[0]))

    def start(self, slot):
        if self.k.weight.unit > 1:  # rows of bytes always are
            return self._start_pieces(slot)
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
            source = k.x.ptr_to([0, (self.offset[0] + (r * wide(k.K) + c * 8)) * k.weight.unit])
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
            number = k.x[wide(k.m0 + r), wide(first + c)]
            value = T.if_then_else(inside, number, tirx.const(0, k.weight.compute))
            T.buffer_store(self.view.buffer, value, self.view.index(slot, r, c ^ (r % 8 * 8)))

    def advance(self, tiles: int):
        assign(self.column, 0, self.column[0] + tiles * 64)
        assign(self.offset, 0, self.offset[0] + tiles * 64)


def evict_first():
    """A cache policy for what is read once: the first to leave the L2 cache.

    What createpolicy.fractional.L2::evict_first makes of the fraction 1. As a constant it costs no registers and, at
    every copy, no two instructions that move it to where copies expect it.
    """
    return T.uint64(0x12F0000000000000)


def _copy(target, source, width: int, inside, exists, policy=None):
    """cp.async of `width` bytes, or of zeros unless `inside`; none at all unless `exists` (None: it does)."""
    size = [] if inside is None else [T.if_then_else(inside, T.uint32(width), T.uint32(0))]
    options = {} if exists is None else {"pred": exists}
    cache = "cg" if width == 16 else "ca"
    hint, policy = ("", []) if policy is None else (".L2::cache_hint", [policy])
    ptx(f"cp.async.{cache}.shared.global{hint}", target, source, width, *size, *policy, **options)
