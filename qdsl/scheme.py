"""The checked scheme: every name resolved, every parameter bound, every type known.

This is what the rest of the compiler reads.  Each value prints as the line that declares it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qdsl.diagnostic import Diagnostic, Span, error
from qdsl.dtype import DType
from qdsl.expr import Expr, Number, constant, substitute
from qdsl.layout import Layout

AXES = ("e", "m", "n", "k")  # experts, tokens, output features, input features
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Var:
    """One of the four axes, element by element."""

    axis: str

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True)
class Group:
    """`k // 128`: runs of `size` along an axis, the last one short; size None is the whole axis (`k // k`)."""

    axis: str
    size: int | None

    def __str__(self) -> str:
        return f"{self.axis} // {self.axis if self.size is None else self.size}"


@dataclass(frozen=True)
class Extent:
    """A literal extent, as of a table."""

    size: int

    def __str__(self) -> str:
        return str(self.size)


@dataclass(frozen=True)
class Gather:
    """`g`: the element named by an index tensor."""

    tensor: str

    def __str__(self) -> str:
        return self.tensor


@dataclass(frozen=True)
class Free:
    """A digit of a transform whose extent comes from the loaded tensor."""

    name: str

    def __str__(self) -> str:
        return self.name


Index = Var | Group | Extent | Gather | Free


@dataclass(frozen=True)
class Tensor:
    """One declaration.

    value   None for a loaded tensor, an expression for one computed at run time, numbers for a constant table
    extent  of an index tensor: the axis position its elements name
    """

    name: str
    role: str
    index: tuple[Index, ...]
    dtype: DType
    value: Expr | tuple[float, ...] | None = None
    optional: bool = False
    extent: Index | None = None
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def loaded(self) -> bool:
        return self.value is None

    def shape(self, sizes: Mapping[str, int], scheme: Scheme | None = None) -> tuple[int, ...]:
        """Logical shape, given the size of each axis (and of each free digit)."""
        return tuple(extent_of(i, sizes, scheme) for i in self.index)

    @property
    def held(self) -> tuple[Index, ...]:
        """The index in the order in which kernels hold what they compute: scales of groups have tokens side by side, for
        the tokens of a tile need theirs of one group together."""
        grouped = not self.loaded and any(isinstance(i, Group) for i in self.index)
        return self.index[::-1] if grouped else self.index

    def held_shape(self, sizes: Mapping[str, int], scheme: Scheme | None = None) -> tuple[int, ...]:
        """Shape of what kernels hold."""
        return tuple(extent_of(i, sizes, scheme) for i in self.held)

    def __str__(self) -> str:
        dtype = f"idx({self.extent})" if self.extent else str(self.dtype)
        value = f" = {self.value}" if isinstance(self.value, Expr) else " = {…}" if self.value else ""
        optional = " optional" if self.optional else ""
        return f"{self.role} {self.name}[{', '.join(map(str, self.index))}] : {dtype}{optional}{value}"


def extent_of(index: Index, sizes: Mapping[str, int], scheme: Scheme | None = None) -> int:
    """How many positions an index has."""
    match index:
        case Var(axis):
            return sizes[axis]
        case Group(axis, size):
            return 1 if size is None else -(-sizes[axis] // size)
        case Extent(size):
            return size
        case Gather(name):
            assert scheme is not None, "a gathered index needs the scheme that declares it"
            return extent_of(scheme.tensor(name).extent, sizes, scheme)
        case Free(name):
            return sizes[name]


@dataclass(frozen=True)
class Operand:
    """Weight or activation: its tensors in declared order and the right side of `~`."""

    tensors: tuple[Tensor, ...]
    decode: Expr

    @property
    def loaded(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.loaded)


@dataclass(frozen=True)
class Transform:
    """`transform x[m, (c d)] = …`: what happens to x before it is quantized."""

    places: tuple[str | tuple[str, ...], ...]
    value: Expr

    def __str__(self) -> str:
        places = ", ".join(p if isinstance(p, str) else f"({' '.join(p)})" for p in self.places)
        return f"transform x[{places}] = {self.value}"


@dataclass(frozen=True)
class Activation:
    """One activation block; `name` is empty unless the scheme has phases."""

    name: str
    operand: Operand
    transforms: tuple[Transform, ...] = ()


@dataclass(frozen=True)
class Compute:
    operand: DType
    accumulator: DType


@dataclass(frozen=True)
class Output:
    """The epilogue: `value` is y in terms of `acc` and the tensors.

    half: (digit, count) when one index of the weight holds several features of the output, as gate and up.
    """

    dtype: DType
    tensors: tuple[Tensor, ...]
    value: Expr
    half: tuple[str, int] | None = None


@dataclass(frozen=True)
class Binding:
    """How one tensor lies in a checkpoint.

    source   the stored tensor's name after the layer's prefix; may hold `{e}` for the expert
    stored   its element type
    words    added to each whole word before it is split (modulo its size)
    value    the declared element in terms of the stored field (`Stored()`), modulo the declared bits for integers
    offset   byte offset inside a record
    """

    tensor: str
    source: str
    stored: DType
    layout: Layout
    value: Expr
    words: int = 0
    offset: int | None = None
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.source


@dataclass(frozen=True)
class Storage:
    """One `layout` block."""

    name: str
    bindings: tuple[Binding, ...]
    record: int | None = None


@dataclass(frozen=True)
class Requirement:
    left: Expr
    op: str
    right: Expr
    span: Span | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}"


@dataclass(frozen=True)
class Hints:
    """One `schedule` block: wishes for the code generator that never change a result."""

    target: str
    condition: Requirement | None
    choices: Mapping[str, tuple]
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Scheme:
    name: str
    doc: str
    params: Mapping[str, int | str | DType]
    weight: Operand
    activations: tuple[Activation, ...]
    compute: Compute
    output: Output
    quantize: tuple[tuple[str, Expr], ...]
    layouts: Mapping[str, Storage]
    hints: tuple[Hints, ...]
    requires: tuple[Requirement, ...]
    text: str = field(repr=False)  # the canonical text, parameters unbound
    notes: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @property
    def code(self) -> Tensor:
        """The weight's first code tensor."""
        return next(t for t in self.weight.tensors if t.role == "code")

    @property
    def experts(self) -> bool:
        return any(i == Var("e") for i in self.code.index)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every declaration: weight, activations in order, output.  What a phase computes has no claim to its name: a
        later one may load it."""
        activations = [t for a in self.activations for t in a.operand.tensors]
        unique = {t.name: t for t in (*self.weight.tensors, *activations, *self.output.tensors)}
        return tuple(unique.values())

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def activation(self, phase: str = "") -> Activation | None:
        """The activation block for a layer's role: its own, or the first for "" and "both"."""
        named = next((a for a in self.activations if a.name == phase), None)
        return named or (self.activations[0] if self.activations and phase in ("", "both") else None)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.activations if a.name)

    def phase_of(self, role: str) -> str:
        """The phase that serves a layer's role; empty where the scheme has none."""
        active = self.activation(role)
        return active.name if active else ""

    def in_phase(self, phase: str) -> Scheme:
        """The scheme as a layer in this phase has it: its activation block is the only one, and needs no name."""
        if not self.phases:
            return self
        active = self.activation(phase)
        assert active is not None, f"{self.bound} has no phase `{phase}`"
        return replace(self, activations=(replace(active, name=""),))

    @property
    def bound(self) -> str:
        """Name and parameters: `awq4(act=f16, group=128)`."""
        args = ", ".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.name}({args})" if args else self.name

    def bits_per_weight(self, n: int = 4096, k: int = 4096) -> float:
        """Stored bits of all loaded weight tensors over n·k, for a typical size."""
        sizes = {"e": 1, "m": 1, "n": n, "k": k}
        total = 0
        for t in self.weight.loaded:
            count = 1
            for extent in t.shape(sizes, self):
                count *= extent
            total += count * t.dtype.bits
        return total / (n * k)

    def violated(self, n: int, k: int) -> Requirement | None:
        """The first `require` that a layer of n outputs and k inputs breaks, or None."""
        sizes: dict[str, Expr] = {"n": Number(n), "k": Number(k)}
        for r in self.requires:
            left, right = (constant(substitute(side, sizes)) for side in (r.left, r.right))
            if left is not None and right is not None and not COMPARE[r.op](left, right):
                return r
        return None


