"""What a kernel needs to know of weights that are multiplied as bytes: quantized activations by quantized weights.

To everything but the multiplication two neighbouring inputs are one unit of 16 bits, so that rings and stages know
nothing of bytes: 64 units are a k tile, and an instruction multiplies 16 units, 32 inputs. Weights in registers are stored
as those of a fragment:

               k: 4t .. 4t+3   16+4t .. 16+4t+3
    feature c      [ reg 0 ]       [ reg 2 ]            lane = 4 c + t
    feature c + 8  [ reg 1 ]       [ reg 3 ]            c = 0 .. 7, t = 0 .. 3

Integers are summed exactly, in any order. The multiplier sums fp8 products with fewer bits than a float32 has, so that after
every 128 inputs what it has summed is added to sums that have them all; so are sums of groups, times their scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from qdsl.codegen.cuda.decode import HALVES, Half
from qdsl.codegen.cuda.weight import Shared
from qdsl.dtype import DType

OPERANDS = {"i8": "s8", "e4m3": "e4m3", "e5m2": "e5m2"}  # in PTX
ONES = 128  # bytes of eight tokens whose 16 codes are all 1


@dataclass(frozen=True)
class ByteWeight:
    """What a kernel of bytes needs to know of a weight: w = q * scale, where the epilogue has the rest of it.

    operand      type of the activations' codes and of the multiplier
    code         that of the weight's: the same, or one of 4 bits, which becomes one (`unpacked`, `rescale`)
    compute      of y: "float16" or "bfloat16"
    group        units of a group along k, which has a scale: whole k tiles; None: there are no such scales
    scale        type of the weight's scales of groups
    shared       which weights share one, if not those of one feature
    token_scale  type of the scales of x of groups
    corrected    sums of codes are needed as well, for tokens whose codes are off by a number
    rescaled     not sums are multiplied by scales of groups, but codes less zeros, and are bytes then; both are integers
    zero         type of these zeros
    matrices     codes of bytes lie in matrices that wgmma reads from shared memory, not as fragments
    """

    operand: DType
    code: DType
    compute: str
    group: int | None = None
    scale: str | None = None
    shared: Shared | None = None
    token_scale: str | None = None
    corrected: bool = False
    rescaled: bool = False
    zero: str | None = None
    matrices: bool = True

    unit = 2
    x_type, staged_x = "uint8", "uint16"
    table, side_by_side = (), False
    arithmetic = "bytes"
    problem = ""
    excess = 0.0

    @property
    def from_shared(self) -> bool:
        """Weights are operands where they are stored."""
        return self.matrices and self.code == self.operand

    @property
    def uniform(self) -> bool:
        """The features of a block of 16 have the same scale, which a stage holds once."""
        return self.shared is not None and (not self.shared.features or self.shared.features % 16 == 0)

    @property
    def grouped(self) -> dict[str, str]:
        return {role: kind for role, kind in (("scale", self.scale), ("zero", self.zero)) if kind}

    @property
    def promoted(self) -> bool:
        """Sums of 128 inputs or fewer are added to others, in float32."""
        return self.operand.is_float or (self.group is not None and not self.rescaled)

    @property
    def half(self) -> Half:
        return HALVES[self.compute]

    @property
    def unit_bits(self) -> int:
        return 2 * self.code.bits

    @property
    def products(self) -> str:
        """The type of sums of products; integers are held as the registers that have their bits."""
        return "float32" if self.operand.is_float else "uint32"

    @property
    def sums(self) -> str:
        """That of the sums of all inputs."""
        return "float32" if self.promoted else "uint32"

    @property
    def kept(self) -> int | None:
        """Bits below its largest term that the multiplier keeps of a sum; None: all."""
        return 13 if self.operand.is_float else None

    @property
    def unit_of_codes(self) -> float:
        """What an operand of 1 is in codes: nibbles become 16 times themselves, or 2^-9, the smallest float of e4m3."""
        return 1.0 if self.code == self.operand or self.rescaled else 2.0**9 if self.operand.is_float else 1 / 16

    def finished(self, value):
        """A sum of all inputs as float32."""
        if not self.promoted:
            value = T.cast(T.reinterpret("int32", value), "float32")
        return value if self.unit_of_codes == 1 else value * T.float32(self.unit_of_codes)

    def number(self, value):
        """A sum of products of 128 inputs as float32."""
        return value if self.products == "float32" else T.cast(T.reinterpret("int32", value), "float32")

    def unpacked(self, word, upper: bool):
        """Four operands out of eight nibbles in two's complement: out of the upper or the lower of every byte."""
        if not self.operand.is_float:
            return (word if upper else word << T.uint32(4)) & T.uint32(0xF0F0F0F0)
        # As floats of 2^-9, whose bits below 8 are their number: the sign, and 8 less the rest of a negative nibble.
        negative = (word >> T.uint32(7 if upper else 3)) & T.uint32(0x01010101)
        rest = (word >> T.uint32(4) if upper else word) & T.uint32(0x07070707)
        return (rest ^ negative * T.uint32(7)) + negative * T.uint32(0x81)

    @property
    def ones(self) -> bool:
        """Whether shared memory has eight tokens whose codes are all 1, behind the barriers."""
        return self.corrected

    def table_bytes(self, pairs: bool) -> int:
        return ONES if self.ones else 0

    def place(self, role: str) -> Shared | None:
        return self.shared
