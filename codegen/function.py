"""One PrimFunc under construction: its parameters, how an element of a declared tensor is read, and its outer loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda import overlap
from qdsl.codegen.plan import VECTOR, Plan
from qdsl.codegen.tir import decode, dtype_of, i64, load, selecting, storage
from qdsl.order import ORDERED, SOURCE
from qdsl.scheme import Extent, Free, Gather, Group, Index, Tensor, Var
from qdsl.split import WIDENED
from qdsl.transform import Pass, passes, result, solved, transformed

THREADS = 128  # of a CUDA block, one piece of work each
ENOUGH = 1 << 16  # operations of a thread of a CPU: some µs, as long as it takes to start one


@dataclass
class Parameters:
    """The buffers of one function, and how an element of a declared tensor is read from them.

    inlined   tensors without a buffer, by name: an element is computed where it is read
    """

    plan: Plan
    sizes: dict[str, tirx.Expr]
    buffers: dict[str, tirx.Buffer]
    inlined: dict[str, Callable[[Mapping[str, tirx.Expr]], tirx.Expr]] = field(default_factory=dict)

    def element(self, name: str, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
        """The tensor's element for the point `at` (axis name -> position); absent optional tensors read as 0."""
        if name in self.inlined:
            return self.inlined[name](at)
        tensor = self.plan.scheme.tensor(name)
        return self.element_at(tensor, [self.position(i, at) for i in tensor.held])

    def element_at(self, tensor: Tensor, index: list[tirx.Expr]) -> tirx.Expr:
        """The same for a position on each of the indices that it is held by."""
        buffer = self.buffers[tensor.name]
        if not tensor.loaded:
            value = buffer[tuple(index)] if index else buffer[0]
            return decoded(tensor, value)
        shape = [self.extent(i) for i in tensor.index]
        value = (
            load(buffer, self.plan.buffer(tensor.name), tensor.dtype, index, shape)
            if index
            else decoded(tensor, buffer[0])
        )
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
            case Free(name):
                return self.sizes.setdefault(name, tirx.Var(name, "int64"))
        raise AssertionError(f"no extent for {i}")


def decoded(tensor: Tensor, value: tirx.Expr) -> tirx.Expr:
    """An unpacked element of a buffer as a number: float32, or int32 for integers."""
    if tensor.dtype.bits <= 8:
        return decode(tensor.dtype, T.cast(value, "uint32"))
    return T.cast(value, "float32" if tensor.dtype.is_float else "int32")


@contextmanager
def open_function(plan: Plan, name: str, args: tuple[str, ...]) -> Iterator[tuple[IRBuilder, Parameters]]:
    """Open a PrimFunc with one buffer for each argument.  Who takes x as transforms leave it
    has it as `x`."""
    scheme, block = plan.scheme, plan.scheme.activation()
    made = {p.name: p for p in passes(block.transforms)} if block else {}
    sizes = {a: tirx.Var(a.upper(), "int64") for a in ("m", "n", "k")}
    width = sizes["n"]  # of y
    if scheme.output.half:  # y has a feature for several of the weight
        width = tirx.Var("J", "int64")
        sizes["n"] = width * i64(scheme.output.half[1])
    own, places = Parameters(plan, sizes, {}), tirx.Var("P", "int64")
    out = storage(scheme.output.dtype)
    on_cpu = plan.target.kind == "cpu"
    with selecting(on_cpu), IRBuilder() as builder, T.prim_func(False, on_cpu, False):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        spelled = {arg: arg.replace(".", "_") for arg in args}
        handles = {arg: IRBuilder.name(f"{s}_handle", T.arg(s, T.handle())) for arg, s in spelled.items()}
        for arg, handle in handles.items():
            if arg in ("x", "y", WIDENED):
                shape, dtype = (sizes["m"], width if arg == "y" else sizes["k"]), out
            elif arg in (SOURCE, ORDERED):
                shape, dtype = ((places,), "int32") if arg == SOURCE else ((sizes["m"], places), out)
            elif arg in made:
                whole = made[arg].contraction.result == result(made[arg].transform)
                shape = sizes["m"], sizes["k"] if whole else tirx.Var(f"{spelled[arg]}_width", "int64")
                dtype = "float32"
            else:
                tensor = scheme.tensor(arg)
                shape, dtype = buffer_shape(own, tensor)
            own.buffers[arg] = IRBuilder.name(spelled[arg], T.match_buffer(handle, shape, dtype))
        if "x" not in args and (x := transformed(block)) in args:
            own.buffers["x"] = own.buffers[x]
        yield builder, own


