"""Number formats against ml_dtypes and numpy, over all codes where a format has few enough."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdsl.dtype import BF16, E8M0, F16, F32, NAMES, dtype, find

REFERENCE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "u4": ml_dtypes.uint4,
    "i4": ml_dtypes.int4,
    "u2": ml_dtypes.uint2,
    "i2": ml_dtypes.int2,
    "u8": np.uint8,
    "i8": np.int8,
}
GENERAL = [f"e{e}m{m}" for e in range(1, 8) for m in range(8) if 1 + e + m <= 8]
SMALL = [*(n for n in NAMES if dtype(n).bits <= 8), *(n for n in GENERAL if n not in NAMES)]


def all_codes(name: str) -> np.ndarray:
    return np.arange(1 << dtype(name).bits).astype(dtype(name).storage)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal values, NaN where NaN, and zeros of one sign."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


@pytest.mark.parametrize("name", REFERENCE)
def test_every_code_decodes_as_ml_dtypes_says(name):
    reference = all_codes(name).view(REFERENCE[name]).astype(np.float64)
    assert same(dtype(name).decode(all_codes(name)), reference)


@pytest.mark.parametrize("name", SMALL)
def test_every_code_survives_decoding_and_encoding(name):
    t, codes = dtype(name), all_codes(name)
    values = t.decode(codes)
    finite = np.isfinite(values)
    assert np.array_equal(t.encode(values[finite]), codes[finite])
    assert np.isnan(t.decode(t.encode(values[np.isnan(values)]))).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_every_midpoint_and_its_neighbours_round_as_ml_dtypes_does(name):
    t = dtype(name)
    values = np.unique(t.decode(all_codes(name))[np.isfinite(t.decode(all_codes(name)))])
    middle = (values[1:] + values[:-1]) / 2
    near = middle.astype(np.float32)  # ml_dtypes passes through float32, which holds every midpoint
    probes = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))])
    assert same(t.round(probes.astype(np.float64)), probes.astype(REFERENCE[name]).astype(np.float64))


@pytest.mark.parametrize("name", [n for n in SMALL if dtype(n).is_float and dtype(n).signed])
def test_ties_go_to_the_even_code(name):
    t = dtype(name)
    codes = np.arange(1 << (t.bits - 1))
    values = t.decode(codes)
    codes = codes[np.isfinite(values)]
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    middle = (t.decode(codes[:-1]) + t.decode(codes[1:])) / 2
    assert np.array_equal(t.encode(middle), even)
    assert np.array_equal(t.encode(-middle), even | 1 << (t.bits - 1))


@pytest.mark.parametrize("name", SMALL)
def test_small_formats_saturate(name):
    t = dtype(name)
    values = t.decode(all_codes(name))
    finite = values[np.isfinite(values)]
    assert t.max == finite.max()
    assert t.round(np.array([1e300, np.inf, -1e300, -np.inf])).tolist() == [t.max, t.max, finite.min(), finite.min()]


@pytest.mark.parametrize("name", SMALL)
def test_nan_stays_nan_where_there_is_one_and_is_zero_elsewhere(name):
    t = dtype(name)
    rounded = t.round(np.array([np.nan]))[0]
    assert np.isnan(rounded) if t.nan_code is not None else rounded == 0


@pytest.mark.parametrize("name", [n for n in SMALL if dtype(n).is_integer])
def test_integers_round_half_to_even(name):
    t = dtype(name)
    halves = np.arange(t.min, t.max) + 0.5
    assert np.array_equal(t.round(halves), np.rint(halves))


def test_e8m0_holds_powers_of_two_only():
    assert E8M0.decode(np.array([0, 127, 254])).tolist() == [2.0**-127, 1.0, 2.0**127]
    assert np.isnan(E8M0.decode(np.array([255]))).all()
    assert E8M0.round(np.array([0.0, -3.0, 1.4, 1.6, 5.0])).tolist() == [2.0**-127, 2.0**-127, 1.0, 2.0, 4.0]
    assert E8M0.encode(np.array([1.5, 3.0])).tolist() == [128, 128]  # ties to the even code


wide = st.floats(allow_nan=False, width=64) | st.floats(min_value=-1e-4, max_value=1e-4) | st.floats(-70000, 70000)


@given(wide)
def test_f16_and_f32_round_as_numpy(x):
    value = np.array([x])
    with np.errstate(over="ignore"):
        assert same(F16.round(value), value.astype(np.float16).astype(np.float64))
        assert same(F32.round(value), value.astype(np.float32).astype(np.float64))


@given(st.floats(allow_nan=False, width=32))
def test_bf16_rounds_as_ml_dtypes(x):
    value = np.array([x], np.float32)
    with np.errstate(over="ignore"):
        reference = value.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert same(BF16.round(value.astype(np.float64)), reference)


def test_bf16_rounds_once_from_float64():
    """Through float32 first, this value would land on the tie and go up."""
    tie = 1 + 2.0**-8
    assert BF16.round(np.array([tie - 2.0**-40, tie, tie + 2.0**-40])).tolist() == [1.0, 1.0, 1 + 2.0**-7]


def test_bf16_edges():
    largest = np.float64(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    smallest = 2.0**-133
    assert largest == BF16.max
    assert BF16.round(np.array([largest + 2.0**118, largest + 2.0**119])).tolist() == [largest, np.inf]
    assert BF16.round(np.array([smallest / 2, smallest * 0.75])).tolist() == [0.0, smallest]
    assert np.isnan(BF16.round(np.array([np.nan]))).all()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sixteen_bit_codes_all_survive(name):
    t, codes = dtype(name), np.arange(1 << 16).astype(np.uint16)
    values = t.decode(codes)
    number = ~np.isnan(values)
    assert np.array_equal(t.encode(values[number]), codes[number])


@pytest.mark.parametrize("name", GENERAL)
def test_general_small_floats_follow_their_name(name):
    t = dtype(name)
    exponent, mantissa = int(name[1]), int(name[3])
    assert (t.bits, t.exponent, t.mantissa) == (1 + exponent + mantissa, exponent, mantissa)
    values = t.decode(np.arange(1 << (t.bits - 1)))
    finite = values[np.isfinite(values)]
    assert np.all(np.diff(finite) > 0)
    assert np.all(finite / t.quantum == np.rint(finite / t.quantum))


def test_names_that_are_no_format():
    for name in ("u0", "u9", "i1", "i9", "e0m3", "e4m4", "e8m1", "f8", "e9m0", ""):
        assert find(name) is None
    with pytest.raises(KeyError, match="unknown number format 'f8'"):
        dtype("f8")
