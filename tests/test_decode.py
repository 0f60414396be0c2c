"""TIR decoders and encoders, exhaustively over all codes, through LLVM against the number formats' own definition."""

import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from qdsl import dtype as dtypes
from qdsl.codegen.tir import as_float, decode, encode, round_to, storage, translate
from qdsl.expr import Call, Ref

SMALL = [n for n in dtypes.NAMES if dtypes.dtype(n).bits <= 8] + ["e4m1", "e1m5", "e3m4", "e5m0", "e2m5"]


def _map(count: int, source: str, target: str, body):
    """Compile and run out[i] = body(in[i]); no parallel loop, so TVM's own runtime can call it."""
    with IRBuilder() as builder, T.prim_func(False, True, False):
        T.func_name("map")
        T.func_attr({"global_symbol": "map"})
        given, out = (T.match_buffer(T.arg(n, T.handle()), (count,), d) for n, d in (("a", source), ("b", target)))
        with T.serial(0, count) as i:
            T.buffer_store(out, body(given[i]), [i])
    return tvm.compile(tvm.IRModule({"map": builder.get()}), target="llvm")["map"]


def _run(function, values: np.ndarray, target: str) -> np.ndarray:
    given = tvm.runtime.tensor(values)
    out = tvm.runtime.tensor(np.zeros(len(values), target))
    function(given, out)
    return out.numpy()


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_exactly(name):
    dtype = dtypes.dtype(name)
    codes = np.arange(1 << dtype.bits, dtype=np.uint32)
    found = _run(_map(len(codes), "uint32", "float32", lambda c: as_float(decode(dtype, c))), codes, "float32")
    expected = dtype.decode(codes).astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all(), "minus zero"


@pytest.mark.parametrize("name", [*SMALL, "f16", "bf16", "i32"])
def test_encoding_rounds_as_the_format_says(name):
    dtype = dtypes.dtype(name)
    rng = np.random.default_rng(0)
    scale = dtype.max if dtype.max < 1e30 else 1e30
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-30, -1e-30, scale, -scale, 0.5, 1.5, 2.5, -0.5]
    spread = np.exp2(rng.uniform(-20, np.log2(scale) + 1, 2000)) * rng.choice([-1, 1], 2000)
    values = [np.array(special), spread, rng.uniform(-9, 9, 500)]
    if dtype.bits <= 8:
        exact = dtype.decode(np.arange(1 << dtype.bits))
        exact = np.unique(exact[np.isfinite(exact)])
        middle = (exact[1:] + exact[:-1]) / 2
        values += [exact, middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf)).astype(float)]
    x = np.concatenate(values).astype(np.float32)
    if dtype.name == "i32":
        x = x[~(np.abs(x) > 2**31 - 200)]  # float32 has no number next to the limit
    target = storage(dtype)
    if target == "bfloat16":  # numpy has none: compare values
        found = _run(_map(len(x), "float32", "float32", lambda v: round_to(dtype, v)), x, "float32")
        np.testing.assert_array_equal(found, dtype.round(x.astype(np.float64)).astype(np.float32))
        return
    wire = "uint16" if target == "float16" else target
    as_wire = (lambda v: T.reinterpret(wire, v)) if wire != target else (lambda v: v)
    found = _run(_map(len(x), "float32", wire, lambda v: as_wire(encode(dtype, v))), x, wire)
    expected = dtype.encode(x.astype(np.float64))
    if dtype.is_float and dtype.bits > 8:  # any NaN will do
        nan = np.isnan(x)
        found, expected = found[~nan], expected[~nan]
    np.testing.assert_array_equal(found.astype(np.int64) & 0xFFFFFFFF, expected.astype(np.int64) & 0xFFFFFFFF)


@pytest.mark.parametrize("name", ["floor", "ceil"])
def test_whole_logarithms_are_exact_next_to_powers_of_two(name):
    """All exponents, subnormal ones too, with the least, the next, and the largest fractions."""
    bits = np.arange(0, 256, dtype=np.uint32)[:, None] << 23 | np.array([0, 1, 2, 3, 0x7FFFFE, 0x7FFFFF], np.uint32)
    subnormal = np.array([1 << at for at in range(23)], np.uint32)
    x = np.concatenate([bits.ravel(), subnormal, subnormal + 1, subnormal * 2 - 1, [1 << 31, 0xBF800000]])
    x = x.astype(np.uint32).view(np.float32)
    e = Call(name, (Call("log2", (Ref("v"),)),))
    found = _run(_map(len(x), "float32", "float32", lambda v: as_float(translate(e, lambda _: v))), x, "float32")
    with np.errstate(invalid="ignore"):
        fraction, exponent = np.frexp(x.astype(np.float64))
    expected = exponent - 1.0 + (name == "ceil") * (fraction != 0.5)
    regular = (x > 0) & np.isfinite(x)
    np.testing.assert_array_equal(found[regular], expected[regular])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_array_equal(found[~regular], np.log2(x[~regular]))