def buffer_shape(own: Parameters, tensor: Tensor) -> tuple[tuple, str]:
    shape = [own.extent(i) for i in tensor.held]
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


def extents(plan: Plan, own: Parameters, p: Pass) -> dict[str, tirx.Expr]:
    """How many positions each digit of a transform has."""
    size: dict[str, tirx.Expr] = {}
    for found in solved(p.transform):
        if found.tensor == "x":
            whole = own.sizes["k"]
        else:
            whole = own.extent(plan.scheme.tensor(found.tensor).index[found.axis])
        for digit in found.others:
            whole = T.truncdiv(whole, size[digit])
        size[found.digit] = whole
    return size


def limit_threads(count: tirx.Expr) -> None:
    """On a CPU: the next parallel loop takes at most so many threads (`openmp_shim.cc`), one where count is less."""
    T.evaluate(T.call_extern("void", "qdsl_limit_threads", count))


def in_order(pieces: tirx.Expr) -> None:
    """On a CPU: the next parallel loop has so many turns, which threads take in order, each when it is free."""
    T.evaluate(T.call_extern("void", "qdsl_in_order", pieces))


@contextmanager
def each(plan: Plan, count: tirx.Expr, operations: tirx.Expr) -> Iterator[tirx.Expr]:
    """`count` independent pieces of work: a parallel loop, or one CUDA thread each.

    operations   of all pieces together; a CPU takes no more threads than have enough of them
    """
    if plan.target.kind == "cpu":
        limit_threads(T.min(count, T.floordiv(operations, i64(ENOUGH))))
        with T.parallel(i64(0), count) as i:
            yield i
        return
    T.device_entry()
    block = T.cta_id([T.cast(T.truncdiv(count + i64(THREADS - 1), i64(THREADS)), "int32")])
    thread = T.thread_id([THREADS])
    if plan.overlapped:
        overlap.wait()
        overlap.let_in()
    i = T.cast(block, "int64") * i64(THREADS) + T.cast(thread, "int64")
    with T.If(i < count), T.Then():
        yield i


def for_tokens(rows: tirx.Expr, elements: tirx.Expr, body: Callable[[tirx.Expr], None]) -> None:
    """Rows of so many elements of x, on a CPU: in parallel, where every thread has enough of them."""
    limit_threads(T.floordiv(elements, i64(ENOUGH >> 3)))  # each is read, rounded and written
    with T.parallel(i64(0), rows) as row:
        body(row)


def in_lanes(body: Callable[[tirx.Expr], None], lanes: int = VECTOR) -> None:
    """A vector, or some."""
    with T.vectorized(i64(0), i64(lanes)) as v:
        body(v)


def in_vectors(start: tirx.Expr, end: tirx.Expr, body: Callable[[tirx.Expr], None]) -> None:
    """start .. end in whole vectors, then one by one."""
    whole = T.floordiv(end - start, i64(VECTOR))
    with T.serial(i64(0), whole) as i:
        in_lanes(lambda v: body(start + i * i64(VECTOR) + v))
    with T.serial(start + whole * i64(VECTOR), end) as i:
        body(i)


def local(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
    return T.alloc_buffer(shape, dtype, scope="local")


def store(buffer: tirx.Buffer, value: tirx.Expr, *index) -> None:
    T.buffer_store(buffer, value, list(index))
