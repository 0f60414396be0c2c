"""Plan to TensorIR, the portable way: one loop nest for every scheme, right on every target.

    for each block of output features            parallel (CPU), one thread each (CUDA)
      for each few tokens
        for each group along k                   the plan's step, or all of k
          partial = sum of x core * w core       exact products, in the accumulator's type
          acc    += partial * group factors      + corrections
        y = output equation of acc

It is written with TIR's script builder rather than as te.compute with a schedule: sizes are symbolic, groups may be
ragged, and partial sums per group are part of a scheme's meaning, so the loops are the specification and there is
nothing left to schedule.  The CPU keeps 16 features of a block in the lanes of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen import quantize, transform
from qdsl.codegen.function import Parameters, decoded, each, local, open_function, store
from qdsl.codegen.plan import VECTOR, Plan, code_values, vector_features
from qdsl.codegen.tir import as_float, dtype_of, encode, f32, i64, load_bits, translate
from qdsl.expr import FUNCTIONS, Call, Expr, Item, Ref, names, walk
from qdsl.scheme import Tensor, Var

ROWS = 4  # tokens that share a decoded weight


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """One PrimFunc for each step of the portable variant."""
    steps = {s.function: s.args for v in plan.variants for s in v.steps}
    return {**before(plan), "linear": _linear(plan, steps["linear"])}


def before(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """What is computed of x before the product, a PrimFunc for each step."""
    steps = {s.function: s.args for v in plan.variants for s in v.steps}
    return {**transform.lower(plan), **quantize.lower(plan, steps)}


@dataclass
class _Linear:
    """What the parts of the loop nest share."""

    plan: Plan
    own: Parameters
    lanes: int  # output features of one block
    tables: dict[Expr, tirx.Buffer]
    sums: str  # dtype of partial sums

    def for_lanes(self, body: Callable[[tirx.Expr], None]) -> None:
        if self.lanes == 1:
            body(i64(0))
            return
        for half in range(self.lanes // VECTOR):
            with T.vectorized(i64(0), i64(VECTOR)) as v:
                body(v + i64(half * VECTOR))


def _linear(plan: Plan, args: tuple[str, ...]) -> tirx.PrimFunc:
    with open_function(plan, "linear", args) as (builder, own):
        lanes = vector_features(plan.scheme.code.dtype) if plan.target.kind == "cpu" else 1
        sums = plan.accumulate.name.replace("i32", "int32").replace("f32", "float32")
        state = _Linear(plan, own, lanes, {}, sums if sums in ("int32", "float32") else "float32")
        width = own.buffers["y"].shape[1]
        if plan.scheme.output.half is None or lanes == 1:
            _features(state, width)
        else:  # blocks of the second part begin where blocks of the weight do, or else there are no blocks
            with T.If(T.truncmod(width, i64(lanes)) == i64(0)):
                with T.Then():
                    _features(state, width)
                with T.Else():
                    _features(replace(state, lanes=1), width)
    return builder.get()


def _features(s: _Linear, width: tirx.Expr) -> None:
    """All of y: a block of its features and all tokens are a piece of work on a CPU, a feature and a few tokens on a GPU."""
    plan, m, lanes = s.plan, s.own.sizes["m"], s.lanes
    if plan.target.kind == "cpu":
        row_blocks = T.floordiv(m + i64(ROWS - 1), i64(ROWS))
        with each(plan, T.floordiv(width + i64(lanes - 1), i64(lanes)), m * width * s.own.sizes["k"]) as i:
            s.tables = _tables(plan)
            with T.serial(i64(0), row_blocks) as rows:
                _tile(s, rows * i64(ROWS), i * i64(lanes))
    else:
        row_blocks = T.truncdiv(m + i64(ROWS - 1), i64(ROWS))
        with each(plan, row_blocks * width, m * width * s.own.sizes["k"]) as i:
            s.tables = _tables(plan)
            _tile(s, T.truncdiv(i, width) * i64(ROWS), T.truncmod(i, width))


def _tables(plan: Plan) -> dict[Expr, tirx.Buffer]:
    """The constant tables that a product reads.

    A core that bends (a table, exp2, …) and depends on one code of at most 8 bits alone is a table of its values, exact
    in float64 and rounded once; other cores read the declared constants.
    """
    found: dict[Expr, tirx.Buffer] = {}
    for operand, core in _operands(plan):
        constants = {t.name: t.dtype.round(np.array(t.value)) for t in operand if isinstance(t.value, tuple)}
        bends = any(isinstance(e, Item) or (isinstance(e, Call) and e.name in FUNCTIONS) for e in walk(core))
        values = code_values(core, operand) if bends else None
        if values is not None:
            found[core] = _constant(values)
        else:
            found |= {Ref(name): _constant(values) for name, values in constants.items() if name in names(core)}
    return found


def _constant(values: np.ndarray) -> tirx.Buffer:
    table = local((len(values),), "float32")
    for at, value in enumerate(values.tolist()):
        store(table, f32(value), at)
    return table


def _operands(plan: Plan) -> list[tuple[tuple[Tensor, ...], Expr]]:
    activation = plan.scheme.activation()
    result = [(plan.scheme.weight.tensors, plan.weight.core)]
    return [*result, (activation.operand.tensors, plan.activation.core)] if activation else result


def _tile(s: _Linear, row: tirx.Expr, feature: tirx.Expr) -> None:
    """ROWS tokens by one block of features, or by one of every part of them (`half`)."""
    parts = s.plan.scheme.output.half[1] if s.plan.scheme.output.half else 1
    width = s.own.buffers["y"].shape[1]
    sums = [_sums(s, row, feature + i64(part) * width if part else feature) for part in range(parts)]
    _epilogue(s, row, feature, sums)


def _sums(s: _Linear, row: tirx.Expr, feature: tirx.Expr) -> tirx.Buffer:
    """The finished sums of ROWS tokens by one block of the weight's features."""
    plan, k = s.plan, s.own.sizes["k"]
    acc = local((ROWS, s.lanes), "float32")
    for r in range(ROWS):
        s.for_lanes(lambda v, r=r: store(acc, f32(0), r, v))
    if plan.step is None:
        _block(s, row, feature, i64(0), k, acc)
    else:
        step = i64(plan.step)
        with T.serial(i64(0), T.floordiv(k + i64(plan.step - 1), step)) as g:
            _block(s, row, feature, g * step, T.min(step, k - g * step), acc)
    return acc


