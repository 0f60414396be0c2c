"""Codes as pairs of 16-bit floats: every code of every type, by what the instructions give."""

from __future__ import annotations

import numpy as np
import pytest

from qdsl.codegen.cuda.decode import HALVES, bits, decoded, factor, words_of
from qdsl.codegen.cuda.weight import Weight
from qdsl.codegen.plan import fragment_codes, places, planes
from qdsl.dtype import dtype

INTEGERS = [*(f"u{n}" for n in range(1, 9)), *(f"i{n}" for n in range(2, 9))]
FLOATS = ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]


def stored(codes: np.ndarray, width: int, looked_up: bool = False, own: tuple[int, ...] = ()) -> np.ndarray:
    """[tiles of 16, k tiles, lane, its words] of codes [n, k], as the kernel's layout has them."""
    words = fragment_codes(2, width, looked_up, own).pack(codes.astype(np.uint8))
    lanes, count = words_of(width)
    words = words.reshape(*words.shape[:2], lanes // 32, 32, count)
    return np.moveaxis(words, 2, 3).reshape(*words.shape[:2], 32, lanes // 32 * count)


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_every_code_is_exact_in_every_place(name, compute):
    """All codes in all places of a fragment: codes [n, k] through the layout, the planes and the instructions."""
    code, half = dtype(name), HALVES[compute]
    n, k = 16, 64
    for shift in range(0, 1 << code.bits, 1 if code.bits < 6 else 13):
        codes = (np.arange(n * k).reshape(n, k) * 7 + shift) % (1 << code.bits)
        words = stored(codes, code.bits, own=places(code, half.mantissa))[0, 0]
        for step in range(4):
            for register in range(4):
                way = decoded(code, half, step, register)
                found = way.evaluate(words).reshape(8, 4, 2)  # c, t, p
                rows = np.arange(8) + 8 * (register % 2)
                columns = 16 * step + 8 * (register // 2) + 2 * np.arange(4)[:, None] + np.arange(2)
                values = code.decode(codes[rows[:, None, None], columns[None]])
                finite = np.isfinite(values)
                assert (found == way.bias + way.factor * values)[finite].all(), way
                assert way.factor == factor(code, half, register % 2), "a row of A has one factor in all steps"


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("name", INTEGERS)
def test_zero_points_are_taken_off_exactly(name, compute):
    """code - zero in the unit of the code, for every pair: as WeightStep does it, with one fma in the half type."""
    code, half = dtype(name), HALVES[compute]
    weight = Weight(compute, 0, f"u{code.bits}" if code.kind == "uint" else None, compute, 128, code)
    codes = code.decode(np.arange(1 << code.bits))
    for r in range(2):
        way = weight.decoded(0, r)
        values = way.bias + way.factor * codes
        assert np.array_equal(half.values(np.array([bits(half, v) for v in values])), values)
        for z in range(weight.largest_zero + 1):
            shift = -(way.bias / way.factor + z)
            assert half.values(np.array([bits(half, shift)]))[0] == shift
            assert all(bits(half, v) >= 0 for v in values / way.factor + shift)


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("size", [2, 3, 5, 16, 24, 256])
def test_tables_are_read_at_every_code(size, compute):
    """Of 2 to 256 entries, exact but for the one rounding to the type of the multiplier."""
    code, table = dtype(f"u{(size - 1).bit_length()}"), tuple(np.linspace(-1, 1, size).astype(np.float32).tolist())
    weight = Weight(compute, 0, None, "float32", 48, code, table)
    assert not weight.problem and weight.arithmetic == "floats" and weight.factor(1) == 1 and weight.nothing(1) == 0
    codes = np.arange(16 * 64).reshape(16, 64) * 5 % size
    words = stored(codes, code.bits, looked_up=True)[0, 0]
    for step, register in ((0, 0), (1, 3), (3, 2)):
        found = weight.decoded(step, register).evaluate(words).reshape(8, 4, 2)
        columns = 16 * step + 8 * (register // 2) + 2 * np.arange(4)[:, None] + np.arange(2)
        values = np.array(table)[codes[(np.arange(8) + 8 * (register % 2))[:, None, None], columns[None]]]
        assert (np.abs(found - values) <= np.abs(values) * 2.0 ** -(weight.half.mantissa + 1)).all()


def test_what_no_kernel_can_do_is_said():
    for weight, words in (
        (Weight("float32", 0, None, None, None), "no 16-bit multiplier"),
        (Weight("bfloat16", 0, "u7", "bfloat16", 64, dtype("i7")), "needs more bits than bfloat16 has"),
        (Weight("float16", 0, "u4", "float16", 24), "no whole steps of 16"),
        (Weight("float16", 8, None, "float16", 32, dtype("e2m1")), "off integers alone"),
        (Weight("float16", 0, None, "u8", 32), "not decoded"),
    ):
        assert words in weight.problem
    assert not Weight("bfloat16", 0, "u8", "bfloat16", 64, dtype("u8")).problem


def test_planes_waste_nothing():
    for width in range(1, 9):
        lanes, count = words_of(width)
        assert sum(part for _, part in planes(width)) == width and lanes * count == 32 * width
        assert fragment_codes(2, width).stored_shape((16, 64)) == (1, 1, lanes, count)


@pytest.mark.parametrize(
    ("name", "mantissa", "instructions"),
    [("e2m1", 7, 11), ("e2m1", 10, 11), ("e4m3", 7, 5), ("e4m3", 10, 5), ("e5m2", 7, 7), ("e5m2", 10, 3)],
)
def test_bits_of_floats_lie_where_few_shifts_are_needed(name, mantissa, instructions):
    """Shifts of a word, and masks, of all codes of a half: side by side they would take 15 and 7 (e5m2 as f16: 3)."""
    code, half = dtype(name), next(half for half in HALVES.values() if half.mantissa == mantissa)
    assert sorted(places(code, mantissa)) == list(range(16))
    ways = [decoded(code, half, 0, register) for register in range(16 // code.bits)]
    fields = [field for way in ways for field in way.sums[0].fields]
    assert len(fields) + len({field.shift for field in fields} - {0}) == instructions


def test_a_way_prints():
    f16, bf16 = HALVES["float16"], HALVES["bfloat16"]
    assert str(decoded(dtype("u4"), f16, 1, 1)) == "0x6400 ^ (word 1 & 0x00f0) = 1024 + 16 q"
    assert str(decoded(dtype("e5m2"), f16, 1, 0)) == "0x0000 ^ (word 2 & 0xff00) = 0 + 1 q"
    assert (
        str(decoded(dtype("i8"), bf16, 0, 0)) == "(0xc300 ^ (word 0 & 0x0080)) + (0x4300 ^ (word 0 & 0x007f)) = 0 + 1 q"
    )
    assert str(decoded(dtype("u8"), bf16, 0, 0)) == (
        "(0xc380 ^ (word 0 & 0x0080)) + (0x4300 ^ (word 0 & 0x007f)) = -128 + 1 q"
    )
