"""Accumulators -> y: partial sums through shared memory, added, through the epilogue, rounded once.

The sums of a CTA's teams are added first, team by team; then those of a cluster's CTAs, rank by rank: each CTA reads
its part of y out of the others' shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import assign, ptx, when, wide
from qdsl.codegen.cuda.kernel import Kernel

Load = Callable[[str, tirx.Expr, tirx.Expr], tirx.Expr]  # (a tensor's name, m, the weight's feature) -> its number


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the sums of a number of y.

    finish  (a sum for each part of the weight's features, m, the weight's feature of each, load) -> y[m, the first feature]
    load    (extra buffers, a tensor's name, m, the weight's feature) -> its number
    axes    what a tensor has numbers for, by name: every token "m", feature "n", both "mn"
    correct (m, load) -> the whole number of which a token's sums lack so many times the sum of the feature's codes
    """

    finish: Callable[[Sequence[tirx.Expr], tirx.Expr, Sequence[tirx.Expr], Load], tirx.Expr]
    load: Callable[[Mapping[str, tirx.Buffer], str, tirx.Expr, tirx.Expr], tirx.Expr]
    axes: Mapping[str, str] = field(default_factory=dict)
    correct: Callable[[tirx.Expr, Load], tirx.Expr] | None = None

    def __call__(self, sums, m, features, buffers) -> tirx.Expr:
        return self.finish(sums, m, features, lambda name, m, n: self.load(buffers, name, m, n))

    def correction(self, m, buffers) -> tirx.Expr:
        """`correct` of a token."""
        assert self.correct is not None
        return self.correct(m, lambda name, m, n: self.load(buffers, name, m, n))


SUM = Epilogue(lambda sums, m, features, load: sums[0], lambda buffers, name, m, n: buffers[name][m, n])