def _block(
    s: _Linear, row: tirx.Expr, feature: tirx.Expr, start: tirx.Expr, count: tirx.Expr, acc: tirx.Buffer
) -> None:
    """One group along k: exact partial sums, then scales and corrections."""
    plan = s.plan
    elementwise = plan.weight.gathered and plan.step != 1
    part = local((ROWS, s.lanes), s.sums)
    w = local((s.lanes,), s.sums)
    w_sum = local((s.lanes,), s.sums) if plan.activation.correction is not None else None
    x_sum = local((ROWS,), s.sums) if plan.weight.correction is not None and not elementwise else None
    zero = tirx.const(0, s.sums)
    for r in range(ROWS):
        s.for_lanes(lambda v, r=r: store(part, zero, r, v))
        if x_sum is not None:
            store(x_sum, zero, r)
    if w_sum is not None:
        s.for_lanes(lambda v: store(w_sum, zero, v))
    x = local((ROWS,), s.sums)
    with T.serial(i64(0), count) as i:
        k = start + i
        s.for_lanes(lambda v: store(w, _weight(s, feature + v, k, elementwise), v))
        for r in range(ROWS):
            store(x, _x(s, inside(row + i64(r), s.own.sizes["m"]), k), r)
            s.for_lanes(lambda v, r=r: store(part, part[r, v] + x[r] * w[v], r, v))
            if x_sum is not None:
                store(x_sum, x_sum[r] + x[r], r)
        if w_sum is not None:
            s.for_lanes(lambda v: store(w_sum, w_sum[v] + w[v], v))
    _promote(s, row, feature, start, count, acc, part, w_sum, x_sum, elementwise)


