"""Instructions that TensorIR has no words for, as functions in LLVM's own language, which TVM links in and inlines.

All vectors are of 16 lanes of 32 bits, whatever lies in a lane; LLVM makes two or four of one where registers are shorter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.dtype import DType

LANES = 16
INT, FLOAT = "int32x16", "float32x16"

_SPREAD = """
define linkonce_odr <16 x i32> @qdsl_spread(ptr %at) alwaysinline {
  %value = load i32, ptr %at, align 1
  %first = insertelement <16 x i32> poison, i32 %value, i64 0
  %all = shufflevector <16 x i32> %first, <16 x i32> poison, <16 x i32> zeroinitializer
  ret <16 x i32> %all
}
"""

# From memory into the second cache, which waits for more lines at once than the first; from there into the first.
_PREFETCH = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
define linkonce_odr void @qdsl_prefetch(ptr %at) alwaysinline {
  call void @llvm.prefetch.p0(ptr %at, i32 0, i32 2, i32 1)
  ret void
}
define linkonce_odr void @qdsl_prefetch_near(ptr %at) alwaysinline {
  call void @llvm.prefetch.p0(ptr %at, i32 0, i32 3, i32 1)
  ret void
}
"""

_DOTS = {
    "f32": """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define linkonce_odr <16 x float> @qdsl_dot(<16 x float> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %spread = call <16 x i32> @qdsl_spread(ptr %at)
  %x = bitcast <16 x i32> %spread to <16 x float>
  %v = bitcast <16 x i32> %w to <16 x float>
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %v, <16 x float> %x, <16 x float> %sum)
  ret <16 x float> %r
}
""",
    "bf16": """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @qdsl_dot(<16 x float> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %spread = call <16 x i32> @qdsl_spread(ptr %at)
  %x = bitcast <16 x i32> %spread to <32 x bfloat>
  %v = bitcast <16 x i32> %w to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %v, <32 x bfloat> %x)
  ret <16 x float> %r
}
""",
    "u8": """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define linkonce_odr <16 x i32> @qdsl_dot(<16 x i32> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %spread = call <16 x i32> @qdsl_spread(ptr %at)
  %x = bitcast <16 x i32> %spread to <64 x i8>
  %v = bitcast <16 x i32> %w to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %v, <64 x i8> %x)
  ret <16 x i32> %r
}
""",
    "i16 512": """
declare <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16>, <32 x i16>)
define linkonce_odr <16 x i32> @qdsl_dot(<16 x i32> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %spread = call <16 x i32> @qdsl_spread(ptr %at)
  %x = bitcast <16 x i32> %spread to <32 x i16>
  %v = bitcast <16 x i32> %w to <32 x i16>
  %p = call <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16> %v, <32 x i16> %x)
  %r = add <16 x i32> %sum, %p
  ret <16 x i32> %r
}
""",
    "i16 256": """
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
define linkonce_odr <16 x i32> @qdsl_dot(<16 x i32> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %spread = call <16 x i32> @qdsl_spread(ptr %at)
  %half = shufflevector <16 x i32> %spread, <16 x i32> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %x = bitcast <8 x i32> %half to <16 x i16>
  %w0 = shufflevector <16 x i32> %w, <16 x i32> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %w1 = shufflevector <16 x i32> %w, <16 x i32> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %v0 = bitcast <8 x i32> %w0 to <16 x i16>
  %v1 = bitcast <8 x i32> %w1 to <16 x i16>
  %p0 = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %v0, <16 x i16> %x)
  %p1 = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %v1, <16 x i16> %x)
  %p = shufflevector <8 x i32> %p0, <8 x i32> %p1, <16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %r = add <16 x i32> %sum, %p
  ret <16 x i32> %r
}
""",
}