def store_partials(k: Kernel, acc, summed=None):
    """Every warp's accumulators to [team, token, feature], in a place of their own or where the stages were.

    summed  whether the team has a share of k; where it has none, zeros are stored
    """
    tile = k.tile
    _sync(k)  # all teams are done with the stages
    partials = _partials(k)
    for f in range(tile.feature_tiles):
        for j in range(tile.token_tiles):
            for i in tile.result:
                row, column = i // 2 * 8 + k.lane // 4, j * 8 + k.lane % 4 * 2 + i % 2
                token, feature = k.token_warp * (8 * tile.token_tiles) + column, k.block(f) * 16 + row
                if tile.turned:
                    part = 8 * j // tile.features
                    token, feature = tile.span * part + k.thread // 32 * 16 + row, column - part * tile.features
                value = acc[4 * (f * tile.token_tiles + j) + i]
                if tile.correct == "sums":
                    value = value * T.float32(1 / k.weight.factor(i // 2))
                if summed is not None:
                    value = T.if_then_else(summed, value, tirx.const(0, k.weight.sums))
                if tile.tokens >= 8:
                    T.buffer_store(partials, value, [k.team, token, feature])
                else:
                    with when(token < tile.tokens):
                        T.buffer_store(partials, value, [k.team, token, feature])
    _sync(k)


def _partials(k: Kernel):
    return k.shared(k.tile.partials, k.weight.sums, k.partials)


def _sync(k: Kernel):
    """A barrier of the threads that have sums, those with the lowest numbers."""
    if k.tile.consumers == k.tile.threads:
        T.evaluate(T.cuda.cta_sync())
    else:
        ptx("bar.sync", T.uint32(1), T.uint32(k.tile.consumers))


def reduce(k: Kernel, cluster: int, epilogue: Epilogue, buffers, y):
    """Adds the partial sums, which are stored, applies the epilogue, rounds. A thread takes four features at a time.

    cluster  CTAs that share k
    """
    tile, threads = k.tile, k.tile.consumers
    partials, items = _partials(k), tile.tokens * k.outputs // 4
    if cluster == 1 or tile.teams > 1:
        for some in _items(k, T.int32(0), items, threads):
            places = [[partials.ptr_to([0, item.token, feature]) for feature in item.features] for item in some]
            totals = [
                [
                    _sum(k, "ld.shared", [partials.ptr_to([team, item.token, f]) for team in range(tile.teams)])
                    for f in item.features
                ]
                for item in some
            ]
            for item, own, sums in zip(some, places, totals, strict=True):
                with _inside(some, item):
                    for place, total in zip(own, sums, strict=True):
                        if cluster > 1:
                            ptx(f"st.shared.v4.{BITS[k.weight.sums]}", place, *(total[j] for j in range(4)))
                    if cluster == 1:
                        _store(k, epilogue, buffers, sums, item.m, item.n, y)
    if cluster == 1:
        return
    _cluster_sync()
    base, bases = T.cuda.cvta_generic_to_shared(partials.ptr_to([0, 0, 0])), T.alloc_local([cluster], "uint32")
    for rank in range(cluster):
        ptx("mapa.shared::cluster.u32", bases[rank], base, T.uint32(rank))
    for some in _items(k, k.rank * (items // cluster), items // cluster, threads):
        totals = []
        for item in some:
            places = [T.cast((item.token * tile.partials[2] + feature) * 4, "uint32") for feature in item.features]
            totals.append(
                [_sum(k, "ld.shared::cluster", [bases[rank] + at for rank in range(cluster)]) for at in places]
            )
        for item, sums in zip(some, totals, strict=True):
            with _inside(some, item):
                _store(k, epilogue, buffers, sums, item.m, item.n, y)
    _cluster_sync()  # nobody leaves while its sums are read


def _cluster_sync():
    ptx("barrier.cluster.arrive.release.aligned")
    ptx("barrier.cluster.wait.acquire.aligned")


@dataclass(frozen=True)
class _Item:
    """Four features of a token: where their sums are in each part of the weight's features, and which number of y."""

    token: tirx.Expr
    features: list
    m: tirx.Expr
    n: tirx.Expr
    inside: tirx.Expr  # of y


def _inside(some: list[_Item], item: _Item):
    """Only where an item of several is inside of y; of one, that has been asked for before."""
    return when(item.inside) if len(some) > 1 else nullcontext()


def _items(k: Kernel, first, count: int, threads: int):
    """Items first .. first + count of the CTA's part of y, dealt to the threads.

    Yields, once, inside the loop, those that a thread takes together: what another CTA sends takes its time, and so all of it
    is asked for before any is used.
    """
    row, own = k.outputs // 4, k.block_outputs
    rounds = -(-count // threads)
    together = next(size for size in (4, 2, 1) if rounds % size == 0 and (size == 1 or count % threads == 0))
    with T.serial(0, rounds // together) as i:
        some = []
        for j in range(together):
            item = (i * together + j) * threads + k.thread
            token, output = (first + item) // row, (first + item) % row * 4
            m, n = k.m0 + token, k.o0 * own + output
            features = (
                [output // own * 16 + output % own + own * part for part in range(k.parts)] if k.parts > 1 else [output]
            )
            some.append(_Item(token, features, m, n, tirx.all(item < count, k.stores(m), n < k.N)))
        with when(some[0].inside) if together == 1 else nullcontext():
            yield some


BITS = {"float32": "f32", "uint32": "b32"}


def _sum(k: Kernel, load: str, addresses):
    """The sum of four numbers from every address, in order."""
    sums = k.weight.sums
    total, parts = T.alloc_local([4], sums), T.alloc_local([4 * len(addresses)], sums)
    for i, address in enumerate(addresses):
        ptx(f"{load}.v4.{BITS[sums]}", *(parts[4 * i + j] for j in range(4)), address)
    for j in range(4):
        value = parts[j]
        for i in range(1, len(addresses)):
            value = value + parts[4 * i + j]
        assign(total, j, value)
    return total


def _store(k: Kernel, epilogue, buffers, totals, m, n, y):
    """y[m, n : n + 4], as one store where the rows of y are aligned for it."""
    dtype, words = str(y.dtype), 4 if str(y.dtype) == "float32" else 2
    values = [
        epilogue([k.weight.finished(total[j]) for total in totals], wide(m), k.features(n + j), buffers)
        for j in range(4)
    ]
    packed = T.alloc_local([words], "uint32")
    base = T.alloc_local([1], "uint64")
    ptx("cvta.to.global.u64", base[0], y.ptr_to([T.int64(0), T.int64(0)]))
    with T.If(tirx.all(k.N % 4 == 0, base[0] % T.uint64(4 * words) == T.uint64(0))):
        with T.Then():
            for j in range(words):
                if words == 4:
                    assign(packed, j, T.reinterpret("uint32", values[j]))
                else:
                    half = "f16" if dtype == "float16" else "bf16"
                    ptx(f"cvt.rn.{half}x2.f32", packed[j], values[2 * j + 1], values[2 * j])
            ptx(f"st.global.v{words}.b32", y.ptr_to([wide(m), wide(n)]), *(packed[j] for j in range(words)))
        with T.Else():
            for j in range(4):
                with when(n + j < k.N):
                    T.buffer_store(y, T.cast(values[j], dtype), [wide(m), wide(n + j)])
