"""The planner's decisions: which equations take the tensor-core main loop, how codes lie, what is refused."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qdsl
from qdsl.choice import Key, Row, Table
from qdsl.codegen.cuda import measured
from qdsl.codegen.plan import code_values, plan, planes, vector_features
from qdsl.codegen.target import CPU_LEVELS, default_archs, target
from qdsl.diagnostic import TargetError
from qdsl.dtype import dtype
from qdsl.expr import Ref
from qdsl.order import Inputs, Order, interleaved, separated
from qdsl.split import split

KEY = Key("f16", "f16", "u4", 128)
SM80, CPU = target("cuda", "sm_80"), target("cpu", "x86-64-v3")
TEST_SCHEMES = Path(__file__).parent / "schemes"


@pytest.mark.parametrize(
    ("name", "params", "group", "constant"),
    [
        ("awq4", {}, 128, 0),
        ("awq4", {"act": "bf16", "group": 32}, 32, 0),
        ("awq4", {"group": "k"}, None, 0),
        ("gptq", {}, 128, 0),
        ("gptq_sym", {"act": "bf16"}, 128, 8),
        ("q4_0", {}, 32, 8),
    ],
)
def test_four_bit_codes_with_16_bit_compute_take_the_main_loop(name, params, group, constant):
    loop = plan(qdsl.load(name, **params), SM80).main_loop
    assert loop is not None
    assert (loop.group, loop.constant) == (group, constant)


@pytest.mark.parametrize(
    ("name", "params", "core", "lanes"),
    [
        ("awq4", {"group": 48}, "(q - z) * s", (32, 4)),
        ("gptq", {"bits": 3}, "(q - z) * s", (32, 3)),
        ("gptq", {"bits": 8}, "(q - z) * s", (64, 4)),
        ("gptq_sym", {"bits": 2}, "(q - 2) * s", (32, 2)),
        ("w8a16", {}, "q", (64, 4)),
        ("fp8a16_channel", {"fmt": "e5m2"}, "q", (64, 4)),
        ("mxfp4", {}, "q * s", (32, 4)),
        ("nvfp4a16", {}, "q * s", (32, 4)),
        ("nf4", {}, "table[q] * s", (32, 4)),
        ("hqq", {"bits": 2}, "(q - z) * s", (32, 2)),
    ],
)
def test_codes_of_any_kind_take_the_main_loop(name, params, core, lanes):
    planned = plan(qdsl.load(name, **params), SM80)
    assert f"tensor cores: {core}, " in str(planned.main_loop)
    assert planned.buffer("q").layout.stored_shape((32, 128))[2:] == lanes
    assert any(v.name == "any" for v in planned.variants)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("awq4", {"act": "f32"}),
        ("w4a16_int", {}),
        ("fp8_block", {}),
    ],
)
def test_what_the_main_loop_does_not_know_is_portable(name, params):
    planned = plan(qdsl.load(name, **params), SM80)
    assert planned.main_loop is None
    assert [v.name for v in planned.variants] == ["portable"]


@pytest.mark.parametrize("name", [n for n in qdsl.shipped() if not qdsl.load(n).activations])
def test_every_scheme_of_weights_alone_is_for_tensor_cores(name):
    for arch in ("sm_80", "sm_90a"):
        assert plan(qdsl.load(name), target("cuda", arch)).main_loop, name


def test_a_fresh_scheme_is_for_tensor_cores():
    """Nothing under codegen/ knows it; `test_emulated_kernels` and `test_gpu` have its numbers."""
    loop = plan(qdsl.load(TEST_SCHEMES / "fresh.q"), SM80).main_loop
    assert str(loop) == "tensor cores: table[q] * s + o, groups of 48 along k" and len(loop.table) == 32


def test_parts_of_features_lie_beside_each_other():
    planned = plan(qdsl.load(TEST_SCHEMES / "gate_up_channel.q"), SM80)
    assert planned.main_loop.parts == 2 and [planned.buffer(name).parts for name in "qszt"] == [2, 2, 2, 1]
    patterns = np.arange(44 * 3).reshape(44, 3)
    rows = interleaved(patterns, 2)
    assert rows.shape == (48, 3) and rows[[0, 8, 16, 24, 37, 45], 0].tolist() == [0, 66, 24, 90, 63, 129]
    assert not rows[38:40].any() and not rows[46:].any() and np.array_equal(separated(rows, 2, 44), patterns)


@pytest.mark.parametrize(("size", "padded"), [(16, 16), (24, 32), (128, 128)])
@given(data=st.data())
def test_inputs_in_the_order_of_their_groups(size, padded, data):
    """Whatever the groups are: each input once, runs of one group, nothing lost."""
    k = data.draw(st.integers(1, 300))
    count = -(-k // size)
    of = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=k, max_size=k)))
    order, q, s = Order("g", size, padded), *(qdsl.load("gptq_actorder").tensor(name) for name in "qs")
    runs = order.runs(Inputs(k, {"g": of}))
    there = runs.source >= 0
    assert sorted(runs.source[there]) == list(range(k)) and len(runs.source) == padded * len(runs.group)
    assert (of[runs.source[there]] == np.repeat(runs.group, padded)[there]).all()
    assert set(runs.group) == set(range(count)) and there.reshape(-1, padded).sum(1).max() <= size
    codes, scales = np.arange(2 * k).reshape(2, k), np.arange(2 * count).reshape(2, count)
    for tensor, patterns in ((q, codes), (s, scales)):
        ordered = runs.ordered(tensor, patterns)
        assert ordered.shape == runs.shape(tensor, patterns.shape)
        assert np.array_equal(runs.restored(tensor, ordered), patterns)


def test_a_zero_point_beyond_the_codes_makes_a_table():
    """The bit trick's exact range ends; the equation stays right."""
    text = qdsl.load("q4_0").text.replace("(q - 8)", "(q - 100)")
    loop = plan(qdsl.parse(text), SM80).main_loop
    assert loop.constant == 0 and loop.table == tuple(float(q - 100) for q in range(16))


