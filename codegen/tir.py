"""Scheme expressions and layouts as TIR: the one place where equations become arithmetic.

Codes decode to float32 (or int32 for integer products) exactly; results round once, where the scheme says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.dtype import DType
from qdsl.expr import Binary, Call, Cast, Expr, Item, Negate, Number, Ref
from qdsl.manifest import Buffer

Look = Callable[[Expr], tirx.Expr]


def dtype_of(value: tirx.Expr) -> str:
    return str(value.ty.dtype)


def f32(value: float) -> tirx.Expr:
    return tirx.const(float(value), "float32")


def i32(value: int) -> tirx.Expr:
    return tirx.const(int(value), "int32")


def i64(value: int) -> tirx.Expr:
    return tirx.const(int(value), "int64")


def bits_of(value: tirx.Expr) -> tirx.Expr:
    """A float32 as uint32."""
    return T.reinterpret("uint32", value)


def float_of(bits: tirx.Expr) -> tirx.Expr:
    return T.reinterpret("float32", bits)


def is_nan(value: tirx.Expr) -> tirx.Expr:
    """Of a float32, by its bits: TVM has no `isnan` of vectors."""
    return (bits_of(value) & u32(0x7FFFFFFF)) > u32(0x7F800000)


def u32(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


# ---- choices -----------------------------------------------------------------------------------------------------
_SELECTS: ContextVar[bool] = ContextVar("selects", default=False)


@contextmanager
def selecting(selects: bool) -> Iterator[None]:
    """Inside, whether `choose` selects."""
    token = _SELECTS.set(selects)
    try:
        yield
    finally:
        _SELECTS.reset(token)


def choose(condition: tirx.Expr, yes: tirx.Expr, no: tirx.Expr) -> tirx.Expr:
    """One of two values that both may be computed: CPUs select between vectors of them, where TVM would take a vector apart
    for a branch."""
    return tirx.Select(condition, yes, no) if _SELECTS.get() else T.if_then_else(condition, yes, no)


# ---- memory ------------------------------------------------------------------------------------------------------
def load_bits(buffer: tirx.Buffer, declared: Buffer, index: Sequence[tirx.Expr], shape: Sequence) -> tirx.Expr:
    """The bit pattern (uint32) of one element of a packed buffer, gathered from its fields."""
    layout = declared.layout
    result = None
    for field in layout.address(index, shape):
        word = layout.restored(T.cast(buffer[tuple(field.index)], "uint32"), u32)
        shift = T.cast(field.shift, "uint32") if not isinstance(field.shift, int) else u32(field.shift)
        part = word if isinstance(field.shift, int) and field.shift == 0 else word >> shift
        if field.following is not None:
            raise NotImplementedError("kernel layouts never split a code between words")
        if field.width < layout.word:
            part = part & u32((1 << field.width) - 1)
        part = part << u32(field.low) if field.low else part
        result = part if result is None else result | part
    assert result is not None, "a layout has at least one field"
    return result


def load(buffer: tirx.Buffer, declared: Buffer, dtype: DType, index: Sequence[tirx.Expr], shape: Sequence) -> tirx.Expr:
    """One element of a kernel buffer, decoded: int32 for integers, float32 for floats."""
    if dtype.bits > 8:
        (field,) = declared.layout.address(index, shape)
        value = buffer[tuple(field.index)]
        return T.cast(value, "float32") if dtype.is_float else value
    return decode(dtype, load_bits(buffer, declared, index, shape))


# ---- number formats ----------------------------------------------------------------------------------------------
def decode(dtype: DType, pattern: tirx.Expr) -> tirx.Expr:
    """A bit pattern of at most 8 bits (uint32) as float32, or as int32 for integer formats.  Exact for every code."""
    if dtype.kind == "uint":
        return T.cast(pattern, "int32")
    if dtype.kind == "int":  # the sign bit moves to bit 31 and back
        return (T.cast(pattern, "int32") << i32(32 - dtype.bits)) >> i32(32 - dtype.bits)
    if dtype.name == "e8m0":
        normal = float_of(choose(pattern == u32(0), u32(0x00400000), pattern << u32(23)))
        return choose(pattern == u32(255), f32(float("nan")), normal)
    # Exponent and mantissa land in the low end of float32's; one exact multiplication mends the bias, and subnormals
    # of the small format come out right because they are subnormals of float32 until then.
    magnitude = pattern & u32(dtype.mask >> 1)
    value = float_of(magnitude << u32(23 - dtype.mantissa)) * f32(2.0 ** (127 - dtype.bias))
    if dtype.special == "nan":
        value = choose(magnitude == u32(dtype.mask >> 1), f32(float("nan")), value)
    if dtype.special == "ieee":
        infinity = u32((2**dtype.exponent - 1) << dtype.mantissa)
        special = choose(magnitude == infinity, f32(float("inf")), f32(float("nan")))
        value = choose(magnitude >= infinity, special, value)
    return choose((pattern >> u32(dtype.bits - 1)) != u32(0), -value, value)


def encode(dtype: DType, value: tirx.Expr) -> tirx.Expr:
    """A float32 as the nearest element of `dtype`, ties to even, as its buffer stores it (see `storage`)."""
    if dtype.name in ("f16", "bf16", "f32"):
        return T.cast(value, storage(dtype))
    if dtype.is_integer:
        whole = saturate(dtype, T.nearbyint(value))
        number = choose(is_nan(value), i32(0), T.cast(whole, "int32"))
        if dtype.bits > 8:
            return T.cast(number, storage(dtype))
        return T.cast(T.cast(number, "uint32") & u32(dtype.mask), "uint8")
    bits = bits_of(value)
    magnitude = T.min(float_of(bits & u32(0x7FFFFFFF)), f32(dtype.max))
    if dtype.name == "e8m0":
        exponent, fraction = bits_of(magnitude) >> u32(23), bits_of(magnitude) & u32(0x7FFFFF)
        # the middle between two powers is fraction 1/2; 2^-127 is itself subnormal, so its middle lies at 3/4
        middle = choose(exponent == u32(0), u32(0x600000), u32(0x400000))
        up = (fraction > middle) | ((fraction == middle) & ((exponent & u32(1)) == u32(1)))
        code = choose(value <= f32(0), u32(0), exponent + T.cast(up, "uint32"))
        return T.cast(choose(is_nan(value), u32(255), code), "uint8")
    if dtype.mantissa == 0:  # neighbours are powers of two, and a tie goes to the even exponent
        scaled = bits_of(magnitude * f32(2.0 ** (dtype.bias - 127)))
        exponent, fraction = scaled >> u32(23), scaled & u32(0x7FFFFF)
        up = (fraction > u32(0x400000)) | ((fraction == u32(0x400000)) & ((exponent & u32(1)) == u32(1)))
        first = T.cast(magnitude > f32(dtype.quantum / 2), "uint32")
        code = choose(exponent == u32(0), first, exponent + T.cast(up, "uint32"))
    else:
        # Round to a multiple of the binade's quantum, then read the code off the float32 that decoding starts from.
        exponent = T.max(T.cast(bits_of(magnitude) >> u32(23), "int32"), i32(128 - dtype.bias))
        quantum = float_of(T.cast(exponent - i32(dtype.mantissa), "uint32") << u32(23))
        rounded = T.nearbyint(magnitude / quantum) * quantum
        code = bits_of(rounded * f32(2.0 ** (dtype.bias - 127))) >> u32(23 - dtype.mantissa)
    sign = (bits >> u32(31)) << u32(dtype.bits - 1)
    nan = u32(dtype.nan_code or 0)
    return T.cast(choose(is_nan(value), nan, code | sign), "uint8")


def storage(dtype: DType) -> str:
    """The buffer type of one unpacked element: its own for wide formats, a byte of bits for small ones."""
    wide = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "i16": "int16", "i32": "int32", "idx": "int32"}
    return wide.get(dtype.name, "uint8")


def saturate(dtype: DType, value: tirx.Expr) -> tirx.Expr:
    low, high = (tirx.const(limit, dtype_of(value)) for limit in (dtype.min, dtype.max))
    return T.min(T.max(value, low), high)


def round_to(dtype: DType, value: tirx.Expr) -> tirx.Expr:
    """A cast inside an equation: the value rounded to `dtype`, still as int32 or float32."""
    if dtype.is_integer and dtype_of(value) == "int32":
        return saturate(dtype, value)
    if dtype.name == "bf16":
        return round_bf16(as_float(value))
    if dtype.bits > 8:
        encoded = encode(dtype, value)
        return T.cast(encoded, "float32" if dtype.is_float else "int32")
    return decode(dtype, T.cast(encode(dtype, value), "uint32"))


def round_bf16(value: tirx.Expr) -> tirx.Expr:
    """A float32 rounded to bfloat16's values, on its bits: TVM drops a pair of casts to bfloat16 and back."""
    bits = bits_of(value)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) & u32(0xFFFF0000)
    return choose(is_nan(value), value, float_of(rounded))


