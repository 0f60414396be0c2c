"""Tensor-core linear layers with weights of up to 8 bits and 16-bit compute: Weight, Tile -> tirx PrimFunc.

    y[m, n] = epilogue(sum over k of x[m, k] * (q[n, k] - zero[n, k // group]) * scale[n, k // group])

M, N and K are run-time values and every M, N, K >= 1 is right. Sums are held in float32 and rounded once; a
row's result does not depend on the other rows, nor on how many there are.

    global memory --stage--> shared memory --fragments--> registers --correct--> accumulators --reduce--> y

Each arrow is a module of that name; this one has the kernel around them and its main loop. `weight` and `tile` say
what a kernel is made for; how the codes are stored is drawn in `fragments`.

The warps of a CTA form teams. Each team has its own share of k and its own ring of cp.async stages, and waits
for no other before the partial sums are added:

    k ->   | slice 0 | slice 1 | slice 2 | slice 3 | slice 4 | ...     a slice is `Tile.slice` tiles of 64
           | team 0  | team 1  | team 0  | team 1  | team 0  | ...     one slice fills one stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, register, when, zeros
from qdsl.codegen.cuda.correct import SumStep, WeightStep
from qdsl.codegen.cuda.decode import words_of
from qdsl.codegen.cuda.fragments import load_codes, load_tokens
from qdsl.codegen.cuda.kernel import Kernel
from qdsl.codegen.cuda.mma_bytes import ByteStep
from qdsl.codegen.cuda.reduce import SUM, Epilogue, reduce, store_partials
from qdsl.codegen.cuda.stage import (
    SHARED,
    FillCodes,
    FillTokens,
    FillTokenScales,
    Stage,
    declare_views,
    fill_of,
    fitted,
    pool_bytes,
    table_start,
)
from qdsl.codegen.cuda.tile import Tile
from qdsl.codegen.cuda.weight import BYTES, NIBBLES, Weight

Extra = tuple[str, Callable, str]  # name, (M, N, K) -> shape, dtype


def tiles() -> tuple[Tile, ...]:
    """The default tiles, by rising number of tokens they are meant for; which serves what is measured (`measured`)."""
    return (
        Tile("m1_short", "sums", tokens=1, features=16, split=(1, 1, 8), slice=4, stages=3, resident=3),
        Tile("m1", "sums", tokens=1, features=32, split=(1, 1, 8), slice=4, stages=2, resident=2),
        Tile("m8", "sums", tokens=8, features=32, split=(1, 1, 4), slice=4, stages=2, resident=2),
        Tile("m16", "sums", tokens=16, features=32, split=(1, 1, 8), slice=2, stages=2, resident=2),
        Tile("m32", "weights", tokens=32, features=32, split=(1, 1, 4), slice=2, stages=3, resident=3),
        Tile("m64", "weights", tokens=32, features=64, split=(1, 1, 4), slice=2, stages=2, resident=2),
        Tile("m256", "weights", tokens=64, features=64, split=(1, 1, 4), slice=1, stages=2, resident=1),
        Tile("any", "weights", tokens=128, features=128, split=(2, 2, 1), slice=2, stages=2, resident=1),
    )


def hopper_tiles() -> tuple[Tile, ...]:
    """The tiles for few tokens on sm_90a, whose SMs hold 227 KB for two or three CTAs; `wgmma` has those for many."""
    return (
        Tile("h1", "sums", tokens=1, features=32, split=(1, 1, 8), slice=4, stages=2, resident=2),
        Tile("h8", "sums", tokens=8, features=32, split=(1, 1, 4), slice=4, stages=3, resident=2),
        Tile("h16", "sums", tokens=16, features=32, split=(1, 1, 8), slice=2, stages=2, resident=2),
        Tile("any", "weights", tokens=128, features=128, split=(2, 2, 1), slice=2, stages=2, resident=1),
    )


def lower(
    name: str,
    weight: Weight,
    tile: Tile,
    extra: Sequence[Extra] = (),
    epilogue: Epilogue = SUM,
    output: str | None = None,
    overlapped: bool = False,
    shared: int = SHARED,
    parts: int = 1,
) -> tirx.PrimFunc:
    """The kernel (x, q, [s], [z], *extra, y); y has the type `output`, by default that of x.

    overlapped  it may be launched before its predecessor has ended (`overlap`)
    shared      bytes of shared memory that a CTA can have
    parts       of the weight's features, of which each of y has one of each
    """
    small = fitted(weight, tile, shared)
    assert small is not None, f"{tile}: needs {pool_bytes(weight, tile)} bytes of shared memory"
    tile = small
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        own, others = declare(weight, parts, extra, output or weight.compute)
        T.device_entry()
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": tile.resident}):
            k = _enter(weight, tile, own, parts)
            if weight.table:
                k.store_table(tile.threads)
                T.evaluate(T.cuda.cta_sync())
            if overlapped:
                overlap.wait()
                overlap.let_in()
            steps = STEPS[tile.correct](k)
            acc = _main_loop(k, steps)
            if isinstance(steps, ByteStep) and epilogue.correct:
                steps.correct(acc, lambda m: epilogue.correction(m, others))
            store_partials(k, acc)
            reduce(k, tile.cluster, epilogue, others, own["y"])
    return builder.get()


def declare(weight, parts, extra, output):
    """Parameters -> own buffers by role, extra buffers by name. N is what y has."""
    M, N, K = (tirx.Var(v, "int64") for v in "MNK")
    units = ceildiv(K, weight.unit) if weight.unit > 1 else K
    groups, blocks = ceildiv(units, weight.group) if weight.group else 1, ceildiv(N, 16 // parts)
    shapes = {
        "x": ((M, K), weight.x_type),
        "q": ((blocks, ceildiv(K, 64 * weight.unit), *words_of(weight.unit_bits)), "uint32"),
    }
    for role, dtype in weight.grouped.items():
        tail, place = (8,) if dtype in NIBBLES else (8, 2), weight.place(role)
        dtype = "uint8" if BYTES.get(dtype, 1) == 1 else dtype
        shapes[role] = ((blocks, groups, *tail), dtype)
        if place:
            shapes[role] = (
                tuple(ceildiv(of, by) if by else 1 for of, by in ((N * parts, place.features), (units, place.inputs))),
                dtype,
            )
    if weight.token_scale:
        kind = "uint8" if BYTES[weight.token_scale] == 1 else weight.token_scale
        shapes["token_scale"] = ((ceildiv(K, weight.unit * weight.group), M), kind)
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


def _enter(weight, tile, buffers, parts: int) -> Kernel:
    """The launch grid and the names in scope on the device."""
    (M, K), N = buffers["x"].shape, buffers["y"].shape[1]
    # Tiles of tokens and features share grid x: y and z end at 65,535.
    columns = T.cast(ceildiv(N, tile.features // parts), "int32")
    cta, rank = T.cta_id([T.cast(ceildiv(M, tile.tokens), "int32") * columns * tile.cluster]), None
    if tile.cluster > 1:
        rank = T.cta_id_in_cluster([tile.cluster])
        cta = cta // tile.cluster
    thread = T.thread_id([tile.threads])
    pool = T.alloc_buffer((pool_bytes(weight, tile),), "uint8", scope="shared.dyn")
    place = T.alloc_local([2], "int32")
    with T.If(cta < columns):
        with T.Then():  # the usual case, spared the latency of a division
            assign(place, 0, 0)
            assign(place, 1, cta)
        with T.Else():
            assign(place, 0, tirx.truncdiv(cta, columns))
            assign(place, 1, tirx.truncmod(cta, columns))
    base = T.alloc_local([1], "uint64")
    ptx("cvta.to.global.u64", base[0], buffers["x"].ptr_to([T.int64(0), T.int64(0)]))
    return Kernel.of(
        weight,
        tile,
        buffers,
        m0=place[0] * tile.tokens,
        o0=place[1] * (tile.features // 16),
        thread=thread,
        aligned=((T.cast(K, "uint64") * T.uint64(2) | base[0]) & T.uint64(15)) == T.uint64(0),
        pool=pool,
        rank=rank,
        table_start=table_start(weight, tile),
        parts=parts,
    )


STEPS = {"sums": SumStep, "weights": WeightStep, "nothing": ByteStep}  # by `Tile.correct`


def _main_loop(k: Kernel, steps):
    """-> the warp's accumulators, [feature tile, token tile, register] in one array.

    Round i fills a stage with slice i and multiplies slice i - ahead. One loop does both: a kernel that runs
    for a few microseconds should not wait for a second copy of its instructions.
    """
    tile = k.tile
    views, ahead = declare_views(k, _ring(k) if tile.roomy else None), tile.stages - 1
    stride = tile.teams * tile.slice
    first, end = k.share
    first = first + k.team * tile.slice
    count = T.alloc_local([1], "int32")
    ptx("mov.b32", count[0], (end - first + (stride - 1)) // stride)  # slices of this team
    slot, other = register("int32", T.int32(0)), register("int32", T.int32(0))
    fills: list = [FillCodes(k, views["q"], first)]
    fills += [fill_of(k, role, views[role], first) for role in k.weight.grouped]
    fills.append(FillTokens(k, views["x"], first))
    if k.weight.token_scale:
        fills.append(FillTokenScales(k, views["token_scale"], first))
    acc = zeros(4 * tile.feature_tiles * tile.token_tiles, k.weight.sums)
    with T.serial(0, count[0] + ahead, unroll=False) as i:
        assign(other, 0, T.if_then_else(slot[0] == ahead, T.int32(0), slot[0] + 1))  # that of slice i - ahead
        with when(i >= ahead):
            ptx("cp.async.wait_group", ahead - 1)
            _team_sync(k)  # slice i - ahead has landed, and nobody reads the slice before it any more
        with when(i < count[0]):
            for fill in fills:
                fill.start(slot[0])
                fill.advance(stride)
        ptx("cp.async.commit_group")
        with when(i >= ahead):
            _multiply(k, views, acc, other[0], steps)
        assign(slot, 0, other[0])
    return acc


def _ring(k: Kernel):
    """Shared address of the team's stages, in a register."""
    base, ring = T.alloc_local([1], "uint32"), k.tile.stages * Stage(k.weight, k.tile).offset()
    ptx("mov.b32", base[0], T.cuda.cvta_generic_to_shared(k.pool.ptr_to([0])) + T.cast(k.team * ring, "uint32"))
    return base[0]