def _promote(s, row, feature, start, count, acc, part, w_sum, x_sum, elementwise) -> None:
    """acc += Σ (xc·gx + cx)(wc·gw + cw) over the group, from the group's four sums."""
    plan = s.plan
    w_factor = None if elementwise else first(plan.weight.fold, plan.weight.promote)
    x_factor = first(plan.activation.fold, plan.activation.promote)
    for r in range(ROWS):
        at_x = {"m": inside(row + i64(r), s.own.sizes["m"]), "k": start}

        def lane(v: tirx.Expr, r=r, at_x=at_x) -> None:
            at = {"n": inside(feature + v, s.own.sizes["n"]), "k": start, "padded": feature + v}
            gw = factor(s, w_factor, at)
            gx = factor(s, x_factor, at_x)
            offset = whole_offset(s, at_x)
            codes = part[r, v] if offset is None else part[r, v] + offset * w_sum[v]
            total = times(as_float(codes), gx, gw)
            cw = None if elementwise else factor(s, plan.weight.correction, at)
            cx = factor(s, plan.activation.correction, at_x) if offset is None else None
            if cw is not None:
                codes = x_sum[r] if offset is None else x_sum[r] + offset * T.cast(count, "int32")
                total = total + times(as_float(codes), gx, cw)
            if cx is not None:
                total = total + times(as_float(w_sum[v]), gw, cx)
            if cw is not None and cx is not None:
                total = total + times(T.cast(count, "float32"), cw, cx)
            store(acc, acc[r, v] + total, r, v)

        s.for_lanes(lane)


def _epilogue(s: _Linear, row: tirx.Expr, feature: tirx.Expr, sums: list[tirx.Buffer]) -> None:
    plan, y, m = s.plan, s.own.buffers["y"], s.own.sizes["m"]
    width = y.shape[1]
    with T.serial(i64(0), i64(ROWS)) as r, T.serial(i64(0), i64(s.lanes)) as v:
        at = {"m": row + r, "n": feature + v, "padded": feature + v}
        with T.If((at["m"] < m) & (at["n"] < width)), T.Then():

            def total(part: int) -> tirx.Expr:
                n = at["n"] + i64(part) * width if part else at["n"]
                value = sums[part][r, v]
                for epilogue in (plan.activation.epilogue, plan.weight.epilogue):
                    value = times(value, factor(s, epilogue, {"m": at["m"], "n": n, "padded": n}))
                return value

            def look(e: Expr) -> tirx.Expr:
                if isinstance(e, Item):  # acc[r = 0]
                    return total(e.args[0].value)
                return total(0) if e == Ref("acc") else s.own.element(e.name, at)

            value = as_float(translate(plan.scheme.output.value, look))
            store(y, encode(plan.scheme.output.dtype, value), at["m"], at["n"])


def first(a: Expr | None, b: Expr | None) -> Expr | None:
    return a if a is not None else b


def times(value: tirx.Expr, *factors: tirx.Expr | None) -> tirx.Expr:
    for factor in factors:
        value = value if factor is None else value * factor
    return value


def factor(s: _Linear, e: Expr | None, at: Mapping[str, tirx.Expr]) -> tirx.Expr | None:
    if e is None:
        return None
    return as_float(translate(e, lambda node: _tensor(s, node, at)))


