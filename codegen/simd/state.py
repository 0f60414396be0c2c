"""What the parts of one SIMD kernel share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import Parameters
from qdsl.codegen.plan import Plan
from qdsl.codegen.simd.blocked import FEATURES, LANES, Blocked
from qdsl.codegen.tir import i64

HALVES = FEATURES // LANES


def div(a: tirx.Expr, b: tirx.Expr | int) -> tirx.Expr:
    """Of numbers that are not negative, which TVM would take seconds to find out of a `floordiv`."""
    b = i64(b) if isinstance(b, int) else b
    if isinstance(b, tirx.IntImm) and b.value & (b.value - 1) == 0:
        return a >> i64(b.value.bit_length() - 1)
    return T.truncdiv(a, b)


def mod(a: tirx.Expr, b: tirx.Expr | int) -> tirx.Expr:
    """Of numbers that are not negative."""
    b = i64(b) if isinstance(b, int) else b
    if isinstance(b, tirx.IntImm) and b.value & (b.value - 1) == 0:
        return a & i64(b.value - 1)
    return T.truncmod(a, b)


def ceil_div(a: tirx.Expr, b: tirx.Expr | int) -> tirx.Expr:
    """Of numbers that are not negative."""
    return div(a + i64(b - 1), b) if isinstance(b, int) else div(a + b - i64(1), b)


def ramp(start: tirx.Expr | int) -> tirx.Expr:
    return tirx.Ramp(i64(start) if isinstance(start, int) else start, i64(1), LANES)


@dataclass
class State:
    """plan, blocked    what is compiled
    own              parameters of the function
    by_tiles         whether tiles multiply
    floats           whether float32 are multiplied instead of the unit's operands
    folds            whether tiles hold finished weights
    stacked          whether all planes of few tokens share a tile, so that each plane has sums of its own
    tokens           those of x, rounded up to what is worked on at once
    padded           inputs, rounded up likewise
    x                the inputs as operands: [tokens, planes, inputs], or rows of tiles, which `row` finds
    rows             of a plane, where x lies in tiles: of two tiles, or of all tokens where they are few
    sums             of x over each group, [tokens, groups], where weights are corrected by them: of codes, if there is an
                     offset, or else of what they stand for
    ones             an input of all ones, where sums of weights are needed
    """

    plan: Plan
    blocked: Blocked
    own: Parameters
    by_tiles: bool
    floats: bool = False
    folds: bool = False
    stacked: bool = False
    tokens: tirx.Expr | None = None
    padded: tirx.Expr | None = None
    x: tirx.Buffer | None = None
    rows: tirx.Expr | None = None
    sums: tirx.Buffer | None = None
    ones: tirx.Buffer | None = None

    @property
    def few(self) -> tirx.Expr:
        """Whether all tokens are those of one tile, which has no more rows than these."""
        most = 0 if self.folds else LANES // self.planes if self.stacked else LANES
        return self.own.sizes["m"] <= i64(most)

    @property
    def unit(self) -> str:
        return "f32" if self.floats else self.blocked.unit

    @property
    def depth(self) -> int:
        return 1 if self.floats else self.blocked.depth

    @property
    def pairs(self) -> bool:
        """Whether two inputs' products lie in neighbouring lanes: those of small floats."""
        return self.unit == "f32" and self.blocked.small_floats

    @property
    def planes(self) -> int:
        return 1 if self.floats else self.blocked.planes

    @property
    def multiple(self) -> int:
        """Of inputs."""
        return max(self.blocked.tile_inputs if self.by_tiles else 1, self.blocked.inputs, LANES)

    @property
    def kind(self) -> str:
        """Of partial sums."""
        return "int32" if self.blocked.whole else "float32"

    @property
    def offset(self) -> int:
        """By which an operand is above what its code stands for."""
        return 0 if self.by_tiles and self.blocked.signed else self.blocked.offset

    @property
    def zero(self) -> str | None:
        """The tensor that is taken off the codes of a group after their sum."""
        b = self.blocked
        return None if self.by_tiles and b.signed and not b.direct else b.zero

    @property
    def corrected(self) -> bool:
        """Whether sums of x are needed."""
        return bool(self.offset or self.zero or self.plan.weight.correction is not None)

    @property
    def sums_of_codes(self) -> bool:
        """Whether sums of x are of its codes, for something is taken off these or off the weight's; else they are scaled."""
        return bool(self.offset) or self.weighed

    @property
    def weighed(self) -> bool:
        """Whether sums of weights are needed."""
        return self.plan.activation.correction is not None

    def joined(self, planes: Sequence[tirx.Expr]) -> tirx.Expr:
        """A number of its planes, or a sum of their sums; a whole one is right if it fits 32 bits, whatever these do."""
        value = planes[0]
        for plane in planes[1:]:
            value = (value * tirx.const(256, self.kind) if self.blocked.whole else value) + plane
        return value

    @property
    def step(self) -> tirx.Expr:
        return i64(self.blocked.step) if self.blocked.step else self.own.sizes["k"]

    @property
    def groups(self) -> tirx.Expr:
        return ceil_div(self.own.sizes["k"], self.blocked.step) if self.blocked.step else i64(1)

    def place(self, row: tirx.Expr, plane: int, k: tirx.Expr, v: tirx.Expr | int = 0) -> tuple[tirx.Expr, ...]:
        """Where x has input k + v of a token; v is less than a vector has lanes, which k is a multiple of."""
        if not self.by_tiles:
            return row, i64(plane), k + v
        tile, pair = i64(self.blocked.tile_inputs), i64(2 * LANES)
        return self.row(div(row, pair), div(k, tile), plane, mod(row, pair)), mod(k, tile) + v

    def row(self, pair: tirx.Expr, tile: tirx.Expr, plane: int, token: tirx.Expr) -> tirx.Expr:
        """Where x has a plane of a token of a pair of tiles, and those after it in the next rows."""
        before = pair * div(self.padded, self.blocked.tile_inputs) + tile
        return (before * i64(self.planes) + i64(plane)) * self.rows + token

    def operand(self, row: tirx.Expr, plane: int, k: tirx.Expr) -> tirx.Expr:
        """The address of the operand that begins with input k."""
        return T.address_of(self.x[row, i64(plane), k])

    def one(self, k: tirx.Expr) -> tirx.Expr:
        """The same of the input of all ones."""
        return T.address_of(self.ones[k])


def local(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
    """Registers, or the stack: what TVM calls local on a CPU it takes from the heap."""
    return T.alloc_buffer(shape, dtype, scope="global")


def for_lanes(body: Callable[[tirx.Expr], None]) -> None:
    with T.vectorized(i64(0), i64(LANES)) as v:
        body(v)


def for_features(body: Callable[[tirx.Expr], None]) -> None:
    """All of a block, a vector at a time."""
    for u in range(HALVES):
        with T.vectorized(i64(0), i64(LANES)) as v:
            body(v + i64(u * LANES))
