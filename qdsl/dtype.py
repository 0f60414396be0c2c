"""Number formats: what values a code can take, and how real numbers round to it.

Every format decodes from and encodes to unsigned bit patterns (numpy), so the rest of the compiler never meets a
platform's own idea of a small float.  Rounding is to nearest, ties to even.

Sources: IEEE 754-2019 (f16, f32); OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2); OCP Microscaling Formats
1.0 (e3m2, e2m3, e2m1, e8m0).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DType:
    """One number format.

    kind      "uint", "int", "float" or "index" (an integer that names a position on an axis)
    bits      storage bits of one element
    exponent, mantissa   field widths of a float; `signed` is False for e8m0 alone
    special   what the top codes of a float mean: "ieee" (infinities and NaN), "nan" (only the all-ones code, per
              sign, is NaN) or "finite" (every code is a number)
    """

    name: str
    kind: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    signed: bool = True
    special: str = "finite"

    def __str__(self) -> str:
        return self.name

    # ---- ranges -------------------------------------------------------------------------------------------------
    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("uint", "int")

    @property
    def precision(self) -> int:
        """Significand bits, the implicit one included; for an integer, the bits of its largest magnitude."""
        if self.is_float:
            return self.mantissa + 1
        return self.bits - 1 if self.kind == "int" else self.bits

    @property
    def bias(self) -> int:
        return 127 if self.name == "e8m0" else 2 ** (self.exponent - 1) - 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        if self.kind == "int":
            return float(2 ** (self.bits - 1) - 1)
        if not self.is_float:
            return float(2**self.bits - 1)
        if self.name == "e8m0":
            return 2.0**127
        top = 2**self.exponent - 1 - (self.special == "ieee")
        significand = 2 - 2.0**-self.mantissa
        if self.special == "nan":
            significand -= 2.0**-self.mantissa
        return significand * 2.0 ** (top - self.bias)

    @property
    def min(self) -> float:
        """Smallest value (most negative)."""
        if self.kind == "int":
            return -float(2 ** (self.bits - 1))
        return -self.max if self.is_float and self.signed else 0.0

    @property
    def quantum(self) -> float:
        """Every value is a multiple of this power of two."""
        if not self.is_float:
            return 1.0
        return 2.0**-127 if self.name == "e8m0" else 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def unit(self) -> float:
        """Unit roundoff: the largest relative error of rounding a normal number to this format (0 for integers)."""
        return 2.0 ** -(self.mantissa + 1) if self.is_float else 0.0

    @property
    def storage(self) -> np.dtype:
        """The unsigned numpy type that holds one bit pattern."""
        return np.dtype(f"uint{max(8, 1 << (self.bits - 1).bit_length())}")

    # ---- values -------------------------------------------------------------------------------------------------
    def decode(self, pattern: np.ndarray) -> np.ndarray:
        """Bit patterns to float64 values."""
        pattern = np.asarray(pattern)
        if self.is_float and self.bits <= 8:
            return _codes(self)[pattern.astype(np.intp)]
        if self.name == "f32":
            return pattern.astype(np.uint32).view(np.float32).astype(np.float64)
        if self.name == "f16":
            return pattern.astype(np.uint16).view(np.float16).astype(np.float64)
        if self.name == "bf16":
            with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
                return (pattern.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        value = pattern.astype(np.int64)
        if self.kind in ("int", "index"):
            value = np.where(value >> (self.bits - 1), value - (1 << self.bits), value)
        return value.astype(np.float64)

    def round(self, value: np.ndarray) -> np.ndarray:
        """float64 values to the nearest value of this format.

        Formats of up to 8 bits and integers saturate; f16, bf16 and f32 overflow to infinity as IEEE 754 does.
        NaN stays NaN where the format has one and becomes 0 elsewhere.
        """
        return self.decode(self.encode(value))

    def encode(self, value: np.ndarray) -> np.ndarray:
        """float64 values to bit patterns of type `storage`; rounds as `round` says."""
        value = np.asarray(value, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.name == "f16":
                return value.astype(np.float16).view(np.uint16)
            if self.name == "f32":
                return value.astype(np.float32).view(np.uint32)
            if self.name == "bf16":
                return (_round_to(value, 8, -133).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            if self.is_float:
                return self._encode_small(value)
            whole = np.rint(np.clip(value, self.min, self.max))
            whole = np.where(np.isnan(whole), 0.0, whole).astype(np.int32 if self.bits < 32 else np.int64)
            return whole.astype(self.storage) & self.mask

    def _encode_small(self, value: np.ndarray) -> np.ndarray:
        code = self._code_by_arithmetic(value) if self.mantissa else self._code_by_search(value)
        if self.signed:
            code = code | (np.signbit(value).astype(np.int32) << (self.bits - 1))
        elif self.name == "e8m0":
            code = np.where(value <= 0, 0, code)
        return np.where(np.isnan(value), self.nan_code or 0, code).astype(self.storage)

    def _code_by_arithmetic(self, value: np.ndarray) -> np.ndarray:
        """The nearest code, sign aside: how many of the smallest steps of its binade a value is, after the codes of the
        binades below."""
        size = np.minimum(np.abs(value), self.max)
        lowest = 1 - self.bias
        exponent = np.maximum((size.view(np.int64) >> 52) - 1023, lowest)
        steps = np.rint(size * ((1023 + self.mantissa - exponent) << 52).view(np.float64))
        return steps.astype(np.int32) + ((exponent - lowest) << self.mantissa).astype(np.int32)

    def _code_by_search(self, value: np.ndarray) -> np.ndarray:
        """The same for formats without a mantissa, where it is the exponent that decides a tie."""
        magnitudes = _magnitudes(self)  # ascending: the code of magnitudes[i] is i
        middle = (magnitudes[1:] + magnitudes[:-1]) / 2
        size = np.abs(np.nan_to_num(value, nan=0.0, posinf=self.max, neginf=-self.max))
        code = np.searchsorted(middle, size, side="left")
        tie = (code < len(middle)) & (size == middle[np.minimum(code, len(middle) - 1)])
        return np.where(tie & (code % 2 == 1), code + 1, code)

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def nan_code(self) -> int | None:
        """A bit pattern that is NaN, or None."""
        if self.name == "e8m0":
            return 255
        return (self.mask >> 1) if self.is_float and self.special != "finite" else None


@functools.cache
def _codes(dtype: DType) -> np.ndarray:
    """The value of every code of a float of at most 8 bits."""
    code = np.arange(2**dtype.bits)
    if dtype.name == "e8m0":
        return np.where(code == 255, np.nan, np.exp2(code - 127.0))
    field = (code >> dtype.mantissa) & (2**dtype.exponent - 1)
    fraction = (code & (2**dtype.mantissa - 1)) / 2.0**dtype.mantissa
    value = np.where(
        field == 0,
        fraction * 2.0 ** (1 - dtype.bias),
        (1 + fraction) * np.exp2(field - float(dtype.bias)),
    )
    if dtype.special == "ieee":
        top = field == 2**dtype.exponent - 1
        value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    if dtype.special == "nan":
        value = np.where((code & (dtype.mask >> 1)) == dtype.mask >> 1, np.nan, value)
    return np.where(code >> (dtype.bits - 1), -value, value)


@functools.cache
def _magnitudes(dtype: DType) -> np.ndarray:
    """The finite nonnegative values in ascending order, which is the order of their codes."""
    codes = _codes(dtype)
    positive = codes[: len(codes) // 2] if dtype.signed else codes
    return positive[np.isfinite(positive)]


def _round_to(value: np.ndarray, precision: int, quantum_log2: int) -> np.ndarray:
    """Round to `precision` significand bits, but never finer than 2**quantum_log2 (subnormals)."""
    finite = np.where(np.isfinite(value), value, 0.0)
    _, exponent = np.frexp(finite)
    quantum = np.maximum(exponent - precision, quantum_log2)
    rounded = np.ldexp(np.rint(np.ldexp(finite, -quantum)), quantum)
    return np.where(np.isfinite(value), rounded, value)


F16 = DType("f16", "float", 16, 5, 10, special="ieee")
BF16 = DType("bf16", "float", 16, 8, 7, special="ieee")
F32 = DType("f32", "float", 32, 8, 23, special="ieee")
I16 = DType("i16", "int", 16)
I32 = DType("i32", "int", 32)
E8M0 = DType("e8m0", "float", 8, 8, 0, signed=False, special="nan")
INDEX = DType("idx", "index", 32)

# Integer types that only stored tensors have: words of packed codes, index lists, shapes.
WORDS = {name: DType(name, "int" if name[0] == "i" else "uint", int(name[1:])) for name in ("u16", "u32", "i64")}
_SPECIAL = {"e4m3": "nan", "e5m2": "ieee"}
_NAMED = {dtype.name: dtype for dtype in (F16, BF16, F32, I16, I32, E8M0)}
_INTEGERS = (*(f"u{b}" for b in range(1, 9)), *(f"i{b}" for b in range(2, 9)))
NAMES = (*_NAMED, *_INTEGERS, "e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


# For messages: every name that `find` knows, in few words.
SPELLINGS = "u1 to u8, i2 to i8, i16, i32, f16, bf16, f32, e8m0, or eXmY of at most 8 bits with its sign, as e4m3"


@functools.cache
def find(name: str) -> DType | None:
    """The format with this name (`u4`, `e4m3`, any `eXmY` of at most 8 bits, …), or None."""
    if name in _NAMED:
        return _NAMED[name]
    if match := re.fullmatch(r"([ui])([1-8])", name):
        kind, bits = match[1], int(match[2])
        return None if (kind, bits) == ("i", 1) else DType(name, "uint" if kind == "u" else "int", bits)
    if match := re.fullmatch(r"e([1-7])m([0-7])", name):
        exponent, mantissa = int(match[1]), int(match[2])
        if 1 + exponent + mantissa <= 8:
            special = _SPECIAL.get(name, "finite")
            return DType(name, "float", 1 + exponent + mantissa, exponent, mantissa, special=special)
    return None


def dtype(name: str) -> DType:
    """The format with this name; raises KeyError for an unknown one."""
    found = find(name) or WORDS.get(name)
    if found is None:
        raise KeyError(f"unknown number format {name!r}")
    return found