# Two inputs' products in neighbouring lanes.
_PAIRS = """
define linkonce_odr <16 x float> @qdsl_dot_pairs(<16 x float> %sum, <16 x i32> %w, ptr %at) alwaysinline {
  %value = load i64, ptr %at, align 1
  %first = insertelement <8 x i64> poison, i64 %value, i64 0
  %all = shufflevector <8 x i64> %first, <8 x i64> poison, <8 x i32> zeroinitializer
  %x = bitcast <8 x i64> %all to <16 x float>
  %v = bitcast <16 x i32> %w to <16 x float>
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %v, <16 x float> %x, <16 x float> %sum)
  ret <16 x float> %r
}
define linkonce_odr <16 x float> @qdsl_sum_pairs(<16 x float> %low, <16 x float> %high) alwaysinline {
  %even = shufflevector <16 x float> %low, <16 x float> %high, <16 x i32> <EVEN>
  %odd = shufflevector <16 x float> %low, <16 x float> %high, <16 x i32> <ODD>
  %r = fadd <16 x float> %even, %odd
  ret <16 x float> %r
}
""" + "".join(
    f"""
define linkonce_odr <16 x i32> @qdsl_of_{name}_halves(<16 x i32> %words) alwaysinline {{
  %all = bitcast <16 x i32> %words to <32 x half>
  %some = shufflevector <32 x half> %all, <32 x half> poison, <16 x i32> <{", ".join(f"i32 {i}" for i in lanes)}>
  %wide = fpext <16 x half> %some to <16 x float>
  %r = bitcast <16 x float> %wide to <16 x i32>
  ret <16 x i32> %r
}}
"""
    for name, lanes in (("lower", range(LANES)), ("upper", range(LANES, 2 * LANES)))
)
for name, first in (("EVEN", 0), ("ODD", 1)):
    _PAIRS = _PAIRS.replace(name, ", ".join(f"i32 {i}" for i in range(first, 2 * LANES, 2)))

# `vpermw` and `vpermps` look at the low 5 and 4 bits of an index alone.
_LOOK_UP = {
    "bf16": """
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
define linkonce_odr <16 x i32> @qdsl_look_up(<16 x i32> %table, <16 x i32> %at) alwaysinline {
  %t = bitcast <16 x i32> %table to <32 x i16>
  %i = bitcast <16 x i32> %at to <32 x i16>
  %r = call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> %t, <32 x i16> %i)
  %v = bitcast <32 x i16> %r to <16 x i32>
  ret <16 x i32> %v
}
""",
    "f32 512": """
declare <16 x i32> @llvm.x86.avx512.permvar.si.512(<16 x i32>, <16 x i32>)
define linkonce_odr <16 x i32> @qdsl_look_up(<16 x i32> %table, <16 x i32> %at) alwaysinline {
  %r = call <16 x i32> @llvm.x86.avx512.permvar.si.512(<16 x i32> %table, <16 x i32> %at)
  ret <16 x i32> %r
}
""",
    "f32 256": """
declare <8 x i32> @llvm.x86.avx2.permd(<8 x i32>, <8 x i32>)
define linkonce_odr <8 x i32> @qdsl_look_up_8(<8 x i32> %low, <8 x i32> %high, <8 x i32> %at) alwaysinline {
  %a = call <8 x i32> @llvm.x86.avx2.permd(<8 x i32> %low, <8 x i32> %at)
  %b = call <8 x i32> @llvm.x86.avx2.permd(<8 x i32> %high, <8 x i32> %at)
  %bit = and <8 x i32> %at, splat (i32 8)
  %upper = icmp ne <8 x i32> %bit, zeroinitializer
  %r = select <8 x i1> %upper, <8 x i32> %b, <8 x i32> %a
  ret <8 x i32> %r
}
define linkonce_odr <16 x i32> @qdsl_look_up(<16 x i32> %table, <16 x i32> %at) alwaysinline {
  %low = shufflevector <16 x i32> %table, <16 x i32> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %high = shufflevector <16 x i32> %table, <16 x i32> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %i0 = shufflevector <16 x i32> %at, <16 x i32> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %i1 = shufflevector <16 x i32> %at, <16 x i32> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %r0 = call <8 x i32> @qdsl_look_up_8(<8 x i32> %low, <8 x i32> %high, <8 x i32> %i0)
  %r1 = call <8 x i32> @qdsl_look_up_8(<8 x i32> %low, <8 x i32> %high, <8 x i32> %i1)
  %r = shufflevector <8 x i32> %r0, <8 x i32> %r1, <16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  ret <16 x i32> %r
}
""",
}


_PACK = """
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr <16 x i32> @qdsl_pack(<16 x float> %even, <16 x float> %odd) alwaysinline {
  %apart = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %odd, <16 x float> %even)
  %r = shufflevector <32 x bfloat> %apart, <32 x bfloat> poison, <32 x i32> <ORDER>
  %words = bitcast <32 x bfloat> %r to <16 x i32>
  ret <16 x i32> %words
}
""".replace("ORDER", ", ".join(f"i32 {i // 2 + 16 * (i % 2)}" for i in range(32)))

_SPREAD_OUT = """
declare <16 x i32> @llvm.x86.avx512.permvar.si.512(<16 x i32>, <16 x i32>)
define linkonce_odr <16 x i32> @qdsl_look_up_floats(<16 x i32> %table, <16 x i32> %at) alwaysinline {
  %r = call <16 x i32> @llvm.x86.avx512.permvar.si.512(<16 x i32> %table, <16 x i32> %at)
  ret <16 x i32> %r
}
"""