def _team_sync(k: Kernel):
    if k.tile.teams == 1:
        T.evaluate(T.cuda.cta_sync())
    elif k.tile.team_threads == 32:
        T.evaluate(T.cuda.warp_sync())
    else:  # barrier 0 is that of the CTA
        ptx("bar.sync", T.cast(k.team + 1, "uint32"), T.uint32(k.tile.team_threads))


def _multiply(k: Kernel, views, acc, slot, steps):
    """acc += the warp's features x tokens over one slice.

    The slice is unrolled, so that the compiler can move loads forward, unless the accumulators leave no
    registers for that; then one k tile is.
    """
    tile = k.tile
    if tile.feature_tiles * tile.token_tiles < 32:
        multiply_tiles(k, views, acc, slot, steps, 0, tile.slice)
    else:
        with T.serial(0, tile.slice, unroll=False) as i:
            multiply_tiles(k, views, acc, slot, steps, i, 1)


def multiply_tiles(k: Kernel, views, acc, slot, steps, first, count: int):
    """k tiles first .. first + count of the slice, 16 of k at a time. Operands are read one time ahead."""
    stage, last = Stage(k.weight, k.tile), 4 * count
    codes, tokens = {}, {}
    for s in range(last + 1):
        if s < last:
            if s % 4 == 0:
                codes[s // 4] = load_codes(k, views["q"], slot, first + s // 4)
            tokens[s] = load_tokens(k, views["x"], slot, first, s, tokens)
        now = s - 1
        if now < 0:
            continue
        if 16 * now % stage.step == 0:
            steps.begin(views, slot, first * 64 // stage.step + 16 * now // stage.step)
        for f in range(k.tile.feature_tiles):
            steps.multiply(acc, f, codes[now // 4][f], now % 4, tokens[now])
        if 16 * (now + 1) % stage.step == 0:
            steps.end(acc)
