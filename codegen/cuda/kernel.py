"""What every part of a kernel refers to while its body is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import tvm
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.builder import wide
from qdsl.codegen.cuda.decode import store_pairs, store_table
from qdsl.codegen.cuda.weight import Weight

if TYPE_CHECKING:
    from qdsl.codegen.cuda.tile import Tile
    from qdsl.codegen.cuda.warp import WarpTile
    from qdsl.codegen.cuda.wgmma import WarpgroupTile

Cut = TypeVar("Cut", bound="Tile | WarpTile | WarpgroupTile")


@dataclass(frozen=True)
class Kernel(Generic[Cut]):
    """The names in scope while a body is built. Sizes and ids are int32; row bases are computed in int64."""

    weight: Weight
    tile: Cut
    x: tirx.Buffer
    q: tirx.Buffer
    grouped: Mapping[str, tirx.Buffer]  # scale and zero by role
    token_scale: tirx.Buffer | None
    M: tirx.Expr
    N: tirx.Expr  # features of y
    K: tirx.Expr  # units of 16 bits of x
    thread: tirx.Expr
    pool: tirx.Buffer
    m0: tirx.Expr | None = None  # first token of the CTA; None: its parts have one each
    first: tirx.Expr | None = None  # the first that it stores; None: the same
    o0: tirx.Expr | None = None  # first tile of 16 features of the CTA
    aligned: tirx.Expr | None = None  # rows of x begin on 16-byte boundaries; None: they always do
    rank: tirx.Expr | None = None  # of the CTA in its cluster; None: it is alone
    partials: int = 0  # where partial sums are in shared memory, in bytes
    table_start: int = 0  # and the weight's table
    parts: int = 1  # of the weight's features: 2 have their rows of a block of 16 in c and c + 8
    halved: tirx.Expr | None = None  # whether the CTAs of the cluster share k in this part; None: as the tile says

    @classmethod
    def of(cls, weight, tile, buffers: Mapping[str, tirx.Buffer], **places) -> Kernel:
        """The kernel of buffers x, q, y and those of the groups, by role."""
        (M, K), N = buffers["x"].shape, buffers["y"].shape[1]
        units = tirx.truncdiv(K, tirx.IntImm("int64", weight.unit)) if weight.unit > 1 else K
        sizes = {name: T.cast(size, "int32") for name, size in (("M", M), ("N", N), ("K", units))}
        grouped = {role: buffers[role] for role in weight.grouped}
        return cls(weight, tile, buffers["x"], buffers["q"], grouped, buffers.get("token_scale"), **sizes, **places)

    def stores(self, m, count: int = 1):
        """Whether one of tokens m .. m + count is stored by this CTA."""
        inside = m < self.M
        return inside if self.first is None else tirx.all(inside, m + count > self.first)

    @property
    def k_tiles(self):
        return (self.K + 63) >> 6

    @property
    def share(self):
        """First k tile of the CTA, and the end: the CTAs of a cluster take contiguous shares of whole slices."""
        if self.rank is None:
            return T.int32(0), self.k_tiles
        size, count = self.tile.slice, self.tile.cluster
        slices = (self.k_tiles + (size - 1)) // size
        return tuple((self.rank + i) * slices // count * size for i in range(2))

    @property
    def block_outputs(self) -> int:
        """Features of y of a block of 16 features of the weight."""
        return 16 // self.parts

    def features(self, n) -> list:
        """The weight's feature of each part for feature n of y."""
        return [wide(n) + wide(self.N) * part if part else wide(n) for part in range(self.parts)]

    @property
    def outputs(self) -> int:
        """Features of y of a CTA."""
        return self.tile.features // self.parts

    @property
    def o_tiles(self):
        return (self.N + (self.block_outputs - 1)) >> (self.block_outputs.bit_length() - 1)

    @property
    def team(self):
        return self.thread // self.tile.team_threads

    @property
    def team_thread(self):
        return self.thread % self.tile.team_threads

    @property
    def lane(self):
        return self.thread % 32

    @property
    def token_warp(self):
        return self.tile.token_warp(self.thread // 32)

    def shared(self, shape, dtype: str, start: int = 0):
        """The pool as an array, from a number of bytes on."""
        size = tvm.DataType(dtype).itemsize
        return T.decl_buffer(shape, dtype, data=self.pool.data, scope="shared.dyn", elem_offset=start // size)

    @property
    def table(self):
        """Shared address of the weight's table; None: it has none."""
        if not self.weight.table:
            return None
        return T.cuda.cvta_generic_to_shared(self._table.ptr_to([0]))

    @property
    def pairs(self):
        """The weight's table of pairs, [pair, lane] in one; None: it has none here."""
        if not (self.weight.side_by_side and self.tile.looks_up_pairs):
            return None
        return self.shared((self.weight.table_bytes(True) // 4,), "uint32", self.table_start)

    def store_table(self, threads: int):
        """The first threads do; they meet before it is read."""
        weight = self.weight
        if self.pairs is not None:
            store_pairs(weight.code, weight.half, weight.table, self.thread, threads, self.pairs)
        else:
            store_table(weight.table, self.thread, self._table)

    @property
    def _table(self):
        return self.shared((len(self.weight.table),), "float32", self.table_start)

    @property
    def filler(self):
        """Which of the threads that fill a stage together."""
        return self.thread % self.tile.fillers

    def block(self, f: int):
        """Block of 16 features of the CTA that is the warp's f'th."""
        return self.tile.block(self.thread // 32, f)