def expert_name(template: str, expert: int) -> str:
    """`experts.{e}.up_proj.qweight` for one expert."""
    return re.sub(r"\{e\}", str(expert), template)


def shape_error(
    scheme: Scheme, binding: Binding, name: str, found: Sequence[int], needed: Sequence[int], n: int, k: int
) -> Diagnostic:
    """The diagnostic for a checkpoint tensor of the wrong shape; points into the scheme."""
    fix = ""
    if group := _fitting_group(scheme, binding, found, n, k):
        fix = f"groups of {group} along k would make it so: is that what the checkpoint has?"
    elif sorted(found) == sorted(needed):
        fix = "the sizes match in another order: is this the transposed projection, or another layout?"
    message = f"checkpoint tensor `{name}` is {list(found)}, layout needs {list(needed)}"
    return error("shape", message, binding.span, f"with n = {n}, k = {k}", fix=fix)


def _fitting_group(scheme: Scheme, binding: Binding, found: Sequence[int], n: int, k: int) -> int | None:
    """The inputs of a group with which the stored tensor would have the shape that was found."""
    tensor = scheme.tensor(binding.tensor)
    index = tensor.index[1:] if binding.per_expert else tensor.index
    along = [isinstance(i, Gather) or (isinstance(i, Group) and i.axis == "k" and i.size is not None) for i in index]
    if sum(along) != 1 or any(isinstance(i, Free) for i in index):
        return None
    for count in (c for c in range(1, k) if k % c == 0):
        sizes = {"e": 1, "m": 1, "n": n, "k": k}
        shape = (count if grouped else extent_of(i, sizes, scheme) for i, grouped in zip(index, along, strict=True))
        if list(binding.layout.stored_shape(tuple(shape))) == list(found):
            return k // count
    return None