# ---- equations ---------------------------------------------------------------------------------------------------
def translate(e: Expr, look: Look) -> tirx.Expr:
    """An equation as TIR.  `look` gives tensors, table entries and reductions; integers stay int32 while they can."""

    def both(a: tirx.Expr, b: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        return (a, b) if dtype_of(a) == dtype_of(b) else (as_float(a), as_float(b))

    def value(node: Expr) -> tirx.Expr:
        match node:
            case Number(number):
                whole = float(number).is_integer() and abs(number) < 2**31
                return i32(int(number)) if whole else f32(number)
            case Negate(arg):
                return -value(arg)
            case Cast(dtype, arg):
                return round_to(dtype, value(arg))
            case Binary("/", left, right):
                return divide(as_float(value(left)), as_float(value(right)))
            case Binary(op, left, right):
                return _OPERATORS[op](*both(value(left), value(right)))
            case Call("floor" | "ceil" as name, (Call("log2", (arg,)),)):
                return whole_log2(name, as_float(value(arg)))
            case Call(name, args) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(as_float, map(value, args)))
            case Call("min" | "max" as name, args):
                return (T.min if name == "min" else T.max)(*both(*map(value, args)))
            case Call("abs" | "relu" as name, (arg,)):
                inner = value(arg)
                return T.max(inner, -inner) if name == "abs" else T.max(inner, tirx.const(0, dtype_of(inner)))
            case Ref() | Item() | Call():
                return look(node)
            case _:
                raise AssertionError(f"no TIR for {node!r}")

    return value(e)


