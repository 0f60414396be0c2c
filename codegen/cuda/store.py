"""Accumulators of warpgroups -> y: through shared memory, so that neighbouring threads store along a row of y."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, register, when, wide
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.reduce import Epilogue
from qdsl.codegen.cuda.stage import Stage
from qdsl.codegen.tir import dtype_of

FINISHED = 128  # tokens whose sums go through the epilogue at once: those of twice as many have no room beside the sums
PITCH = 64 * 2 + 16  # bytes of a staged token: 64 features, and padding that puts 8 rows into different banks


def staging_bytes(tile) -> int:
    return tile.consumers // 128 * tile.stored * PITCH


def partial_bytes(tile) -> int:
    return 4 * math.prod(tile.partials)


class Direct:
    """The end of a part whose sums a warpgroup has all of: epilogue, rounding, and some tokens at a time to y.

    What the epilogue loads for one feature or one token is asked for before the part is multiplied. What belongs to the
    rows of a thread's sums stays in its registers; what belongs to columns, it gets from the others, each of which asked
    for that of one column in 128.

    A persistent kernel stages y behind the ring, which is being filled for the next part; others over it.
    """

    def __init__(self, k: Kernel, epilogue: Epilogue, buffers: Mapping[str, tirx.Buffer]):
        self.k, self.tile, self.epilogue, self.buffers = k, k.tile, epilogue, buffers
        self.group, self.warp = k.thread // 128, k.thread // 32 % 4
        self.kept: dict[tuple, tirx.Expr] = {}  # (name, id of its token or feature) -> its number
        self.asked: dict[str, tirx.Buffer] = {}  # by name: of every 128th column
        first = self.tile.stages * Stage(k.weight, k.tile).offset() // 2 if k.tile.persistent else 0
        self.staging = k.shared((first + staging_bytes(k.tile) // 2,), k.weight.compute)
        self.own = first + self.group * (k.tile.stored * PITCH // 2)  # the warpgroup's
        self._ask()

    def store(self, acc, y) -> None:
        if not self.tile.persistent:
            ptx("bar.sync", T.uint32(15), T.uint32(self.tile.consumers))  # nobody reads the ring any more
        self._store(acc, y)

    # ---- rows are features, columns tokens ------------------------------------------------------------------------
    def _ask(self) -> None:
        k = self.k
        self.features = {}
        for f in range(k.tile.blocks):
            for h in range(k.block_outputs // 8):
                n = self._first(f) + self.warp * k.block_outputs + k.lane // 4 + 8 * h
                self.features[f, h] = k.features(tirx.min(n, k.N - 1))
                self._keep("n", self.features[f, h], lambda name, n: self._load(name, T.int64(0), n))
        for first in range(0, k.tile.tokens, 128):
            m = wide(tirx.min(k.m0 + first + k.thread % 128, k.M - 1))
            self._ask_columns("m", first // 128, lambda name, m=m: self._load(name, m, T.int64(0)))

    def _first(self, f: int):
        """Block f's first feature of y."""
        return (self.k.o0 + (self.group * self.tile.blocks + f) * 4) * self.k.block_outputs

    def _store(self, acc, y) -> None:
        k, tile = self.k, self.tile
        for f in range(tile.blocks):
            for token in range(0, tile.tokens, tile.stored):
                if token % FINISHED == 0:
                    pairs = self._finished(acc, f, token)
                count = min(tile.stored, tile.tokens - token)
                with when(k.stores(k.m0 + token, count)):
                    self._sync()  # the tokens staged before have been read
                    for some in range(0, count, 16):  # the four matrices of one stmatrix
                        self._stage(pairs, token % FINISHED + some, min(16, count - some), some * (PITCH // 2))
                    self._sync()
                    self._store_rows(k.m0 + token, self._first(f), count, y)

    def _finished(self, acc, f: int, token: int):
        """Block f of up to 128 tokens as numbers of y, two tokens in a register: [token tile, feature c or c + 8].

        All at once: what the epilogue loads is then on its way together, for no barrier is in between.
        """
        k, across, count = self.k, self.k.block_outputs // 8, min(FINISHED, self.tile.tokens - token)
        places = [token + 8 * i + k.lane % 4 * 2 + p for i in range(count // 8) for p in range(2)]
        tokens = [wide(tirx.min(k.m0 + place, k.M - 1)) for place in places]
        self._keep_columns(token // 128, [[m] for m in tokens])
        pairs = T.alloc_local([across * count // 8], "uint32")
        for i in range(count // 8):
            for h in range(across):
                values = []
                for p in range(2):
                    first = (f * self.tile.tokens + token) // 2 + 4 * i + 2 * h + p
                    sums = [k.weight.finished(acc[first + 2 * part]) for part in range(k.parts)]
                    values.append(self._finish(sums, tokens[2 * i + p], self.features[f, h]))
                ptx(f"cvt.rn.{k.weight.half.ptx}x2.f32", pairs[across * i + h], values[1], values[0])
        return pairs

    def _stage(self, pairs, token: int, count: int, place: int) -> None:
        """Tokens token .. token + count of those finished to the staging, from `place` on.

        A warp holds matrices of 8 features x 8 tokens, neighbouring tokens in a register; stmatrix with .trans stores them
        as rows of 8 features. Lane l names row l % 8 of matrix l // 8: token tile l // 16, features 8 (l // 8 % 2) on; where
        the two parts of features make one matrix, token tile l // 8.
        """
        lane, own = self.k.lane, self.k.block_outputs
        across = own // 8
        matrices, first = across * (count // 8), across * (token // 8)
        tile = lane // (8 * across) if matrices > across else 0
        at = (tile * 8 + lane % 8) * (PITCH // 2) + self.warp * own + (lane // 8 % 2 * 8 if across > 1 else 0)
        address = self.staging.ptr_to([self.own + place + at])
        stored = (pairs[first + r] for r in range(matrices))
        ptx(f"stmatrix.sync.aligned.m8n8.x{matrices}.trans.shared.b16", address, *stored)

    # ---- what the epilogue loads ----------------------------------------------------------------------------------
    def _of(self, axis: str) -> list[str]:
        return [name for name, axes in self.epilogue.axes.items() if axes == axis]

    def _load(self, name: str, m, n):
        return self.epilogue.load(self.buffers, name, m, n)

    def _keep(self, axis: str, places, load) -> None:
        """The numbers of some places of a row."""
        for name in self._of(axis):
            for at in places:
                value = load(name, at)
                self.kept[name, id(at)] = register(dtype_of(value), value)[0]

    def _ask_columns(self, axis: str, part: int, load) -> None:
        """The thread's column of columns 128 part .., of as many tensors as the staging has room for.

        Integers, and tensors beyond those, are loaded where they are needed.
        """
        for name in self._of(axis):
            value = load(name)
            room = name in self.asked or (len(self.asked) + 1) * 4 * FINISHED <= self.tile.stored * PITCH
            if dtype_of(value) == "float32" and room:
                if name not in self.asked:
                    self.asked[name] = T.alloc_local([-(-self.tile.tokens // 128)], "float32")
                assign(self.asked[name], part, value)

    def _keep_columns(self, part: int, pairs) -> None:
        """What was asked for columns 128 part .., from thread to thread.

        pairs  of the lane's columns, two and two: places that share a number
        """
        if not self.asked:
            return
        k, start = self.k, self.own // 2
        shared = k.shared((start + len(self.asked) * FINISHED,), "float32")
        self._sync()
        for at, asked in enumerate(self.asked.values()):
            T.buffer_store(shared, asked[part], [start + at * FINISHED + k.thread % 128])
        self._sync()
        for at, name in enumerate(self.asked):
            numbers = T.alloc_local([len(pairs)], "float32")
            for i in range(0, len(pairs), 2):
                place = start + at * FINISHED + 4 * i + k.lane % 4 * 2
                ptx("ld.shared.v2.f32", numbers[i], numbers[i + 1], shared.ptr_to([place]))
                for p in range(2):
                    self.kept.update({(name, id(place)): numbers[i + p] for place in pairs[i + p]})

    def _finish(self, sums, m, features):
        def number(name: str, m, n):
            found = self.kept.get((name, id({"m": m, "n": n}.get(self.epilogue.axes[name]))))
            return self._load(name, m, n) if found is None else found

        return self.epilogue.finish(sums, m, features, number)

    def _sync(self) -> None:
        ptx("bar.sync", T.cast(self.group + 2, "uint32"), T.uint32(128))  # 1 is for all consumers

    # ---- to y -----------------------------------------------------------------------------------------------------
    def _store_rows(self, m0, n0, tokens: int, y) -> None:
        """Staged tokens to y[m0 .., n0 .. n0 + 64 or 32], in pieces of eight features."""
        k, staging = self.k, self.staging
        pieces = 8 // k.parts
        rows, piece = 128 // pieces, k.thread % 128
        row, column = piece // pieces, piece % pieces * 8
        words, base = T.alloc_local([4], "uint32"), T.alloc_local([2], "uint64")
        ptx("cvta.to.global.u64", base[0], y.ptr_to([T.int64(0), T.int64(0)]))
        aligned = tirx.all(k.N % 8 == 0, base[0] % T.uint64(16) == T.uint64(0))
        inside = tirx.all(m0 + tokens <= k.M, n0 + 8 * pieces <= k.N)
        if k.first is not None:
            inside = tirx.all(inside, m0 >= k.first)

        def at(i):
            return self.own + (row + i * rows) * (PITCH // 2) + column

        with T.If(tirx.all(aligned, inside)):
            with T.Then():
                ptx("cvta.to.global.u64", base[1], y.ptr_to([wide(m0 + row), wide(n0 + column)]))
                for i in range(-(-tokens // rows)):
                    with when(row < tokens) if tokens < rows else nullcontext():
                        ptx("ld.shared.v4.b32", *(words[r] for r in range(4)), staging.ptr_to([at(i)]))
                        far = T.cast(k.N, "uint64") * T.uint64(2 * i * rows)
                        ptx("st.global.v4.b32", base[1] + far, *(words[r] for r in range(4)))
            with T.Else(), T.serial(0, -(-tokens // rows), unroll=False) as i:
                m, n = m0 + row + i * rows, n0 + column
                with when(tirx.all(row + i * rows < tokens, k.stores(m), n < k.N)), T.If(aligned):
                    with T.Then():
                        ptx("ld.shared.v4.b32", *(words[r] for r in range(4)), staging.ptr_to([at(i)]))
                        ptx("st.global.v4.b32", y.ptr_to([wide(m), wide(n)]), *(words[r] for r in range(4)))
                    with T.Else(), T.serial(0, 8, unroll=False) as j, when(n + j < k.N):
                        T.buffer_store(y, staging[at(i) + j], [wide(m), wide(n + j)])


class Turned(Direct):
    """The same where rows are tokens, 64 of every `span`, and columns all features of the CTA."""

    def _ask(self) -> None:
        k = self.k
        rows = [self.tile.span * part + 64 * self.group + 16 * self.warp + k.lane // 4 + 8 * h
                for part in range(self.tile.tokens // self.tile.span) for h in range(2)]  # fmt: skip
        self.tokens = [wide(tirx.min(k.m0 + row, k.M - 1)) for row in rows]
        self._keep("m", self.tokens, lambda name, m: self._load(name, m, T.int64(0)))
        n = wide(self._feature(k.thread % k.outputs)) + wide(k.N) * wide(k.thread % 128 // k.outputs)
        self._ask_columns("n", 0, lambda name: self._load(name, T.int64(0), n))

    def _feature(self, output):
        """Of y, for one of the CTA."""
        return tirx.min(self.k.o0 * self.k.block_outputs + output, self.k.N - 1)

    def _store(self, acc, y) -> None:
        k, width = self.k, 64 // self.k.parts
        columns = [self._feature(8 * i + k.lane % 4 * 2 + p) for i in range(k.outputs // 8) for p in range(2)]
        features = [k.features(n) for n in columns]
        self._keep_columns(0, [[own[part]] for part in range(k.parts) for own in features])
        for part in range(self.tile.tokens // self.tile.span):
            pairs, m0 = self._finished_rows(acc, part, features), k.m0 + self.tile.span * part + 64 * self.group
            for first in range(0, k.outputs, width):  # with no branch around barriers that a warp alone would take
                self._sync()
                for octet in range(first // 8, (first + width) // 8, 2):
                    self._stage_rows(pairs, octet, first)
                self._sync()
                self._store_rows(m0, k.o0 * k.block_outputs + first, 64, y)

    def _finished_rows(self, acc, part: int, features):
        """As numbers of y, two neighbouring features in a register: [eight features, token c or c + 8]."""
        k, octets = self.k, self.k.outputs // 8
        pairs, start = T.alloc_local([2 * octets], "uint32"), part * self.tile.features // 2
        for i in range(octets):
            for h in range(2):
                values = []
                for p in range(2):
                    places = (start + 4 * (k.parts * i + own) + 2 * h + p for own in range(k.parts))
                    sums = [k.weight.finished(acc[place]) for place in places]
                    values.append(self._finish(sums, self.tokens[2 * part + h], features[2 * i + p]))
                ptx(f"cvt.rn.{k.weight.half.ptx}x2.f32", pairs[2 * i + h], values[1], values[0])
        return pairs

    def _stage_rows(self, pairs, octet: int, first: int) -> None:
        """Two times eight features of the warp's 16 tokens. Lane l names token l % 16 and eight features l // 16."""
        lane = self.k.lane
        at = (16 * self.warp + lane % 16) * (PITCH // 2) + 8 * octet - first + lane // 16 * 8
        address = self.staging.ptr_to([self.own + at])
        stored = (pairs[2 * octet + r] for r in range(4))
        ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16", address, *stored)
