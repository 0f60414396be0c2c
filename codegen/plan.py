"""Scheme and target to plan: how operands meet the multiplier, how weights lie in memory, which kernels serve what.

Every decision is a field of the plan, and `print(plan)` shows all of them.  Nothing here builds code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qdsl import transform
from qdsl.choice import Key, Row, Table, only
from qdsl.codegen.simd.blocked import FEATURES, LANES, Blocked, blocked, cell
from qdsl.codegen.simd.blocked import codes as blocked_codes
from qdsl.codegen.target import Target
from qdsl.diagnostic import Diagnostic, TargetError, error
from qdsl.dtype import DType, dtype
from qdsl.expr import Binary, Cast, Expr, Item, Negate, Number, Range, Ref, evaluate, interval, names, of_dtype
from qdsl.layout import Axis, Digit, Lane, Layout, Run, plain
from qdsl.manifest import Buffer, Step, Variant
from qdsl.order import ORDERED, SOURCE, Order, ordered
from qdsl.precision import DECLARED, Precision
from qdsl.scheme import Activation, Gather, Group, Operand, Scheme, Tensor, Var
from qdsl.split import WIDENED, Split, ranges, split
from qdsl.transform import passes, transformed

if TYPE_CHECKING:
    from qdsl.codegen.cuda.byte_weight import ByteWeight
    from qdsl.codegen.cuda.weight import Weight

VECTOR = 16  # output features in one CPU vector, or neighbouring threads of a SIMT kernel


@dataclass(frozen=True)
class MainLoop:
    """What the tensor-core main loop needs to know of `w = (q - zero) * scale + offset`."""

    code: str
    scale: str | None  # the grouped scale's name; scales without k are left to the epilogue
    zero: str | None  # the loaded zero's name
    constant: int  # a zero point known at compile time
    group: int | None  # along k; None: one group
    table: tuple[float, ...] = ()  # instead of `code - zero`: what the code stands for
    offset: str | None = None  # the loaded offset's name
    subtract: bool = False  # it is taken off
    order: Order | None = None  # the order of the inputs, if not their own
    parts: int = 1  # of the features, if the output has one for each of several
    activation: str | None = None  # the codes that x is quantized to, which are multiplied instead of x
    token_scale: str | None = None  # their grouped scale's name
    corrected: bool = False  # what a token's codes are off by is taken off its sums
    rescaled: bool = False  # a group's scale and zero make bytes of codes, and these are multiplied
    matrices: bool = False  # codes of bytes lie as `wgmma` reads them, not as fragments
    widened: DType | None = None  # what both operands are multiplied as, where x is made that before
    made_of: tuple[str, ...] = ()  # the tensors of which x is made then

    def operand(self, scheme: Scheme) -> DType:
        """The type that x and the weight are multiplied in."""
        return self.widened or scheme.compute.operand

    @property
    def grouped(self) -> tuple[str, ...]:
        """The tensors that are constant in a group, in the order that kernels take them."""
        return tuple(name for name in (self.scale, self.zero, self.offset) if name)

    def key(self, scheme: Scheme) -> Key:
        """Which tables of measured choices are about this main loop."""
        scale, zero, offset = (
            scheme.tensor(name).dtype if name else None for name in (self.scale, self.zero, self.offset)
        )
        kind = None if zero is None else "float" if zero.is_float else str(zero)
        return Key(str(self.operand(scheme)), scale and str(scale), kind, self.group, str(scheme.code.dtype),
                   offset and str(offset), len(self.table), self.order is not None)  # fmt: skip

    def __str__(self) -> str:
        zero = self.zero or (str(self.constant) if self.constant else "")
        core = f"({self.code} - {zero})" if zero else f"table[{self.code}]" if self.table else self.code
        core += f" * {self.scale}" if self.scale else ""
        core += f" {'-' if self.subtract else '+'} {self.offset}" if self.offset else ""
        core = f"bytes of {core}" if self.rescaled else core
        if self.activation:
            scaled = f"{self.activation} * {self.token_scale}" if self.token_scale else self.activation
            about = f", groups of {self.group} along k" if self.group else ", sums corrected" if self.corrected else ""
            return f"tensor cores: {scaled} by {core}{about}"
        about = ["one group along k" if self.group is None else f"groups of {self.group} along k"]
        about += [str(self.order)] if self.order else []
        about += [f"{self.parts} features of the weight for one of y"] if self.parts > 1 else []
        about += [f"by {' * '.join(self.made_of)}, both as {self.widened}"] if self.widened else []
        return f"tensor cores: {core}, {', '.join(about)}"


@dataclass(frozen=True)
class Plan:
    scheme: Scheme
    target: Target
    weight: Split
    activation: Split
    multiply: DType
    accumulate: DType
    step: int | None  # partial sums are scaled every `step` inputs; None: once
    main_loop: MainLoop | None  # None: the portable loop nest serves every m
    buffers: tuple[Buffer, ...]
    variants: tuple[Variant, ...]
    table: Table
    precision: Precision
    max_k: int | None
    notes: tuple[Diagnostic, ...]
    blocked: Blocked | None = None  # what the SIMD kernels of a CPU need to know
    beside_overlapped: bool = False  # in the library of another phase whose kernels overlap
    inner: Plan | None = None  # of a CPU: for x and the weight in the order of the weight's groups (`Plan.order`)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.tensor == name)

    @property
    def order(self) -> Order | None:
        """The order of inputs that the kernels take."""
        return next((b.order for b in self.buffers if b.order), None)

    @property
    def overlapped(self) -> bool:
        """Whether kernels are launched before their predecessors have ended, and wait for them (`cuda.overlap`)."""
        return (self.main_loop is not None or self.beside_overlapped) and self.target.dependent_launch

    def __str__(self) -> str:
        compute = self.scheme.compute
        lines = [
            f"plan of {self.scheme.bound} for {self.target}",
            f"  weight      {self.weight}",
            f"  activation  {self.activation}",
            f"  multiply    {compute.operand} as {self.multiply}, sums in {self.accumulate}",
            f"  partial sum {'over all of k' if self.step is None else f'every {self.step} inputs'}",
            f"  main loop   {self.main_loop or self.blocked or 'portable'}{f'; {self.order}' if self.inner else ''}",
            "  layouts",
        ]
        lines += [f"    {b}" for b in self.buffers]
        lines.append("  variants")
        lines += [f"    {variant}" for variant in self.variants]
        if len(self.variants) > 1:
            lines += ["  choice", *(f"    {line}" for line in self.table.lines())]
        return "\n".join([*lines, *(str(note) for note in self.notes)])


def plans(scheme: Scheme, target: Target) -> dict[str, Plan]:
    """The plan of every phase by its name; of a scheme without phases, one by the name "".

    A weight lies in one way for all of them: as the kernels of the first phase that has some of its own want it. Another
    phase, if it has other wishes, is served by the portable loop nest.
    """
    found = {name: plan(scheme.in_phase(name), target) for name in scheme.phases or ("",)}
    first = next((p for p in found.values() if p.main_loop), None)
    if first is None or len(found) == 1:
        return found
    held = {b.tensor: b for b in first.buffers}
    again = {name: plan(scheme.in_phase(name), target, held) for name in found}
    return {name: replace(p, beside_overlapped=True) for name, p in again.items()}


def plan(scheme: Scheme, target: Target, held: Mapping[str, Buffer] | None = None) -> Plan:
    """Decide everything about a scheme of one phase; raises TargetError for what this code generator can't do yet.

    held   how tensors lie that kernels of another phase take as well
    """
    assert not scheme.phases, "`plans` is for schemes with phases"
    _refuse_unsupported(scheme, target)
    activation = scheme.activation()
    compute = scheme.compute
    weight = split(scheme.weight, compute.operand, "w")
    x_split = split(activation.operand, compute.operand, "x") if activation else _identity(compute.operand)
    assert isinstance(weight, Split) and isinstance(x_split, Split), "checked schemes split"
    loop = _byte_loop(scheme, weight, x_split, target) if activation else _main_loop(scheme, weight, target)
    if activation and loop is None and (wide := _widened(scheme, activation, target)):
        loop, weight, x_split = wide
    step = _step(scheme, weight, x_split)
    made = _rescaled(weight.core, scheme)
    rescaled = (made.scale or "", made.zero or "", made.group or 0) if made else None
    simd = blocked(scheme, weight, x_split, target, step, _core(scheme, weight), rescaled)
    if simd is None and target.kind == "cpu" and (order := _order(scheme)):
        inner = plan(ordered(scheme, order), target)
        if inner.blocked:
            return _in_order(scheme, order, inner)
    buffers = tuple(_buffer(t, scheme, target, loop, simd) for t in scheme.tensors if t.loaded)
    if held and any(held.get(b.tensor, b) != b for b in buffers):
        loop, simd, buffers = None, None, tuple(held.get(b.tensor, b) for b in buffers)
    multiply, notes = _multiply(scheme, target) if loop is None and simd is None else (compute.operand, ())
    if loop:
        multiply = in_bytes(compute.operand) if loop.activation else loop.operand(scheme)
    loaded = [b.tensor for b in buffers if b.tensor not in transform_only(scheme)]
    computed = [t for t in activation.operand.tensors if not t.loaded] if activation else []
    quantize = (*transform_steps(scheme), *_quantize(scheme, target, computed))
    given = (*([transformed(activation)] if "x" in names(x_split.core) else []), *(t.name for t in computed))
    portable = Step("linear", (*given, *loaded, "y"))
    if loop is not None:
        steps = (*quantize, Step("widen", (*loop.made_of, WIDENED)) if loop.widened else portable)
        variants, table = _main_loop_variants(scheme, target, loop, steps if activation else ())
    elif simd is not None:
        args = tuple(dict.fromkeys((transformed(activation), *loaded, "y")))
        variants, table = _simd_variants(simd, transform_steps(scheme), args)
    else:
        # One thread sums a number of y by rising k, however many rows there are: the order never depends on m.
        variants, table = (Variant("portable", (*quantize, portable), order="by rising k"),), only("portable")
    precision = _precision(scheme, loop, target) if loop else Precision(simd.excess) if simd else DECLARED
    notes += _unused_hints(scheme, target)
    return Plan(scheme, target, weight, x_split, multiply, compute.accumulator, step, loop, buffers, variants, table, precision,
                _max_k(scheme, weight, x_split, step), notes, simd)  # fmt: skip


def _order(scheme: Scheme) -> Order | None:
    """The order in which each group of a weight has its inputs side by side, a multiple of 16; None where they are already, where
    x is quantized, in an order that scales of its own may depend on, or where there is no such order."""
    tensors = [t for t in scheme.weight.tensors if t.loaded and t.role not in ("code", "index")]
    places = [_place(t, scheme) for t in tensors]
    if scheme.activations or None in places:
        return None
    grouped = {(place.inputs, place.named) for place in places if place and place.inputs}
    if len(grouped) != 1:
        return None
    ((group, named),) = grouped
    found = Order(named, group, -(-group // LANES) * LANES)
    return found if named or found.padded != group else None


def _in_order(scheme: Scheme, order: Order, inner: Plan) -> Plan:
    """The plan of a scheme whose kernels are those of its weight in another order."""

    def step(s: Step) -> Step:
        return replace(s, args=tuple(ORDERED if arg == "x" else arg for arg in s.args))

    def buffer(t: Tensor) -> Buffer:
        if t.role == "index":
            return _buffer(t, scheme, inner.target, None)
        return replace(inner.buffer(t.name), order=order if t.name in along_k else None)

    along_k = {t.name for t in inner.scheme.weight.tensors if _along_k(t)}
    buffers = tuple(buffer(t) for t in scheme.tensors if t.loaded)
    before = Step("order_inputs", ("x", SOURCE, ORDERED))
    variants = tuple(replace(v, steps=(before, *map(step, v.steps))) for v in inner.variants)
    return replace(inner, scheme=scheme, buffers=buffers, variants=variants, inner=inner)


def _along_k(t: Tensor) -> bool:
    return any(i == Var("k") or (isinstance(i, Group) and i.axis == "k" and i.size is not None) for i in t.index)


def _quantize(scheme: Scheme, target: Target, computed: Sequence[Tensor]) -> tuple[Step, ...]:
    """The steps that compute the activations: one, where a kernel can compute all of them at once."""
    if target.kind == "cuda":
        from qdsl.codegen.cuda import quantize

        if computed and quantize.supported(scheme):
            activation, left_out = scheme.activation(), transform_only(scheme)
            loaded = [t.name for t in activation.operand.loaded if t.name not in left_out]
            return (Step("quantize", (transformed(activation), *loaded, *(t.name for t in computed))),)
    return tuple(Step(f"quantize_{t.name}", quantize_args(scheme, t)) for t in computed)


def quantize_args(scheme: Scheme, tensor: Tensor) -> tuple[str, ...]:
    """What the kernel that computes `tensor` takes: x, the activation's loaded tensors, those computed before, itself."""
    activation = scheme.activation()
    assert activation is not None
    before = []
    for t in activation.operand.tensors:
        if t.name == tensor.name:
            break
        before.append(t.name)
    loaded_after = [t.name for t in activation.operand.loaded if t.name not in before]
    left_out = transform_only(scheme)
    given = (name for name in (*before, *loaded_after) if name not in left_out)
    return (transformed(activation), *given, tensor.name)


