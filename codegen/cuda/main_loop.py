"""Plan to the tensor-core kernels: one PrimFunc for each candidate, with the scheme's own epilogue."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen import portable, quantize
from qdsl.codegen.cuda import inputs, mma
from qdsl.codegen.cuda.byte_weight import ByteWeight
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.reduce import Epilogue, Load
from qdsl.codegen.cuda.weight import Shared, Weight
from qdsl.codegen.function import Parameters, buffer_shape
from qdsl.codegen.plan import MainLoop, Plan, epilogue_tensors, in_bytes, place_in
from qdsl.codegen.tir import as_float, storage, translate
from qdsl.dtype import dtype
from qdsl.expr import Half, Item, Ref
from qdsl.scheme import Group, Index, Scheme, Var


def lower(plan: Plan, only: Collection[str] | None = None) -> dict[str, tirx.PrimFunc]:
    """only: names of functions; None: all"""
    loop = plan.main_loop
    assert loop is not None, "the plan chose the main loop"
    extra = tuple(_extra(plan, name) for name in epilogue_tensors(plan.scheme, loop))
    weight, epilogue = weight_of(plan.scheme, loop), _epilogue(plan)
    kernels = {
        f"linear_{c.name}": c.lower(f"linear_{c.name}", extra, epilogue, loop.parts)
        for c in candidates(plan.target, weight)
        if only is None or f"linear_{c.name}" in only
    }
    before = {}
    if loop.activation:
        before = portable.lower(plan)
    if loop.widened:
        before = {**portable.before(plan), "widen": quantize.widen(plan)}
    if loop.order:
        before["order_inputs"] = inputs.lower("order_inputs", weight.compute, plan.target)
    return {name: f for name, f in {**before, **kernels}.items() if only is None or name in only}


def weight_of(scheme: Scheme, loop: MainLoop) -> Weight | ByteWeight:
    """The main loop's weight as kernels know it."""

    def loaded(name: str | None) -> str | None:
        kind = scheme.tensor(name).dtype if name else None
        return None if kind is None else str(kind) if kind.bits <= 8 else storage(kind)

    if loop.activation:
        place = place_in(loop, scheme.tensor(loop.scale), scheme) if loop.scale else None
        return ByteWeight(
            in_bytes(scheme.compute.operand),
            scheme.code.dtype,
            storage(scheme.output.dtype),
            loop.group and loop.group // 2,
            loaded(loop.scale),
            Shared(place.features, place.inputs and place.inputs // 2) if place else None,
            loaded(loop.token_scale),
            loop.corrected,
            loop.rescaled,
            loaded(loop.zero),
            loop.matrices,
        )
    compute, code = storage(loop.operand(scheme)), scheme.code.dtype
    index = dtype(f"u{code.bits}") if loop.table else code
    shared = []
    for role, name in (("scale", loop.scale), ("zero", loop.zero), ("offset", loop.offset)):
        if name and (place := place_in(loop, scheme.tensor(name), scheme)):
            shared.append((role, Shared(place.features, place.inputs)))
    return Weight(
        compute, loop.constant, loaded(loop.zero), loaded(loop.scale), loop.group, index, loop.table,
        loaded(loop.offset), loop.subtract, tuple(shared),
    )  # fmt: skip


def _extra(plan: Plan, name: str) -> mma.Extra:
    """A tensor that only the epilogue reads: (name, shape of M, N, K, dtype)."""
    tensor, parts = plan.scheme.tensor(name), plan.main_loop.parts
    kind = plan.buffer(name).dtype if tensor.loaded else storage(tensor.dtype)

    def shape(m: tirx.Expr, n: tirx.Expr, k: tirx.Expr) -> tuple:
        n = n * parts if parts > 1 else n
        return buffer_shape(Parameters(plan, {"m": m, "n": n, "k": k}, {}), tensor)[0]

    return name, shape, kind


def _epilogue(plan: Plan) -> Epilogue:
    def load(buffers, name: str, m: tirx.Expr, n: tirx.Expr) -> tirx.Expr:
        own = Parameters(plan, {"m": m, "n": n, "k": n}, dict(buffers))  # sizes only matter to layouts with open ends
        return own.element(name, {"m": m, "n": n})

    def finish(sums: Sequence[tirx.Expr], m: tirx.Expr, features: Sequence[tirx.Expr], load: Load) -> tirx.Expr:
        def total(part: int) -> tirx.Expr:
            found = sums[part]

            def element(e) -> tirx.Expr:
                return load(e.name, m, features[part])

            for factor in (plan.weight.epilogue, plan.activation.epilogue):
                if factor is not None:
                    found = found * as_float(translate(factor, element))
            return found

        def look(e) -> tirx.Expr:
            if isinstance(e, Item):  # acc[r = 0]
                (half,) = e.args
                assert isinstance(half, Half)
                return total(half.value)
            return total(0) if e == Ref("acc") else load(e.name, m, features[0])

        return as_float(translate(plan.scheme.output.value, look))

    def correct(m: tirx.Expr, load: Load) -> tirx.Expr:
        def element(e) -> tirx.Expr:
            return load(e.name, m, T.int64(0))

        return translate(plan.activation.correction, element)

    tensors = map(plan.scheme.tensor, epilogue_tensors(plan.scheme, plan.main_loop))
    axes = {t.name: "".join(sorted(map(_axis, t.index))) for t in tensors}
    return Epilogue(finish, load, axes, correct if plan.main_loop.corrected else None)


def _axis(i: Index) -> str:
    return i.axis if isinstance(i, Var | Group) else "?"