def small_float(kind: DType) -> str:
    """Pairs of codes of at most 8 bits, in the low bytes of 16-bit halves, as bfloat16: normal numbers by moving exponent and
    mantissa to their place and adding the difference of the biases; subnormal ones are looked up, since the units that
    multiply bfloat16 take its own subnormals for zeros, by mantissa and the low bits of the exponent, which are zero."""
    normal, bias = 7 - kind.mantissa, (127 - kind.bias) << 7
    magnitude, sign = kind.mask >> 1, 1 << (kind.bits - 1)
    values = np.array([kind.decode(np.array([i % (1 << kind.mantissa)]))[0] for i in range(32)], np.float32)
    entries = ", ".join(f"i16 {v}" for v in (values.view(np.uint32) >> 16).tolist())
    first = {"nan": magnitude, "ieee": ((1 << kind.exponent) - 1) << kind.mantissa}.get(kind.special)
    special = (
        f"""
  %large = icmp uge <32 x i16> %m, splat (i16 {first})
  %top = or <32 x i16> %n, splat (i16 {0x7F80})
  %f = select <32 x i1> %large, <32 x i16> %top, <32 x i16> %v"""
        if first
        else "\n  %f = or <32 x i16> %v, zeroinitializer"
    )
    return f"""
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
define linkonce_odr <16 x i32> @qdsl_small_float(<16 x i32> %codes) alwaysinline {{
  %c = bitcast <16 x i32> %codes to <32 x i16>
  %m = and <32 x i16> %c, splat (i16 {magnitude})
  %moved = shl <32 x i16> %m, splat (i16 {normal})
  %n = add <32 x i16> %moved, splat (i16 {bias})
  %low = call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> <{entries}>, <32 x i16> %c)
  %subnormal = icmp ult <32 x i16> %m, splat (i16 {1 << kind.mantissa})
  %v = select <32 x i1> %subnormal, <32 x i16> %low, <32 x i16> %n{special}
  %s = and <32 x i16> %c, splat (i16 {sign})
  %signs = shl <32 x i16> %s, splat (i16 {16 - kind.bits})
  %r = or <32 x i16> %f, %signs
  %words = bitcast <32 x i16> %r to <16 x i32>
  ret <16 x i32> %words
}}
"""


# x is the first operand, the weight the second: signed by unsigned or signed bytes.
_TILE_PRODUCT = {"bf16": "tdpbf16ps", "u8": "tdpbsud", "i8": "tdpbssd"}


def _tiles(unit: str, rows_of_b: int) -> str:
    """Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights, all of 64 bytes, but for inputs along k: a row of x has
    4 * rows_of_b bytes.  How many rows x and the sums have is said when tiles are opened."""
    shape = [(0, 64)] * 4 + [(0, 4 * rows_of_b)] * 2 + [(rows_of_b, 64)] * 2
    config = bytearray(64)
    config[0] = 1
    for at, (rows, width) in enumerate(shape):
        config[16 + 2 * at] = width
        config[48 + at] = rows
    held = ", ".join(f"i8 {b}" for b in config)
    text = [
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        f"declare void @llvm.x86.{_TILE_PRODUCT[unit]}(i8, i8, i8)",
        "define linkonce_odr void @qdsl_tiles_open(i64 %rows) alwaysinline {",
        "  %shapes = alloca <64 x i8>, align 64",
        f"  store <64 x i8> <{held}>, ptr %shapes, align 64",
        "  %own = trunc i64 %rows to i8",
        *(f"  %at{t} = getelementptr i8, ptr %shapes, i64 {48 + t}\n  store i8 %own, ptr %at{t}" for t in range(6)),
        "  call void @llvm.x86.ldtilecfg(ptr %shapes)",
        "  ret void\n}",
        "define linkonce_odr void @qdsl_tiles_close() alwaysinline {",
        "  call void @llvm.x86.tilerelease()",
        "  ret void\n}",
    ]
    for t in range(8):
        text += [
            f"define linkonce_odr void @qdsl_tile_load_{t}(ptr %at, i64 %stride) alwaysinline {{",
            f"  call void @llvm.x86.tileloadd64(i8 {t}, ptr %at, i64 %stride)",
            "  ret void\n}",
        ]
    for t in range(4):
        text += [
            f"define linkonce_odr void @qdsl_tile_zero_{t}() alwaysinline {{",
            f"  call void @llvm.x86.tilezero(i8 {t})",
            "  ret void\n}",
            f"define linkonce_odr void @qdsl_tile_store_{t}(ptr %at, i64 %stride) alwaysinline {{",
            f"  call void @llvm.x86.tilestored64(i8 {t}, ptr %at, i64 %stride)",
            "  ret void\n}",
            f"define linkonce_odr void @qdsl_tile_product_{t}() alwaysinline {{",
            f"  call void @llvm.x86.{_TILE_PRODUCT[unit]}(i8 {t}, i8 {4 + t // 2}, i8 {6 + t % 2})",
            "  ret void\n}",
        ]
    return "\n".join(text) + "\n"