def transform_steps(scheme: Scheme) -> tuple[Step, ...]:
    """What turns x into the x that is quantized: a step for each contraction.  All take the transform's own x and every
    tensor of it, whose shapes give the extents of digits."""
    activation = scheme.activation()
    found = []
    for at, p in enumerate(passes(activation.transforms) if activation else (), 1):
        args = dict.fromkeys((p.x, p.source, *transform.loaded(p.transform), p.name))
        found.append(Step(f"transform_{at}", tuple(args)))
    return tuple(found)


def transform_only(scheme: Scheme) -> set[str]:
    """The tensors that nothing but transforms of x reads."""
    activation = scheme.activation()
    if activation is None:
        return set()
    equations = [activation.operand.decode, *(t.value for t in activation.operand.tensors if isinstance(t.value, Expr))]
    used = {name for e in equations for name in names(e)}
    return {name for t in activation.transforms for name in transform.loaded(t)} - used


def _refuse_unsupported(scheme: Scheme, target: Target) -> None:
    def refuse(what: str, span, known: str = "the reference and the layouts know it; kernels don't") -> None:
        raise TargetError(str(error("not-generated", f"{what} can't be compiled yet", span, known)))

    if scheme.experts:
        refuse("a stack of experts (index `e`)", scheme.code.span)
    for t in scheme.output.tensors:
        if scheme.output.half and Var("n") in t.index:
            refuse(
                f"`{t.name}`, which has a value for every feature of the weight, in an output with a part of them,",
                t.span,
                "leave it out: nothing says which part it is for",
            )


