"""x in the order of its groups (`qdsl.order`): ordered[m, j] = x[m, source[j]], or 0 where the source is -1."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import for_tokens, in_vectors, open_function, store
from qdsl.codegen.plan import Plan
from qdsl.codegen.tir import choose, i64
from qdsl.order import ORDERED, SOURCE


def lower(plan: Plan) -> tirx.PrimFunc:
    with open_function(plan, "order_inputs", ("x", SOURCE, ORDERED)) as (builder, own):
        x, source, result = (own.buffers[name] for name in ("x", SOURCE, ORDERED))
        places = result.shape[1]

        def token(m: tirx.Expr) -> None:
            def place(j: tirx.Expr) -> None:
                found = T.cast(source[j], "int64")
                number = x[m, T.max(found, i64(0))]
                store(result, choose(found >= i64(0), number, tirx.const(0, number.ty.dtype)), m, j)

            in_vectors(i64(0), places, place)

        for_tokens(own.sizes["m"], own.sizes["m"] * places, token)
    return builder.get()