def _tensor(s: _Linear, node: Expr, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    """A tensor's element; tensors laid out in whole blocks of features are read beyond n, where they hold zeros."""
    assert isinstance(node, Ref), f"{node} in a group factor"
    tensor = s.plan.scheme.tensor(node.name)
    if "padded" in at and tensor.index and tensor.index[0] == Var("n") and tensor.role not in ("bias", "residual"):
        at = {**at, "n": at["padded"]}
    return s.own.element(node.name, at)


def whole_offset(s, at: Mapping[str, tirx.Expr]) -> tirx.Expr | None:
    """What is added to codes of x whose sums are whole: an int32, so that x = 0 gives 0. None: there is no such number."""
    activation = s.plan.activation
    if activation.offset is None or s.plan.accumulate.is_float:
        return None
    offset = translate(activation.offset, lambda node: _tensor(s, node, at))
    return offset if dtype_of(offset) == "int32" else None


def inside(position: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    """The position, or the last one when it lies beyond the end: reads stay inside, what they give is not used."""
    return T.min(position, size - i64(1))


def _cast_sum(s: _Linear, value: tirx.Expr) -> tirx.Expr:
    return value if dtype_of(value) == s.sums else T.cast(value, s.sums)


def activation_core(s, m: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    """x, or the part of its codes that is multiplied, of a token and an input: int32 or float32."""
    activation = s.plan.scheme.activation()
    if activation is None:
        return T.cast(s.own.buffers["x"][m, k], "float32")

    def look(e: Expr) -> tirx.Expr:
        if e == Ref("x"):
            return T.cast(s.own.buffers["x"][m, k], "float32")
        return s.own.element(e.name, {"m": m, "k": k})

    return translate(s.plan.activation.core, look)


def finished(s, value: tirx.Expr, m: tirx.Expr, n: tirx.Expr) -> tirx.Expr:
    """The output's equation for a sum of token m and feature n, as float32 before its last rounding."""
    plan, at = s.plan, {"m": m, "n": n, "padded": n}
    for own in (plan.activation.epilogue, plan.weight.epilogue):
        value = times(value, factor(s, own, at))

    def look(e: Expr) -> tirx.Expr:
        return value if e == Ref("acc") else s.own.element(e.name, at)

    return as_float(translate(plan.scheme.output.value, look))


def _core(s: _Linear, core: Expr, at: Mapping[str, tirx.Expr], code: str) -> tirx.Expr:
    if core in s.tables:
        pattern = _tensor_bits(s, code, at)
        return s.tables[core][pattern]

    def look(e: Expr) -> tirx.Expr:
        if isinstance(e, Item):
            return _table_entry(s, e, look)
        if e == Ref("x"):
            return T.cast(s.own.buffers["x"][at["m"], at["k"]], "float32")
        return _tensor(s, e, at)

    return translate(core, look)


def _table_entry(s: _Linear, e: Item, look) -> tirx.Expr:
    """A table at a computed position; beyond its end it reads as 0, as the reference does."""
    tensor = s.plan.scheme.tensor(e.name)
    position = T.cast(translate(e.args[0], look), "int64")
    constant = s.tables.get(Ref(e.name))
    size = i64(len(tensor.value)) if isinstance(tensor.value, tuple) else s.own.extent(tensor.index[0])
    inside = T.max(i64(0), T.min(position, size - i64(1)))
    value = constant[inside] if constant is not None else decoded(tensor, s.own.buffers[e.name][inside])
    return T.if_then_else(position == inside, value, tirx.const(0, dtype_of(value)))


def _tensor_bits(s: _Linear, code: str, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    tensor = s.plan.scheme.tensor(code)
    index = [at["padded"] if i == Var("n") and "padded" in at else s.own.position(i, at) for i in tensor.index]
    if not tensor.loaded:
        return T.cast(s.own.buffers[code][tuple(index)], "int64")
    shape = [s.own.extent(i) for i in tensor.index]
    return T.cast(load_bits(s.own.buffers[code], s.plan.buffer(code), index, shape), "int64")


def _weight(s: _Linear, n: tirx.Expr, k: tirx.Expr, elementwise: bool) -> tirx.Expr:
    at = {"n": inside(n, s.own.sizes["n"]), "k": k, "padded": n}
    weight = s.plan.weight
    value = _core(s, weight.core, at, s.plan.scheme.code.name)
    if elementwise:  # the group changes with every k
        value = times(as_float(value), factor(s, first(weight.fold, weight.promote), at))
        value = value if weight.correction is None else value + factor(s, weight.correction, at)
    return _cast_sum(s, value)


def _x(s: _Linear, m: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    activation = s.plan.scheme.activation()
    if activation is None:
        return _cast_sum(s, T.cast(s.own.buffers["x"][m, k], "float32"))
    code = next((t.name for t in activation.operand.tensors if t.role == "code"), "")
    return _cast_sum(s, _core(s, s.plan.activation.core, {"m": m, "k": k}, code))