def _identity(compute: DType) -> Split:
    return Split(Ref("x"), None, None, None, None, None, (), False, of_dtype(compute), True)


def _multiply(scheme: Scheme, target: Target) -> tuple[DType, tuple[Diagnostic, ...]]:
    """The type the portable loop nest multiplies in: the declared one, or the cheapest that holds it exactly."""
    wanted = scheme.compute.operand
    if wanted.name in target.multiplies:
        return wanted, ()
    for name in target.multiplies:
        candidate = dtype(name)
        if candidate.is_float == wanted.is_float and of_dtype(wanted).fits(candidate):
            why = f"operands are widened to {candidate}; every product stays exact"
            message = f"the portable loop nest for {target} has no {wanted} multiply"
            return candidate, (Diagnostic("note", "widened", message, None, "", (why,)),)
    legal = ", ".join(target.multiplies)
    raise TargetError(f"{target} has no multiplier that holds {wanted} exactly; it multiplies {legal}")


def _step(scheme: Scheme, weight: Split, activation: Split) -> int | None:
    sizes = [*weight.groups, *activation.groups]
    if weight.gathered and not scheme.compute.operand.is_float:
        return 1
    return math.gcd(*sizes) if sizes else None


def _max_k(scheme: Scheme, weight: Split, activation: Split, step: int | None) -> int | None:
    """Inputs beyond which an integer accumulator could overflow, in which partial sums are over so many inputs."""
    accumulate = scheme.compute.accumulator
    if accumulate.is_float:
        return None
    largest = weight.range.size * activation.range.size
    if activation.range.size <= 128:  # kernels multiply codes of 4 bits as if they were of 8
        largest = max(weight.range.size, 128) * 128
    if activation.correction is not None:  # whose own product is added
        largest *= 2
    limit = int(accumulate.max // max(1, largest))
    return limit if step is None or step > limit else None


# ---- the tensor-core main loop -----------------------------------------------------------------------------------
def _main_loop(scheme: Scheme, weight: Split, target: Target, widened: DType | None = None) -> MainLoop | None:
    """The main loop's view of the weight; None when the equation is neither `(code - zero) * scale + offset` nor
    `f(code) * scale + offset`, where all but the code may be missing."""
    code = scheme.code
    operand = widened or scheme.compute.operand
    if operand.name not in target.fragments:
        return None
    _, parts = scheme.output.half or ("", 1)
    if parts > 2:  # rows of a block of 16 that a lane has together are two
        return None
    if scheme.output.dtype != operand or code.dtype.bits > 8 or len(code.index) != 2:
        return None
    zero, table = _zero(weight.core, code.name, scheme), ()
    if zero is None:
        values = code_values(weight.core, scheme.weight.tensors)
        if values is None:
            return None
        zero, table = ("", 0), tuple(values.astype(np.float32).tolist())
    (name, constant), offset = zero, _offset(weight.correction)
    if (apart := _float_zero(weight, scheme)) is not None:
        name, offset = apart, ("", False)
    if offset is None or not isinstance(weight.fold, Ref | None):
        return None
    scale = weight.fold.name if weight.fold is not None else ""
    places = [_place(scheme.tensor(n), scheme) for n in (scale, name, offset[0]) if n]
    if None in places:
        return None
    sizes = {place.inputs for place in places if place.inputs}
    named = {place.named for place in places if place.inputs}
    group, order = math.gcd(*sizes) or None, None
    if named - {None} or (group and group % 16):  # no runs of whole steps
        if len(sizes) > 1 or len(named) > 1:
            return None
        order = Order(next(iter(named)), group, -(-group // 16) * 16)
        group = order.padded
    found = MainLoop(
        code.name,
        scale or None,
        name or None,
        constant,
        group,
        table,
        offset[0] or None,
        offset[1],
        order,
        parts,
        widened=widened,
    )
    return None if _weight(scheme, found).problem else found


def _core(scheme: Scheme, weight: Split) -> tuple[str, int | None, np.ndarray] | None:
    """(the whole zero that is taken off a group's codes or "", the inputs of this group, what codes stand for but for it, by
    bit pattern); None where that takes more than a code."""
    zero = _zero(weight.core, scheme.code.name, scheme)
    if zero and zero[0]:
        place = _place(scheme.tensor(zero[0]), scheme)
        if place is None or place.named:
            return None
        code = scheme.code.dtype
        return zero[0], place.inputs, code.decode(np.arange(1 << code.bits))
    values = code_values(weight.core, scheme.weight.tensors)
    return None if values is None else ("", None, values)


def _simd_variants(simd: Blocked, before: Sequence[Step], args: tuple[str, ...]) -> tuple[tuple[Variant, ...], Table]:
    """The SIMD kernels, which quantize x themselves, and up to how many tokens which of them is the fastest."""
    few, last = {"rows": 8}, "panel"
    if simd.tiles:
        # With each token more `rows` take longer, unless whole numbers wait for memory; of bfloat16 even one takes tiles less.
        rows = 2 if simd.floats or simd.step else 4
        few = {"rows": rows} if simd.whole or simd.floats else {}
        if simd.planes > 1 and not simd.whole:
            few["stacked"] = LANES // simd.planes
        last = "tiles"
    # In `rows`, how many sums a token's has depends on how many tokens there are; whole numbers do not mind.
    orders = {name: None if name == "rows" and not simd.whole else f"{simd.unit} in {name}" for name in (*few, last)}
    free: list[tuple[int | None, str]] = [*((most, name) for name, most in few.items()), (None, last)]
    if simd.folds:
        # What takes long to decode takes longer to finish.
        free[-1:] = [((8 if simd.decode == "number" else 2) * LANES, last), (None, "folded")]
        orders["folded"] = f"{simd.unit} in finished tiles"
    variants = tuple(
        Variant(name, (*before, Step(f"linear_{name}", args)), order=order) for name, order in orders.items()
    )
    return variants, Table("few and many", Row(1, 1, tuple(free), ((None, last),)))


def _byte_loop(scheme: Scheme, weight: Split, activation: Split, target: Target) -> MainLoop | None:
    """The main loop that multiplies codes by codes, of bytes; None where the equations have more in them than codes and,
    for all of k, their factors."""
    operand, code = scheme.compute.operand, scheme.code
    (name,) = names(activation.core) if isinstance(activation.core, Ref) else ("",)
    rest, multiplied = (weight.fold, weight.correction, activation.fold), in_bytes(operand)
    corrected, rescaled = activation.correction is not None, _rescaled(weight.core, scheme)
    if (
        multiplied.name not in target.byte_fragments
        or any(e is not None for e in rest)
        or not (weight.core == Ref(code.name) or rescaled)
    ):
        return None
    if name == "x" or scheme.tensor(name).dtype != operand or scheme.output.dtype.bits != 16 or len(code.index) != 2:
        return None
    widened = (multiplied.name in ("i8", "e4m3") and code.dtype == dtype("i4")) or (
        rescaled and multiplied == dtype("i8")
    )
    if (code.dtype != operand and not widened) or scheme.output.half:
        return None
    if corrected and not (multiplied == dtype("i8") and _of_tokens(activation.correction, scheme)):
        return None
    scales = (weight.promote, activation.promote)
    if rescaled:
        found = replace(rescaled, activation=name, corrected=corrected, matrices=target.matrices)
        return found if scales == (None, None) else None
    if any(e is not None and not isinstance(e, Ref) for e in scales):
        return None
    scale, of_tokens = (e.name if isinstance(e, Ref) else None for e in scales)
    sizes = {*weight.groups, *activation.groups}
    group = next(iter(sizes), None)
    if len(sizes) > 1 or (group and (group % 128 or corrected)):  # whole k tiles
        return None
    held = {scale: ("f32", "f16", "bf16", "e8m0"), of_tokens: ("f32", "e8m0")}
    for tensor in (scheme.tensor(n) for n in held if n):
        if str(tensor.dtype) not in held[tensor.name] or len(tensor.index) != 2:
            return None
    if scale and _place(scheme.tensor(scale), scheme) is None:
        return None
    if of_tokens and scheme.tensor(of_tokens).index[0] != Var("m"):
        return None
    return MainLoop(
        code.name,
        scale,
        None,
        0,
        group,
        activation=name,
        token_scale=of_tokens,
        corrected=corrected,
        matrices=target.matrices,
    )


def _rescaled(core: Expr, scheme: Scheme) -> MainLoop | None:
    """Of a core `i8((q - z) * r)`, which a group's integers make of codes of 4 bits: all but what the activations say."""
    match core:
        case Cast(kind, Binary("*", inner, Ref(scale))) if kind == dtype("i8") and scheme.code.dtype.bits == 4:
            zero = _zero(inner, scheme.code.name, scheme)
        case _:
            return None
    if zero is None or zero[1]:
        return None
    loaded = [scheme.tensor(n) for n in (scale, zero[0]) if n]
    places = [_place(t, scheme) for t in loaded]
    group = places[0].inputs if places[0] else None
    if not group or group % 128 or any(place != Place(1, group) for place in places):
        return None
    if not all(t.dtype.is_integer and t.dtype.bits <= 8 for t in loaded) or (zero[0] and loaded[1].dtype.bits > 4):
        return None
    return MainLoop(scheme.code.name, scale, zero[0] or None, 0, group, rescaled=True)


def _of_tokens(e: Expr, scheme: Scheme) -> bool:
    """Whether it is a whole number for every token, or one for all, that fits an i8."""
    tensors = {name: scheme.tensor(name) for name in names(e)}
    known = all(t.index in ((), (Var("m"),)) for t in tensors.values())
    return known and interval(e, ranges(tensors)).size <= 128 and interval(e, ranges(tensors)).quantum >= 1


def _widened(scheme: Scheme, activation: Activation, target: Target) -> tuple[MainLoop, Split, Split] | None:
    """The main loop that multiplies codes of both operands, times their scales of groups, as 16-bit floats of y's type; with the
    equations as they are split for that type. None where these are not exact, unless it is the declared type, to which
    operands are rounded; or sums are not of floats.

    A multiplier of such codes would do twice the products in a time, or more; the target has none that takes these.
    """
    half = scheme.output.dtype
    weight, x = split(scheme.weight, half, "w"), split(activation.operand, half, "x")
    if not (isinstance(weight, Split) and isinstance(x, Split) and scheme.compute.accumulator.is_float):
        return None
    operands = ((weight, scheme.weight), (x, activation.operand))
    rounded = half == scheme.compute.operand
    if x.correction is not None or not (rounded or all(_exact(s, o, half) for s, o in operands)):
        return None
    loop = _main_loop(scheme, weight, target, half)
    used = names(x.core if x.fold is None else Binary("*", x.core, x.fold))
    made = dict.fromkeys(transformed(activation) if name == "x" else name for name in used)
    return (replace(loop, made_of=tuple(made)), weight, x) if loop else None


def _exact(operand: Split, of: Operand, half: DType) -> bool:
    """Whether codes times their scales of groups are numbers of a 16-bit type. bf16 has the exponents of float32, in which
    other kernels multiply them: there powers of two are as exact (of numbers below 2^-126 it has fewer bits)."""
    known = ranges({t.name: t for t in of.tensors})
    anything = dtype("e8m0").max <= half.max

    def found(e: Expr) -> Range:
        power = anything and any(e == Ref(t.name) and t.dtype == dtype("e8m0") for t in of.tensors)
        return Range(1.0, 1.0, 1.0, 1) if power else known(e)

    return interval(operand.core if operand.fold is None else Binary("*", operand.core, operand.fold), found).fits(half)


def in_bytes(operand: DType) -> DType:
    """The type that bytes are multiplied in: there is none for 4 bits, and a byte holds each of those."""
    return dtype("i8") if operand == dtype("i4") else operand


def _weight(scheme: Scheme, loop: MainLoop) -> Weight | ByteWeight:
    from qdsl.codegen.cuda.main_loop import weight_of

    return weight_of(scheme, loop)


def code_values(core: Expr, tensors: Sequence[Tensor]) -> np.ndarray | None:
    """What every code stands for, if the core depends on one code of at most 8 bits alone: in float64, by bit pattern."""
    constants = {t.name: t.dtype.round(np.array(t.value)) for t in tensors if isinstance(t.value, tuple)}
    varying = [t for t in tensors if t.name in names(core) and t.name not in constants]
    if len(varying) != 1 or varying[0].role != "code" or varying[0].dtype.bits > 8:
        return None
    code = varying[0].dtype
    values = code.decode(np.arange(1 << code.bits))

    def look_up(e: Expr) -> np.ndarray:
        assert isinstance(e, Ref | Item), e
        return constants.get(e.name, values)

    return np.broadcast_to(evaluate(core, look_up, lambda *_: None), values.shape)


def _zero(core: Expr, code: str, scheme: Scheme) -> tuple[str, int] | None:
    """(loaded zero or "", constant zero) of a core `q`, `q - z` or `q - 8`; zero points are for integers."""
    kind = scheme.code.dtype
    match core:
        case Ref(name) if name == code:
            return "", 0
        case Binary("-", Ref(name), Number(value)) if name == code and kind.is_integer:
            return ("", int(value)) if value in range(1 << kind.bits) else None
        case Binary("-", Ref(name), Ref(z)) if name == code and kind.is_integer:
            return z, 0
        case _:
            return None


def _float_zero(weight: Split, scheme: Scheme) -> str | None:
    """The zero of `(q - z) * s` whose z is a float: no code less z is exact, so that -z * s, or -z, stands apart."""
    match weight.correction, weight.fold:
        case Binary("*", Negate(Ref(z)), Ref(s)), Ref(fold) if s == fold and weight.core == Ref(scheme.code.name):
            return z
        case Negate(Ref(z)), None if scheme.tensor(z).role == "zero" and weight.core == Ref(scheme.code.name):
            return z
        case _:
            return None


def _offset(correction: Expr | None) -> tuple[str, bool] | None:
    """(loaded offset or "", whether it is taken off) of a correction; None when it is anything else."""
    match correction:
        case None:
            return "", False
        case Ref(name):
            return name, False
        case Negate(Ref(name)):
            return name, True
        case _:
            return None


@dataclass(frozen=True)
class Place:
    """Which weights share a number of a tensor.

    features   how many features; None: all
    inputs     how many inputs, of one group; None: all
    named      the tensor that names the group of each input; None: inputs k belong to group k // inputs
    """

    features: int | None
    inputs: int | None
    named: str | None = None


def _place(t: Tensor, scheme: Scheme) -> Place | None:
    """None when the tensor's index says anything else."""
    features, inputs, named, rest = None, None, None, list(t.index)
    if rest and (rest[0] == Var("n") or (isinstance(rest[0], Group) and rest[0].axis == "n")):
        first = rest.pop(0)
        features = first.size if isinstance(first, Group) else 1
    if rest and isinstance(rest[0], Gather):
        named = rest[0].tensor
        rest[0] = scheme.tensor(named).extent
    if rest and isinstance(rest[0], Group) and rest[0].axis == "k":
        inputs = rest.pop(0).size
    return None if rest else Place(features, inputs, named)


def place_in(loop: MainLoop, t: Tensor, scheme: Scheme) -> Place | None:
    """The place of a grouped tensor in the kernel's order of inputs; None: it is that of one feature and one group."""
    place = _place(t, scheme)
    assert place is not None, "the main loop takes it"
    if loop.order and place.inputs:
        place = Place(place.features, loop.order.padded)
    return None if place == Place(1, loop.group) else place


def _main_loop_variants(
    scheme: Scheme, target: Target, loop: MainLoop, before: Sequence[Step]
) -> tuple[tuple[Variant, ...], Table]:
    """The kernels, and the choice among them.

    before    what computes the operand of x; the last step, if it is the portable one, computes y where no kernel can
    """
    from qdsl.codegen.cuda import measured, model
    from qdsl.codegen.cuda.candidates import candidates

    given = [loop.code, *loop.grouped, *([loop.token_scale] if loop.token_scale else [])]
    portable = before if loop.activation else ()
    before, x = (before[:-1], loop.activation) if loop.activation else (before, WIDENED if loop.widened else "x")
    rest = epilogue_tensors(scheme, loop)
    if loop.order:
        before, x = (*before, Step("order_inputs", (x, SOURCE, ORDERED))), ORDERED
    weight = _weight(scheme, loop)
    kernels = candidates(target, weight)
    variants = tuple(
        Variant(
            c.name,
            (*before, Step(f"linear_{c.name}", (x, *given, *rest, "y"))),
            1 if loop.order else c.k_multiple,  # of which runs are
            c.order,
        )
        for c in kernels
    )
    if portable:
        variants = (*variants, Variant("portable", tuple(portable), order="by rising k"))
    key = loop.key(scheme)
    table = measured.table(target.arch, key)
    if table is None or table.problems(variants):  # of tiles that have changed since: a test says so
        works = {c.name: c.work for c in kernels if c.work}
        known = tuple(v for v in variants if v.name in works or v.name == "portable")
        table = model.table(key, weight, target.gpu, works, known)
    return variants, table


def _precision(scheme: Scheme, loop: MainLoop, target: Target) -> Precision:
    """Of the kernels on tensor cores."""
    from qdsl.codegen.cuda.candidates import candidates

    weight = _weight(scheme, loop)
    return Precision.least(Precision(weight.excess, weight.kept, c.x_bits) for c in candidates(target, weight))


def epilogue_tensors(scheme: Scheme, loop: MainLoop) -> list[str]:
    """What kernels take for their epilogue: what is computed of x beside its codes, then what is loaded beside the weight; not
    what x alone is prepared with."""
    activation = scheme.activation()
    taken = {loop.code, *loop.grouped, loop.activation, loop.token_scale, *loop.made_of}
    if activation:
        taken |= {t.name for t in activation.operand.loaded} - set(names(activation.operand.decode))
    found = [t for t in scheme.tensors if t.name not in taken and t.role != "index"]
    computed = [t for t in activation.operand.tensors if not t.loaded and t.name not in taken] if activation else []
    return [t.name for t in (*computed, *(t for t in found if t.loaded))]


# ---- kernel layouts ----------------------------------------------------------------------------------------------
def _buffer(
    t: Tensor, scheme: Scheme, target: Target, loop: MainLoop | None, simd: Blocked | None = None
) -> Buffer:  # fmt: skip
    order, parts = None, 1
    if loop and t.name in (loop.code, *loop.grouped):
        order = loop.order
        parts = loop.parts if t.name == loop.code or place_in(loop, t, scheme) is None else 1
    if loop and t.name in loop.grouped:
        layout = _grouped_layout(t, scheme, loop)
    elif simd and t.index and t.index[0] == Var("n") and t.role not in ("bias", "residual"):
        layout = blocked_codes(simd.bits, simd.beside) if t == scheme.code else _vector_rows(t, FEATURES)
        parts = simd.parts
    else:
        tile = loop is not None or (target.kind == "cuda" and scheme.code.dtype.bits == 4)
        looked_up = loop is not None and bool(loop.table)
        placed = loop is not None and not looked_up and t == scheme.code
        own = places(t.dtype, loop.operand(scheme).mantissa) if placed else ()
        layout = _layout(t, scheme, tile, looked_up, own)
        if loop and loop.activation and t.name == loop.code:
            layout = byte_matrices() if loop.matrices and t.dtype.bits == 8 else fragment_bytes(t.dtype.bits)
    if t.dtype.bits <= 8:
        return Buffer(t.name, f"uint{layout.word}", layout, order, parts)
    native = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i32": "int32", "idx": "int32"}
    return Buffer(t.name, native[t.dtype.name], layout, order, parts)


def _grouped_layout(t: Tensor, scheme: Scheme, loop: MainLoop) -> Layout:
    """Kernels see two axes, features and groups; one that the tensor lacks is of one element."""
    first, *rest = t.index or (None,)
    lacks = Axis(())
    if place_in(loop, t, scheme) is None:
        found = _fragment_rows(t)
        return found if rest else replace(found, axes=(found.axes[0], lacks, *found.axes[1:]))
    found = plain(len(t.index), t.dtype.bits, max(8, 1 << (t.dtype.bits - 1).bit_length()))
    if rest:
        return found
    along_k = isinstance(first, Gather) or (isinstance(first, Group) and first.axis == "k")
    axes = {True: (lacks, *found.axes), False: (*found.axes, lacks)}[along_k] if first else (lacks, lacks)
    return replace(found, axes=axes)


def _layout(t: Tensor, scheme: Scheme, fragment: bool, looked_up: bool, own: tuple[int, ...]) -> Layout:
    """Derived, not tabulated.

    On tensor cores output features are the 16-row side of the fragment (rows c and c + 8: digits r, c); a lane reads
    its two rows together.  Elsewhere neighbouring features lie in neighbouring vector lanes (digit v), and the codes
    that share a byte are whole vectors apart (digit h), so that one shift serves a vector.
    """
    if t.index and t.index[0] == Var("n") and t.role not in ("bias", "residual"):
        if t == scheme.code:
            return fragment_codes(len(t.index), t.dtype.bits, looked_up, own) if fragment else _vector_codes(t)
        if fragment:
            return _fragment_rows(t)
        return _vector_rows(t, vector_features(scheme.code.dtype))
    word = max(8, 1 << (t.dtype.bits - 1).bit_length())
    if not t.index:  # kernels take a scalar as a tensor of one element
        return Layout((), (Axis(()),), t.dtype.bits, word)
    return plain(len(t.index), t.dtype.bits, word)


def fragment_codes(rank: int, bits: int, looked_up: bool = False, places: tuple[int, ...] = ()) -> Layout:
    """The A fragment of m16n8k16: n = r:2 c:8, k = h:2 t:4 p:2.  A lane is (c t) and has four k-steps s = 2 u + v.

    The two codes of a register, p, are 16 bits apart in a word; side by side if they are looked up in a table of few
    entries, those of a feature first. Codes that are no power of two wide lie in planes, from which kernels put words of cells together that are
    one: 3 bits in cells of 4, more in cells of 8. A plane holds its bits of several such words in the cells of one, so that
    a shift and a mask move those of all cells at once. Codes of 8 bits have the steps 0 and 1 of all lanes, then 2 and 3,
    so that 16 bytes of a lane lie together. `places` are those of the bits of either half of a word.
    """
    assert rank == 2, "codes are [n, k]"
    steps = (Digit("s", 4),) if bits == 4 else (Digit("u", 2), Digit("v", 2))
    dims = (
        (Digit("o"), Digit("r", 2), Digit("c", 8)),
        (Digit("i"), *steps, Digit("h", 2), Digit("t", 4), Digit("p", 2)),
    )
    outer = (Axis(("o",)), Axis(("i",)), Axis(("u", "c", "t") if bits == 8 else ("c", "t")))
    lie = {8: ("vh", "pr"), 4: ("s" if bits == 4 else "uv", "phr"), 2: ("u", "pvhr"), 1: ("", "puvhr")}
    if looked_up and bits <= 4:
        lie = {width: (words, f"{lanes[1:-2]}rhp") for width, (words, lanes) in lie.items() if width < 8}
    elif bits not in lie:
        words, lanes = {4: ("uv", "phr"), 8: ("uvh", "pr")}[cell(bits)]
        cut = {width: len(words) - (cell(bits) // width).bit_length() + 1 for _, width in planes(bits)}
        lie = {width: (words[:at], lanes + words[at:]) for width, at in cut.items()}
    if bits in lie:
        words, lanes = lie[bits]
        both = (*places, *(16 + place for place in places))
        return Layout(dims, (*outer, Axis(tuple(words), (Run(tuple(map(Lane, lanes))),))), bits, 32, both)
    runs = tuple(Run(tuple(map(Lane, "".join(lie[part[1]]))), part) for part in planes(bits))
    return Layout(dims, (*outer, Axis((), runs)), bits, 32)


def places(code: DType, mantissa: int) -> tuple[int, ...]:
    """Where the 16 bits of half a word lie, code by code, so that few shifts bring each to its place in a 16-bit float with
    such a mantissa: the sign on top, the others above what the mantissa has more.

    A code whose bits are all as far from their places takes one shift, or none. Each code in turn gets the shift that brings
    the most of its bits from places that are free. Empty: codes that are no floats, or that lie in planes.
    """
    if not (code.is_float and code.bits == cell(code.bits)):
        return ()
    wanted = [mantissa - code.mantissa + i for i in range(code.bits - code.signed)] + [15] * code.signed
    free, known, found = set(range(16)), {0}, []
    for _ in range(16 // code.bits):
        left, own = dict(enumerate(wanted)), {}
        while left:
            brought = {by: [i for i, place in left.items() if place - by in free] for by in range(-15, 16)}
            best = max(brought, key=lambda by: (len(brought[by]), by in known, -abs(by)))
            known.add(best)
            own |= {i: left.pop(i) - best for i in brought[best]}
            free -= set(own.values())
        found += [own[i] for i in range(code.bits)]
    return tuple(found)


def fragment_bytes(bits: int) -> Layout:
    """The A fragment of 32 inputs, bytes: n = r:2 c:8, k = h:2 t:4 p:4.  A lane is (c t) and has four steps s = 2 u + v of
    128 inputs, for 16 bytes at a time one after the other. Codes of 4 bits: a byte has those of both r, and two steps are 16
    bytes of a lane."""
    dims = (
        (Digit("o"), Digit("r", 2), Digit("c", 8)),
        (Digit("i"), Digit("u", 2), Digit("v", 2), Digit("h", 2), Digit("t", 4), Digit("p", 4)),
    )
    outer = (Axis(("o",)), Axis(("i",)))
    if bits == 8:
        return Layout(dims, (*outer, Axis(("u", "v", "c", "t")), Axis(("h", "r"), (Run((Lane("p"),)),))), 8, 32)
    return Layout(dims, (*outer, Axis(("u", "c", "t")), Axis(("v", "h"), (Run((Lane("p"), Lane("r"))),))), 4, 32)


def byte_matrices() -> Layout:
    """What wgmma reads from shared memory without swizzle: matrices of 8 features (c) by 16 bytes (t, p), of 128 inputs those
    of features 0 .. 7, then those of features 8 .. 15 (r)."""
    dims = (
        (Digit("o"), Digit("r", 2), Digit("c", 8)),
        (Digit("i"), Digit("s", 8), Digit("t", 4), Digit("p", 4)),
    )
    words = Axis(("t",), (Run((Lane("p"),)),))
    return Layout(dims, (Axis(("o",)), Axis(("i",)), Axis(("r", "s", "c")), words), 8, 32)


def _fragment_rows(t: Tensor) -> Layout:
    rest = [Digit(name) for name, _ in zip("ghij", t.index[1:], strict=False)]
    dims = ((Digit("o"), Digit("r", 2), Digit("c", 8)), *((d,) for d in rest))
    outer = (Axis(("o",)), *(Axis((d.name,)) for d in rest))
    if t.dtype.bits == 4:
        return Layout(dims, (*outer, Axis(("c",), (Run((Lane("r"),)),))), 4, 8)
    return Layout(dims, (*outer, Axis(("c",)), Axis(("r",))), t.dtype.bits, max(8, t.dtype.bits))


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """A width as bit planes of powers of two, (first bit, width) each: 5 = 4 + 1, 7 = 4 + 2 + 1."""
    found, low = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((low, width))
            low += width
    return tuple(found)


def vector_features(code: DType) -> int:
    """Output features of one block of the vector layout: whole vectors, enough to fill a byte of the finest plane."""
    return VECTOR * (8 // min(width for _, width in planes(code.bits)))


def _vector_codes(t: Tensor) -> Layout:
    halves = vector_features(t.dtype) // VECTOR
    dims = ((Digit("o"), Digit("h", halves), Digit("v", VECTOR)), (Digit("k"),))
    parts = planes(t.dtype.bits)
    runs = tuple(Run((Lane("h"),), part if len(parts) > 1 else None) for part in parts)
    if halves == 1:
        return Layout(dims, (Axis(("o",)), Axis(("k",)), Axis(("h", "v"))), t.dtype.bits, 8)
    return Layout(dims, (Axis(("o",)), Axis(("k",)), Axis(("v",), runs)), t.dtype.bits, 8)


def _vector_rows(t: Tensor, features: int) -> Layout:
    rest = [Digit(name) for name, _ in zip("ghij", t.index[1:], strict=False)]
    dims = ((Digit("o"), Digit("v", features)), *((d,) for d in rest))
    axes = (Axis(("o",)), *(Axis((d.name,)) for d in rest), Axis(("v",)))
    return Layout(dims, axes, t.dtype.bits, max(8, 1 << (t.dtype.bits - 1).bit_length()))


def _unused_hints(scheme: Scheme, target: Target) -> tuple[Diagnostic, ...]:
    arch = target.arch.rstrip("a")
    mine = [h for h in scheme.hints if h.target.rstrip("a") == arch or h.target == target.kind]
    return tuple(
        Diagnostic(
            "note",
            "unused-hint",
            f"the schedule for {h.target} is not used",
            h.span,
            "this code generator picks its own tiles",
        )
        for h in mine
    )