def test_the_code_layout_is_the_a_fragment():
    """Lane (c t), four k-steps in 16 bytes, halves of a register 16 bits apart; one layout whatever the activations."""
    line = "[(o r:2 c:8), (i s:4 h:2 t:4 p:2)] = [o, i, c t, s {p h r}] : 4-bit elements in 32-bit words"
    for act in ("f16", "bf16", "f32"):
        assert str(plan(qdsl.load("awq4", act=act), SM80).buffer("q").layout) == line


@pytest.mark.parametrize(
    ("bits", "expected"), [(3, (2, 1)), (5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1)), (8, (8,)), (4, (4,))]
)
def test_odd_widths_are_planes_of_powers_of_two(bits, expected):
    found = planes(bits)
    assert tuple(width for _, width in found) == expected
    assert [low for low, _ in found] == [sum(expected[:i]) for i in range(len(expected))]
    n, k = vector_features(dtype(f"u{bits}")), 5
    layout = plan(qdsl.load("gptq", bits=bits), target("cpu", "x86-64-v2")).buffer("q").layout
    rows, columns, lanes = layout.stored_shape((n, k))
    assert rows * columns * lanes * 8 == n * k * bits, "no bit is wasted"


def test_the_choice_is_measured_or_else_modelled(monkeypatch):
    scheme, hopper = qdsl.load("awq4"), target("cuda", "sm_90a")
    assert plan(scheme, hopper).table.rows == measured.tables("sm_90a")[0].rows
    assert plan(scheme, SM80).table.source == "model"
    stale = Row(1, 1, ((None, "gone"),), ((None, "gone"),))
    monkeypatch.setattr(measured, "tables", lambda arch: (Table("measured long ago", stale, (stale,), KEY),))
    assert plan(scheme, hopper).table.source == "model", "a table of tiles that are gone is of no use"


def test_tables_are_of_what_makes_kernels_differ_in_speed():
    for (name, params), key in {
        ("awq4", ()): KEY,
        ("gptq", ()): KEY,
        ("awq4", (("act", "bf16"), ("group", "k"))): Key("bf16", None, "u4", None),  # its scale is left to the epilogue
        ("gptq_sym", (("group", 64),)): Key("f16", "f16", None, 64),
    }.items():
        assert plan(qdsl.load(name, **dict(params)), SM80).table.key == key


def test_the_plan_prints_every_decision():
    text = str(plan(qdsl.load("fp8_block"), SM80))
    for part in ("core q", "promote s", "promote t", "every 128 inputs", "note[widened]: the portable loop nest for cuda sm_80 has no e4m3 multiply",
                 "quantize(x, t, a)", "linear(t, a, q, s, b, y)"):  # fmt: skip
        assert part in text, text


def test_integer_sums_limit_k():
    assert plan(qdsl.load("w8a8_dynamic"), CPU).max_k == (2**31 - 1) // (128 * 128)
    assert plan(qdsl.load("awq4"), CPU).max_k is None


@pytest.mark.parametrize("name", ["experts"])
def test_what_kernels_do_not_do_yet_is_one_clear_error(name):
    file = TEST_SCHEMES / f"{name}.q"
    with pytest.raises(TargetError, match=r"can't be compiled yet") as caught:
        plan(qdsl.load(file), CPU)
    assert str(file) in str(caught.value), "the error points into the scheme"


@pytest.mark.parametrize(
    ("kind", "arch", "words"),
    [
        ("cuda", "sm_75", "too old"),
        ("cuda", "sm_9", "too old"),
        ("cuda", "sm_90b", "did you mean"),
        ("cpu", "x86", "known"),
        ("rocm", "gfx90a", "unknown target"),
        ("cpu", "sm_80", "--target cuda"),
        ("cuda", "x86-64-v3", "--target cpu"),
    ],
)
def test_wrong_targets_are_named(kind, arch, words):
    with pytest.raises(TargetError, match=words):
        target(kind, arch)


def test_defaults_are_targets():
    for kind in ("cpu", "cuda"):
        assert {target(kind, arch).kind for arch in default_archs(kind)} == {kind}


def test_a_level_has_the_units_of_those_below_it():
    units = [target("cpu", level).units for level in CPU_LEVELS]
    added = [more - less for less, more in pairwise(units) if less < more]
    assert added == [{"avx2"}, {"avx512"}, {"vnni"}, {"bf16"}, {"amx"}] and not units[0]
    assert target("cpu", "armv8.6-a").units == {"f16", "dot", "i8mm", "bf16"}


def test_any_function_of_one_code_is_a_table():
    nf4, fp4 = qdsl.load("nf4"), qdsl.load("mxfp4")
    values = code_values(split(nf4.weight, nf4.compute.operand, "w").core, nf4.weight.tensors)
    assert values.shape == (16,) and values[0] == -1 and values[15] == 1 and values[7] == 0
    assert np.array_equal(code_values(Ref("q"), fp4.weight.tensors), fp4.code.dtype.decode(np.arange(16)))
    assert code_values(Ref("s"), fp4.weight.tensors) is None, "a scale is no code"
