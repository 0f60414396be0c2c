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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.plan import VECTOR, Plan, quantize_args, vector_features
from qdsl.codegen.tir import as_float, decode, dtype_of, encode, f32, i64, load, load_bits, storage, translate
from qdsl.expr import FUNCTIONS, REDUCTIONS, Call, Expr, Item, Ref, evaluate, names, walk
from qdsl.scheme import Extent, Gather, Group, Index, Tensor, Var

ROWS = 4  # tokens that share a decoded weight
THREADS = 128


def lower(plan: Plan) -> dict[str, tirx.PrimFunc]:
    """One PrimFunc for each step of the portable variant."""
    steps = {s.function: s.args for v in plan.variants for s in v.steps}
    functions = {}
    activation = plan.scheme.activation()
    for tensor in activation.operand.tensors if activation else ():
        if not tensor.loaded:
            functions[f"quantize_{tensor.name}"] = _quantize(plan, tensor)
    functions["linear"] = _linear(plan, steps["linear"])
    return functions


# ---- parameters --------------------------------------------------------------------------------------------------
@dataclass
class Parameters:
    """The buffers of one function, and how an element of a declared tensor is read from them."""

    plan: Plan
    sizes: dict[str, tirx.Expr]
    buffers: dict[str, tirx.Buffer]

    def element(self, name: str, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
        """The tensor's element for the point `at` (axis name -> position); absent optional tensors read as 0."""
        tensor = self.plan.scheme.tensor(name)
        index = [self.position(i, at) for i in tensor.index]
        buffer = self.buffers[name]
        if not tensor.loaded:
            value = buffer[tuple(index)] if index else buffer[0]
            return _decoded(tensor, value)
        shape = [self.extent(i) for i in tensor.index]
        value = load(buffer, self.plan.buffer(name), tensor.dtype, index, shape) if index else _scalar(buffer, tensor)
        if tensor.optional:
            return T.if_then_else(buffer.shape[0] > i64(0), value, tirx.const(0, dtype_of(value)))
        return value

    def position(self, i: Index, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
        match i:
            case Var(axis):
                return at[axis]
            case Group(_, None):
                return i64(0)
            case Group(axis, size):
                return T.floordiv(at[axis], i64(size))
            case Gather(tensor):
                return T.cast(self.element(tensor, at), "int64")
        raise AssertionError(f"no position for {i}")

    def extent(self, i: Index) -> tirx.Expr:
        match i:
            case Var(axis):
                return self.sizes[axis]
            case Group(_, None):
                return i64(1)
            case Group(axis, size):
                return T.floordiv(self.sizes[axis] + i64(size - 1), i64(size))
            case Gather(tensor):
                return self.extent(self.plan.scheme.tensor(tensor).extent)
            case Extent(size):
                return i64(size)
        raise AssertionError(f"no extent for {i}")


def _decoded(tensor: Tensor, value: tirx.Expr) -> tirx.Expr:
    if tensor.dtype.bits <= 8:
        return decode(tensor.dtype, T.cast(value, "uint32"))
    return T.cast(value, "float32") if tensor.dtype.is_float else value


def _scalar(buffer: tirx.Buffer, tensor: Tensor) -> tirx.Expr:
    return _decoded(tensor, buffer[0])


@contextmanager
def _function(plan: Plan, name: str, args: tuple[str, ...]) -> Iterator[tuple[IRBuilder, Parameters]]:
    """Open a PrimFunc with one buffer for each argument."""
    scheme = plan.scheme
    sizes = {a: tirx.Var(a.upper(), "int64") for a in ("m", "n", "k")}
    own = Parameters(plan, sizes, {})
    out = storage(scheme.output.dtype)
    with IRBuilder() as builder, T.prim_func(False, plan.target.kind == "cpu", False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        handles = {arg: T.arg(arg, T.handle()) for arg in args}
        for arg, handle in handles.items():
            if arg in ("x", "y"):
                shape, dtype = (sizes["m"], sizes["k" if arg == "x" else "n"]), out
            else:
                tensor = scheme.tensor(arg)
                shape, dtype = _buffer_shape(own, tensor)
            own.buffers[arg] = T.match_buffer(handle, shape, dtype)
        yield builder, own


def _buffer_shape(own: Parameters, tensor: Tensor) -> tuple[tuple, str]:
    shape = [own.extent(i) for i in tensor.index]
    if not tensor.loaded:
        return tuple(shape) or (i64(1),), storage(tensor.dtype)
    declared = own.plan.buffer(tensor.name)
    if tensor.optional:
        return tuple(tirx.Var(f"{tensor.name}_{at}", "int64") for at in range(len(shape))), declared.dtype
    stored = declared.layout.stored_shape([_Ceiling(s) for s in shape])
    return tuple(_plain(s) for s in stored) or (i64(1),), declared.dtype


class _Ceiling:
    """A symbolic size whose `-(-size // rest)`, the layout's ceiling, is spelled as TIR likes it."""

    def __init__(self, value: tirx.Expr, negative: bool = False):
        self.value, self.negative = value, negative

    def __neg__(self) -> _Ceiling:
        return _Ceiling(self.value, not self.negative)

    def __floordiv__(self, rest: int) -> _Ceiling:
        return _Ceiling(T.floordiv(self.value + i64(rest - 1), i64(rest)) if rest > 1 else self.value, self.negative)

    def __mul__(self, other) -> _Ceiling:
        return _Ceiling(self.value * _plain(other))

    __rmul__ = __mul__


def _plain(size) -> tirx.Expr:
    return size.value if isinstance(size, _Ceiling) else i64(size) if isinstance(size, int) else size


# ---- loops -------------------------------------------------------------------------------------------------------
@contextmanager
def _each(plan: Plan, count: tirx.Expr) -> Iterator[tirx.Expr]:
    """`count` independent pieces of work: a parallel loop, or one CUDA thread each."""
    if plan.target.kind == "cpu":
        with T.parallel(i64(0), count) as i:
            yield i
        return
    T.device_entry()
    block = T.cta_id([T.cast(T.truncdiv(count + i64(THREADS - 1), i64(THREADS)), "int32")])
    thread = T.thread_id([THREADS])
    i = T.cast(block, "int64") * i64(THREADS) + T.cast(thread, "int64")
    with T.If(i < count), T.Then():
        yield i


def _local(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
    return T.alloc_buffer(shape, dtype, scope="local")


def _set(buffer: tirx.Buffer, value: tirx.Expr, *index) -> None:
    T.buffer_store(buffer, value, list(index))


# ---- run-time quantization ---------------------------------------------------------------------------------------
def _quantize(plan: Plan, tensor: Tensor) -> tirx.PrimFunc:
    """One computed activation tensor: a reduction per element where the equation has one, then one rounding."""
    args = quantize_args(plan.scheme, tensor)
    with _function(plan, f"quantize_{tensor.name}", args) as (builder, own):
        extents = [own.extent(i) for i in tensor.index]
        count = i64(1)
        for extent in extents:
            count = count * extent
        with _each(plan, count) as flat:
            index, rest = [], flat
            for extent in reversed(extents):
                index.insert(0, T.truncmod(rest, extent))
                rest = T.truncdiv(rest, extent)
            index = index[:1] and [flat, *index[1:]] if len(index) == 1 else index
            _quantize_element(plan, own, tensor, index)
    return builder.get()


def _quantize_element(plan: Plan, own: Parameters, tensor: Tensor, index: list[tirx.Expr]) -> None:
    starts = {  # the first position of the element's group on each axis
        _axis(i): position if isinstance(i, Var) else position * i64(i.size or 1)
        for i, position in zip(tensor.index, index, strict=True)
    }
    grouped = {i.axis: i.size for i in tensor.index if isinstance(i, Group)}
    found: dict[Call, tirx.Buffer] = {}
    for call in (e for e in walk(tensor.value) if isinstance(e, Call) and e.name in REDUCTIONS):
        found[call] = _reduction(own, call, starts, grouped, tensor)

    def look(e: Expr) -> tirx.Expr:
        if isinstance(e, Call):
            return found[e][0]
        return _activation_value(own, e, starts)

    value = as_float(translate(tensor.value, look))
    _set(own.buffers[tensor.name], encode(tensor.dtype, value), *(index or [i64(0)]))


def _reduction(own: Parameters, call: Call, starts: dict, grouped: dict, tensor: Tensor) -> tirx.Buffer:
    start = {"amax": -np.inf, "amin": np.inf, "sum": 0.0}[call.name]
    combine = {"amax": T.max, "amin": T.min, "sum": lambda a, b: a + b}[call.name]
    result = _local((1,), "float32")
    _set(result, f32(start), 0)
    axes = [a for a in ("m", "k") if a not in starts or a in grouped]

    def nest(axes: list[str], at: dict[str, tirx.Expr]) -> None:
        if not axes:
            value = as_float(translate(call.args[0], lambda e: _activation_value(own, e, at)))
            # NaN must survive: max(NaN, x) is x on some targets
            kept = T.if_then_else(
                T.isnan(result[0]), result[0], T.if_then_else(T.isnan(value), value, combine(result[0], value))
            )
            _set(result, kept, 0)
            return
        axis, size = axes[0], grouped.get(axes[0])
        first = starts.get(axis, i64(0))
        last = own.sizes[axis] if size is None else T.min(first + i64(size), own.sizes[axis])
        with T.serial(i64(0), last - first) as i:
            nest(axes[1:], {**at, axis: first + i})

    nest(axes, dict(starts))
    return result


def _activation_value(own: Parameters, e: Expr, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    if e == Ref("x"):
        return T.cast(own.buffers["x"][at["m"], at["k"]], "float32")
    assert isinstance(e, Ref), f"{e} in an activation equation"
    return own.element(e.name, at)


def _axis(i: Index) -> str:
    assert isinstance(i, Var | Group), f"{i} has no axis of its own"
    return i.axis


# ---- the product -------------------------------------------------------------------------------------------------
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
    cpu = plan.target.kind == "cpu"
    with _function(plan, "linear", args) as (builder, own):
        m, n = own.sizes["m"], own.sizes["n"]
        lanes = vector_features(plan.scheme.code.dtype) if cpu else 1
        blocks = T.floordiv(n + i64(lanes - 1), i64(lanes)) if cpu else n
        row_blocks = T.floordiv(m + i64(ROWS - 1), i64(ROWS)) if cpu else T.truncdiv(m + i64(ROWS - 1), i64(ROWS))
        sums = plan.accumulate.name.replace("i32", "int32").replace("f32", "float32")
        state = _Linear(plan, own, lanes, {}, sums if sums in ("int32", "float32") else "float32")
        with _each(plan, blocks if cpu else row_blocks * n) as i:
            state.tables = _tables(plan)
            if cpu:
                with T.serial(i64(0), row_blocks) as rows:
                    _tile(state, rows * i64(ROWS), i * i64(lanes))
            else:
                _tile(state, T.truncdiv(i, n) * i64(ROWS), T.truncmod(i, n))
    return builder.get()


def _tables(plan: Plan) -> dict[Expr, tirx.Buffer]:
    """The constant tables that a product reads.

    A core that bends (a table, exp2, …) and depends on one code of at most 8 bits alone is a table of its values, exact
    in float64 and rounded once; other cores read the declared constants.
    """
    found: dict[Expr, tirx.Buffer] = {}
    for operand, core in _operands(plan):
        constants = {t.name: t.dtype.round(np.array(t.value)) for t in operand if isinstance(t.value, tuple)}
        varying = [t for t in operand if t.name in names(core) and t.name not in constants]
        bends = any(isinstance(e, Item) or (isinstance(e, Call) and e.name in FUNCTIONS) for e in walk(core))
        if bends and len(varying) == 1 and varying[0].role == "code":
            code = varying[0].dtype
            values = code.decode(np.arange(1 << code.bits))
            result = evaluate(core, lambda e, v=values, c=constants: c.get(e.name, v), lambda *_: None)
            found[core] = _constant(np.broadcast_to(result, values.shape))
        else:
            found |= {Ref(name): _constant(values) for name, values in constants.items() if name in names(core)}
    return found


def _constant(values: np.ndarray) -> tirx.Buffer:
    table = _local((len(values),), "float32")
    for at, value in enumerate(values.tolist()):
        _set(table, f32(value), at)
    return table


def _operands(plan: Plan) -> list[tuple[tuple[Tensor, ...], Expr]]:
    activation = plan.scheme.activation()
    result = [(plan.scheme.weight.tensors, plan.weight.core)]
    return [*result, (activation.operand.tensors, plan.activation.core)] if activation else result


def _tile(s: _Linear, row: tirx.Expr, feature: tirx.Expr) -> None:
    """ROWS tokens by one block of features."""
    plan, k = s.plan, s.own.sizes["k"]
    acc = _local((ROWS, s.lanes), "float32")
    for r in range(ROWS):
        s.for_lanes(lambda v, r=r: _set(acc, f32(0), r, v))
    if plan.step is None:
        _block(s, row, feature, i64(0), k, acc)
    else:
        step = i64(plan.step)
        with T.serial(i64(0), T.floordiv(k + i64(plan.step - 1), step)) as g:
            _block(s, row, feature, g * step, T.min(step, k - g * step), acc)
    _epilogue(s, row, feature, acc)


def _block(
    s: _Linear, row: tirx.Expr, feature: tirx.Expr, start: tirx.Expr, count: tirx.Expr, acc: tirx.Buffer
) -> None:
    """One group along k: exact partial sums, then scales and corrections."""
    plan = s.plan
    elementwise = plan.weight.gathered and plan.step != 1
    part = _local((ROWS, s.lanes), s.sums)
    w = _local((s.lanes,), s.sums)
    w_sum = _local((s.lanes,), s.sums) if plan.activation.correction is not None else None
    x_sum = _local((ROWS,), s.sums) if plan.weight.correction is not None else None
    zero = tirx.const(0, s.sums)
    for r in range(ROWS):
        s.for_lanes(lambda v, r=r: _set(part, zero, r, v))
        if x_sum is not None:
            _set(x_sum, zero, r)
    if w_sum is not None:
        s.for_lanes(lambda v: _set(w_sum, zero, v))
    x = _local((ROWS,), s.sums)
    with T.serial(i64(0), count) as i:
        k = start + i
        s.for_lanes(lambda v: _set(w, _weight(s, feature + v, k, elementwise), v))
        for r in range(ROWS):
            _set(x, _x(s, _inside(row + i64(r), s.own.sizes["m"]), k), r)
            s.for_lanes(lambda v, r=r: _set(part, part[r, v] + x[r] * w[v], r, v))
            if x_sum is not None:
                _set(x_sum, x_sum[r] + x[r], r)
        if w_sum is not None:
            s.for_lanes(lambda v: _set(w_sum, w_sum[v] + w[v], v))
    _promote(s, row, feature, start, count, acc, part, w_sum, x_sum, elementwise)


def _promote(s, row, feature, start, count, acc, part, w_sum, x_sum, elementwise) -> None:
    """acc += Σ (xc·gx + cx)(wc·gw + cw) over the group, from the group's four sums."""
    plan = s.plan
    w_factor = None if elementwise else _first(plan.weight.fold, plan.weight.promote)
    x_factor = _first(plan.activation.fold, plan.activation.promote)
    for r in range(ROWS):
        at_x = {"m": _inside(row + i64(r), s.own.sizes["m"]), "k": start}

        def lane(v: tirx.Expr, r=r, at_x=at_x) -> None:
            at = {"n": _inside(feature + v, s.own.sizes["n"]), "k": start, "padded": feature + v}
            gw = _factor(s, w_factor, at)
            gx = _factor(s, x_factor, at_x)
            total = _times(as_float(part[r, v]), gx, gw)
            cw, cx = _factor(s, plan.weight.correction, at), _factor(s, plan.activation.correction, at_x)
            if cw is not None:
                total = total + _times(as_float(x_sum[r]), gx, cw)
            if cx is not None:
                total = total + _times(as_float(w_sum[v]), gw, cx)
            if cw is not None and cx is not None:
                total = total + _times(T.cast(count, "float32"), cw, cx)
            _set(acc, acc[r, v] + total, r, v)

        s.for_lanes(lane)


def _epilogue(s: _Linear, row: tirx.Expr, feature: tirx.Expr, acc: tirx.Buffer) -> None:
    plan, y = s.plan, s.own.buffers["y"]
    m, n = s.own.sizes["m"], s.own.sizes["n"]
    with T.serial(i64(0), i64(ROWS)) as r, T.serial(i64(0), i64(s.lanes)) as v:
        at = {"m": row + r, "n": feature + v, "padded": feature + v}
        with T.If((at["m"] < m) & (at["n"] < n)), T.Then():
            total = acc[r, v]
            for factor in (plan.activation.epilogue, plan.weight.epilogue):
                total = _times(total, _factor(s, factor, at))
            value = as_float(
                translate(plan.scheme.output.value, lambda e: total if e == Ref("acc") else s.own.element(e.name, at))
            )
            _set(y, encode(plan.scheme.output.dtype, value), at["m"], at["n"])


def _first(a: Expr | None, b: Expr | None) -> Expr | None:
    return a if a is not None else b


def _times(value: tirx.Expr, *factors: tirx.Expr | None) -> tirx.Expr:
    for factor in factors:
        value = value if factor is None else value * factor
    return value


def _factor(s: _Linear, e: Expr | None, at: Mapping[str, tirx.Expr]) -> tirx.Expr | None:
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


def _inside(position: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    """The position, or the last one when it lies beyond the end: reads stay inside, what they give is not used."""
    return T.min(position, size - i64(1))


def _cast_sum(s: _Linear, value: tirx.Expr) -> tirx.Expr:
    return value if dtype_of(value) == s.sums else T.cast(value, s.sums)


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
    value = constant[inside] if constant is not None else _decoded(tensor, s.own.buffers[e.name][inside])
    return T.if_then_else(position == inside, value, tirx.const(0, dtype_of(value)))


def _tensor_bits(s: _Linear, code: str, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
    tensor = s.plan.scheme.tensor(code)
    index = [at["padded"] if i == Var("n") and "padded" in at else s.own.position(i, at) for i in tensor.index]
    if not tensor.loaded:
        return T.cast(s.own.buffers[code][tuple(index)], "int64")
    shape = [s.own.extent(i) for i in tensor.index]
    return T.cast(load_bits(s.own.buffers[code], s.plan.buffer(code), index, shape), "int64")


def _weight(s: _Linear, n: tirx.Expr, k: tirx.Expr, elementwise: bool) -> tirx.Expr:
    at = {"n": _inside(n, s.own.sizes["n"]), "k": k, "padded": n}
    value = _core(s, s.plan.weight.core, at, s.plan.scheme.code.name)
    if elementwise and (fold := s.plan.weight.fold) is not None:
        value = as_float(value) * _factor(s, fold, at)
    return _cast_sum(s, value)


def _x(s: _Linear, m: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    activation = s.plan.scheme.activation()
    if activation is None:
        return _cast_sum(s, T.cast(s.own.buffers["x"][m, k], "float32"))
    code = next((t.name for t in activation.operand.tensors if t.role == "code"), "")
    return _cast_sum(s, _core(s, s.plan.activation.core, {"m": m, "k": k}, code))
