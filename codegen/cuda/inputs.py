"""x in the order of its groups (`qdsl.order`): ordered[m, j] = x[m, source[j]], or 0 where the source is -1.

A CTA takes pairs of tokens and a stretch of places, eight for each thread. The tokens go through shared memory, some inputs
at a time and side by side, for a load from there costs little wherever it is, and has both; from global memory each costs as
much as 32 neighbours do. Where there are many tokens a CTA takes several pairs, and reads its sources once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, when, wide
from qdsl.codegen.target import Target

THREADS = 512
PLACES = 8  # of a thread, side by side: one store of 16 bytes
HELD = 16384  # inputs that shared memory has at once, of two tokens
RESIDENT = 2  # CTAs of an SM: one copies while the other looks up
CTAS = 264  # of all stretches, at most: two for each SM of an H200


def lower(name: str, dtype: str, target: Target) -> tirx.PrimFunc:
    """The kernel (x [M, K], source [places], ordered [M, places]); places is a multiple of 16."""
    with IRBuilder() as builder, T.prim_func(False, False, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        M, K, P = (tirx.Var(size, "int64") for size in "MKP")
        handles = [T.arg(arg, T.handle()) for arg in ("x", "source", "ordered")]
        shapes = [((M, K), dtype), ((P,), "int32"), ((M, P), dtype)]
        x, source, ordered = (
            IRBuilder.name(arg, T.match_buffer(handle, *shape))
            for arg, handle, shape in zip(("x", "source", "ordered"), handles, shapes, strict=True)
        )
        T.device_entry()
        tokens, size, inputs = (T.cast(extent, "int32") for extent in (M, P, K))
        stretches, pairs = T.cast(ceildiv(P, THREADS * PLACES), "int32"), (tokens + 1) >> 1
        side = tirx.min(pairs, tirx.max(tirx.truncdiv(T.int32(CTAS), stretches), 1))  # CTAs of a stretch
        cta, thread = T.cta_id([side * stretches]), T.thread_id([THREADS])
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT}):
            pool = T.alloc_buffer((4 * HELD,), "uint8", scope="shared.dyn")
            held = T.decl_buffer((HELD,), "uint32", data=pool.data, scope="shared.dyn", elem_offset=0)
            begin, first = cta // stretches, (cta % stretches * THREADS + thread) * PLACES
            places, found = T.alloc_local([PLACES], "int32"), T.alloc_local([PLACES], "uint32")
            for j in range(PLACES):
                assign(places, j, T.int32(-1))
            with when(first < size):
                for half in range(0, PLACES, 4):
                    four = (places[half + j] for j in range(4))
                    ptx("ld.global.v4.b32", *four, source.ptr_to([wide(first + half)]))
            if target.dependent_launch:
                overlap.let_in()  # the product, which asks for its weights before it waits
                overlap.wait()
            with T.serial(0, (pairs - begin + (side - 1)) // side, unroll=False) as i:
                m = (begin + i * side) * 2
                pair = [m, tirx.min(m + 1, tokens - 1)]
                for j in range(PLACES):
                    assign(found, j, T.uint32(0))
                with T.serial(0, (inputs + (HELD - 1)) // HELD, unroll=False) as part:
                    start = part * HELD
                    T.evaluate(T.cuda.cta_sync())
                    with T.If(inputs % 8 == 0):
                        with T.Then():
                            _hold_pieces(x, held, pair, start, inputs, thread)
                        with T.Else(), T.serial(0, HELD // THREADS, unroll=False) as item:
                            at = item * THREADS + thread
                            with when(start + at < inputs):
                                low, high = (
                                    T.cast(T.reinterpret("uint16", x[wide(token), wide(start + at)]), "uint32")
                                    for token in pair
                                )
                                T.buffer_store(held, low | high << T.uint32(16), [at])
                    T.evaluate(T.cuda.cta_sync())
                    for j in range(PLACES):
                        at = places[j] - start
                        with when(tirx.all(places[j] >= start, at < HELD)):
                            assign(found, j, held[at])
                for t, which in enumerate((0x5410, 0x7632)):
                    with when(tirx.all(first < size, m + t < tokens)):
                        words = T.alloc_local([PLACES // 2], "uint32")
                        for j in range(PLACES // 2):
                            ptx("prmt.b32", words[j], found[2 * j], found[2 * j + 1], T.uint32(which))
                        place = ordered.ptr_to([wide(m + t), wide(first)])
                        ptx("st.global.v4.b32", place, *(words[j] for j in range(4)))
    return builder.get()


def _hold_pieces(x, held, pair, start, inputs, thread):
    """Inputs start .. start + HELD of both tokens in pieces of eight, side by side."""
    for i in range(HELD // 8 // THREADS):
        at = (i * THREADS + thread) * 8
        with when(start + at < inputs):
            words = [T.alloc_local([4], "uint32") for _ in pair]
            for own, token in zip(words, pair, strict=True):
                ptx("ld.global.v4.b32", *(own[j] for j in range(4)), x.ptr_to([wide(token), wide(start + at)]))
            both = T.alloc_local([8], "uint32")
            for j in range(8):
                ptx("prmt.b32", both[j], *(own[j // 2] for own in words), T.uint32((0x5410, 0x7632)[j % 2]))
            for half in range(0, 8, 4):
                ptx("st.shared.v4.b32", held.ptr_to([at + half]), *(both[half + j] for j in range(4)))