def as_float(value: tirx.Expr) -> tirx.Expr:
    return value if dtype_of(value) == "float32" else T.cast(value, "float32")


def divide(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """Real division with 0/0 = 0."""
    if isinstance(b, tirx.FloatImm) and b.value != 0:
        return a / b
    return choose((a == f32(0)) & (b == f32(0)), f32(0), a / b)


def whole_log2(rounding: str, value: tirx.Expr) -> tirx.Expr:
    """The "floor" or "ceil" of log2(value), read off the exponent: exact, as a rounded log2 next to a power of two is
    not."""
    tiny = value < f32(2.0**-126)  # subnormal
    bits = bits_of(choose(tiny, value * f32(2.0**64), value))
    exponent = T.cast(bits >> u32(23), "int32") - choose(tiny, i32(127 + 64), i32(127))
    if rounding == "ceil":
        exponent = exponent + T.cast((bits & u32(0x7FFFFF)) != u32(0), "int32")
    regular = (value > f32(0)) & (value < f32(float("inf")))
    return choose(regular, T.cast(exponent, "float32"), T.log2(value))


def _sigmoid(x: tirx.Expr) -> tirx.Expr:
    return f32(1) / (f32(1) + T.exp(-x))


def _gelu(x: tirx.Expr) -> tirx.Expr:
    erf = T.call_pure_extern("float32", "erff", x * f32(np.sqrt(0.5)))
    return f32(0.5) * x * (f32(1) + erf)


_OPERATORS: Mapping[str, Callable] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: T.floor(a / b) if dtype_of(a) == "float32" else T.floordiv(a, b),
    "%": lambda a, b: a - T.floor(a / b) * b if dtype_of(a) == "float32" else T.floormod(a, b),
}
_FUNCTIONS: Mapping[str, Callable] = {
    "round": T.nearbyint,
    "floor": T.floor,
    "ceil": T.ceil,
    "exp2": T.exp2,
    "log2": T.log2,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "tanh": T.tanh,
}
