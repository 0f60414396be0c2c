"""x in the order of its groups (`qdsl.order`): ordered[m, j] = x[m, source[j]], or 0 where the source is -1.

A CTA takes one token and a stretch of places, eight for each thread. The token goes through shared memory, some inputs
at a time, for a load from there costs little wherever it is; from global memory each costs as much as 32 neighbours do.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.cuda.builder import assign, ceildiv, ptx, when, wide
from qdsl.codegen.target import Target

THREADS = 256
PLACES = 8  # of a thread, side by side: one store of 16 bytes
HELD = 16384  # inputs that shared memory has at once


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
        stretches = T.cast(ceildiv(P, THREADS * PLACES), "int32")
        cta, thread = T.cta_id([T.cast(M, "int32") * stretches]), T.thread_id([THREADS])
        pool = T.alloc_buffer((2 * HELD,), "uint8", scope="shared.dyn")
        held = T.decl_buffer((HELD,), dtype, data=pool.data, scope="shared.dyn", elem_offset=0)
        m, first = cta // stretches, (cta % stretches * THREADS + thread) * PLACES
        places = T.alloc_local([PLACES], "int32")
        found = T.alloc_local([PLACES], "uint16")
        size, inputs = T.cast(P, "int32"), T.cast(K, "int32")
        for j in range(PLACES):
            assign(places, j, T.int32(-1))
            assign(found, j, T.uint16(0))
        with when(first < size):
            for half in range(0, PLACES, 4):
                four = (places[half + j] for j in range(4))
                ptx("ld.global.v4.b32", *four, source.ptr_to([wide(first + half)]))
        if target.dependent_launch:
            overlap.let_in()  # the product, which asks for its weights before it waits
            overlap.wait()
        with T.serial(0, (inputs + (HELD - 1)) // HELD, unroll=False) as part:
            start = part * HELD
            T.evaluate(T.cuda.cta_sync())
            with T.If(inputs % 8 == 0):
                with T.Then():
                    _hold_pieces(x, held, m, start, inputs, thread)
                with T.Else(), T.serial(0, HELD // THREADS, unroll=False) as i:
                    at = i * THREADS + thread
                    with when(start + at < inputs):
                        T.buffer_store(held, x[wide(m), wide(start + at)], [at])
            T.evaluate(T.cuda.cta_sync())
            for j in range(PLACES):
                at = places[j] - start
                with when(tirx.all(places[j] >= start, at < HELD)):
                    assign(found, j, T.reinterpret("uint16", held[at]))
        with when(first < size):
            words = T.alloc_local([PLACES // 2], "uint32")
            for j in range(0, PLACES, 2):
                pair = T.cast(found[j], "uint32") | T.cast(found[j + 1], "uint32") << T.uint32(16)
                assign(words, j // 2, pair)
            ptx("st.global.v4.b32", ordered.ptr_to([wide(m), wide(first)]), *(words[j] for j in range(4)))
    return builder.get()


def _hold_pieces(x, held, m, start, inputs, thread):
    """Inputs start .. start + HELD in pieces of eight: all are asked for before the first has come."""
    pieces = HELD // 8 // THREADS
    words = T.alloc_local([4 * pieces], "uint32")
    for i in range(pieces):
        at = (i * THREADS + thread) * 8
        with when(start + at < inputs):
            ptx("ld.global.v4.b32", *(words[4 * i + j] for j in range(4)), x.ptr_to([wide(m), wide(start + at)]))
    for i in range(pieces):
        at = (i * THREADS + thread) * 8
        with when(start + at < inputs):
            ptx("st.shared.v4.b32", held.ptr_to([at]), *(words[4 * i + j] for j in range(4)))