@contextmanager
def imported(
    unit: str, width: int, look_up: bool, rows_of_b: int | None, code: DType | None = None, signed: bool = False
) -> Iterator[None]:
    """Inside, the functions below are known.

    unit       "f32", "bf16", "u8" or "i16"
    width      bits of a vector register
    look_up    whether codes are looked up in a table
    rows_of_b  of a tile of weights; None: there are no tiles
    code       whose pairs become bfloat16, if any do
    signed     whether tiles of bytes hold signed ones
    """
    wide = {"bf16": "bf16", "u8": "u8"}
    text = _SPREAD + _PREFETCH + _DOTS["f32" if unit == "f32" else wide.get(unit) or f"{unit} {width}"]
    if unit == "f32":
        text += _PAIRS
    if look_up:
        text += _LOOK_UP[wide.get(unit) or f"{unit} {width}"]
    if code is not None:
        text += small_float(code)
    if rows_of_b and unit == "bf16":
        text += _PACK + _SPREAD_OUT
    if rows_of_b:
        text += _tiles("i8" if signed else unit, rows_of_b)
    # Kernels of one library may mean different things by a name: each text has names of its own.
    tag = hashlib.sha256(text.encode()).hexdigest()[:8]
    token = _TAG.set(tag)
    try:
        with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text.replace("@qdsl_", f"@qdsl_{tag}_")):
            yield
    finally:
        _TAG.reset(token)


_TAG: ContextVar[str] = ContextVar("tag")


def _named(name: str) -> str:
    return f"qdsl_{_TAG.get()}_{name}"


def dot(sums: tirx.Expr, weights: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
    """sums + the products of each lane's weights and the inputs at an address, which all lanes share."""
    kind = FLOAT if "float" in str(sums.ty.dtype) else INT
    return T.call_extern(kind, _named("dot"), sums, weights, at)


def dot_pairs(sums: tirx.Expr, weights: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
    """sums + the products of float32 and the two at an address, by turns."""
    return T.call_extern(FLOAT, _named("dot_pairs"), sums, weights, at)


def sum_pairs(low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
    """The sums of neighbouring lanes of two vectors of float32."""
    return T.call_pure_extern(FLOAT, _named("sum_pairs"), low, high)


def of_halves(words: tirx.Expr, upper: bool) -> tirx.Expr:
    """Float16 of the lower or the upper half of a vector as float32."""
    return T.call_pure_extern(INT, _named(f"of_{'upper' if upper else 'lower'}_halves"), words)


def multiply_add(a: tirx.Expr, b: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
    """a * b + c, rounded once."""
    return T.fma(a, b, c)


def look_up(table: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
    """Entries of a table that is one vector."""
    return T.call_pure_extern(INT, _named("look_up"), table, at)


def widened(codes: tirx.Expr) -> tirx.Expr:
    """Pairs of small floats, a code in each half, as bfloat16."""
    return T.call_pure_extern(INT, _named("small_float"), codes)


def look_up_floats(table: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
    """Entries of a table of 16 float32."""
    return T.reinterpret(FLOAT, T.call_pure_extern(INT, _named("look_up_floats"), table, at))


def packed(even: tirx.Expr, odd: tirx.Expr) -> tirx.Expr:
    """Two vectors of float32, rounded to bfloat16: a pair in each lane."""
    return T.call_pure_extern(INT, _named("pack"), even, odd)


def prefetch(at: tirx.Expr) -> None:
    """Ask memory for a line."""
    T.evaluate(T.call_extern("void", _named("prefetch"), at))


def prefetch_near(at: tirx.Expr) -> None:
    """Ask the second cache for a line."""
    T.evaluate(T.call_extern("void", _named("prefetch_near"), at))


def call(name: str, *args) -> None:
    T.evaluate(T.call_extern("void", _named(name), *args))


def splat(value: tirx.Expr) -> tirx.Expr:
    return tirx.Broadcast(value, LANES)


def word(value: int) -> tirx.Expr:
    """A vector of one 32-bit word."""
    return splat(tirx.const(value, "uint32"))


def bits(value: tirx.Expr) -> tirx.Expr:
    """A vector as lanes of int32."""
    return T.reinterpret(INT, value)
