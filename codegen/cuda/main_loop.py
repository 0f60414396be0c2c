"""Plan to the tensor-core kernels: one PrimFunc for each tile, with the scheme's own epilogue."""

from __future__ import annotations

from tvm import tirx

from qdsl.codegen.cuda import mma
from qdsl.codegen.function import Parameters, buffer_shape
from qdsl.codegen.plan import Plan
from qdsl.codegen.tir import as_float, storage, translate
from qdsl.expr import Ref


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    loop, scheme = plan.main_loop, plan.scheme
    assert loop is not None, "the plan chose the main loop"
    code = scheme.code.dtype
    zero = scheme.tensor(loop.zero).dtype if loop.zero else None
    weight = mma.Weight(
        compute=storage(scheme.compute.operand),
        bias=loop.constant,
        zero=None if zero is None else "u4" if zero.bits == 4 else storage(zero),
        scale=storage(scheme.tensor(loop.scale).dtype) if loop.scale else None,
        group=loop.group,
        signed=code.kind == "int",
    )
    given = {loop.code, loop.scale, loop.zero}
    extra = tuple(_extra(plan, b.tensor) for b in plan.buffers if b.tensor not in given)
    return {
        f"linear_{tile.name}": mma.lower(f"linear_{tile.name}", weight, tile, extra, _epilogue(plan))
        for tile in mma.tiles()
    }


def _extra(plan: Plan, name: str) -> mma.Extra:
    """A tensor that only the epilogue reads: (name, shape of M, N, K, dtype)."""
    tensor = plan.scheme.tensor(name)

    def shape(m: tirx.Expr, n: tirx.Expr, k: tirx.Expr) -> tuple:
        return buffer_shape(Parameters(plan, {"m": m, "n": n, "k": k}, {}), tensor)[0]

    return name, shape, plan.buffer(name).dtype


def _epilogue(plan: Plan) -> mma.Epilogue:
    def epilogue(acc: tirx.Expr, m: tirx.Expr, n: tirx.Expr, buffers) -> tirx.Expr:
        own = Parameters(plan, {"m": m, "n": n, "k": n}, dict(buffers))  # sizes only matter to layouts with open ends
        at = {"m": m, "n": n}

        def look(e) -> tirx.Expr:
            return total if e == Ref("acc") else own.element(e.name, at)

        total = acc
        if plan.weight.epilogue is not None:
            total = total * as_float(translate(plan.weight.epilogue, look))
        return as_float(translate(plan.scheme.output.value, look))

    return epilogue
