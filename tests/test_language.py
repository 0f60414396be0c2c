"""One small scheme per decision of the language: what it declares is what the checked scheme holds, and every layout
of every scheme packs and unpacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qdsl.check import check
from qdsl.diagnostic import Source
from qdsl.expr import Item, Ref, evaluate, names
from qdsl.reference import apply_transform
from qdsl.scheme import Scheme, Var, expert_name
from qdsl.syntax import parse

ROOT = Path(__file__).parent.parent
SIZES = {"e": 3, "m": 5, "n": 50, "k": 328, "i": 8, "j": 41, "c": 8, "d": 41, "b": 82, "r": 3}


def scheme(path: Path, **params) -> Scheme:
    return check(parse(Source(str(path), path.read_text())), params)


def local(name: str, **params) -> Scheme:
    return scheme(ROOT / "tests" / "schemes" / f"{name}.q", **params)


def variants() -> list:
    """Every shipped and test scheme, with every bit width that it takes."""
    found = []
    for path in sorted([*ROOT.glob("schemes/*.q"), *ROOT.glob("tests/schemes/*.q")]):
        widths = {"gptq": range(2, 9), "gptq_actorder": range(2, 9), "gptq_sym": range(2, 9)}
        widths |= {"gptq_sym_actorder": range(2, 9), "hqq": (1, 2, 4, 8)}
        widths |= {"padded_words": (3, 5, 7), "word_arithmetic": (2, 3, 4, 8)}
        for bits in widths.get(path.stem, (None,)):
            name = path.stem if bits is None else f"{path.stem}-{bits}"
            found.append(pytest.param(path, {} if bits is None else {"bits": bits}, id=name))
    return found


@pytest.mark.parametrize(("path", "params"), variants())
def test_every_layout_packs_and_unpacks(path, params):
    s = scheme(path, **params)
    rng = np.random.default_rng(0)
    for storage in s.layouts.values():
        for binding in storage.bindings:
            tensor = s.tensor(binding.tensor)
            shape = tensor.shape(SIZES, s)[int(binding.per_expert) :]
            bits = min(tensor.dtype.bits, binding.layout.bits, binding.stored.bits)
            x = rng.integers(0, 1 << bits, shape, np.uint64).astype(np.uint64)
            packed = binding.layout.pack(x)
            assert packed.shape == binding.layout.stored_shape(shape)
            assert packed.dtype.itemsize * 8 == binding.stored.bits
            assert np.array_equal(binding.layout.unpack(packed, shape), x), str(binding.layout)


@pytest.mark.parametrize(("path", "params"), variants())
def test_the_canonical_text_checks_to_the_same_scheme(path, params):
    s = scheme(path, **params)
    assert check(parse(Source("again.q", s.text)), params) == s


def test_ragged_extents_round_up():
    s = local("ragged")
    assert s.tensor("s").shape({"n": 50, "k": 100}) == (50, 3)
    assert s.tensor("u").shape({"n": 50, "k": 100}) == (3,)
    assert s.layouts["words"].bindings[0].layout.stored_shape((50, 100)) == (50, 13)


def test_one_group_over_all_of_k():
    for value in ("k", -1, "-1"):
        s = local("ragged", group=value)
        assert s.tensor("s").shape({"n": 50, "k": 100}) == (50, 1)
        assert str(s.tensor("s")) == "scale s[n, k // k] : f16"


def test_bit_planes_may_order_their_lanes_differently():
    layout = local("bit_planes").layouts["top_bit_first"].bindings[0].layout
    x = np.zeros((1, 32), np.uint8)
    x[0, 17] = 0b10011  # h = 1, j = 1
    words = layout.pack(x)[0]
    assert int(words[0]) == 1 << 17
    assert sum(int(w) << (32 * i) for i, w in enumerate(words[1:])) == 0b0011 << (4 * 3)


def test_padded_words_keep_whole_codes():
    layout = local("padded_words").layouts["padded"].bindings[0].layout
    assert layout.stored_shape((1, 256)) == (1, 26)
    assert int(layout.pack(np.full((1, 10), 7, np.uint8)).item()) == 2**30 - 1


def test_word_arithmetic_borrows_across_fields_and_field_arithmetic_does_not():
    s = local("word_arithmetic")
    by_word, by_field = (s.layouts[name].bindings[1] for name in ("by_word", "by_field"))
    stored = np.array([[0xEEEEEEEF, 0, 0, 0]], np.uint32)  # every true zero point is 0
    whole = by_word.layout.unpack(stored + np.uint32(by_word.words), (8, 1))
    assert not whole.any()
    fields = evaluate(by_field.value, lambda _: by_field.layout.unpack(stored, (8, 1)).astype(float), None)
    assert (fields % 16).ravel().tolist() == [0, 15, 15, 15, 15, 15, 15, 15]


def test_word_arithmetic_exists_for_whole_fields_only():
    assert "by_word" not in local("word_arithmetic", bits=3).layouts


def test_experts():
    s = local("experts")
    assert s.experts
    assert s.code.index == (Var("e"), Var("n"), Var("k"))
    each = s.layouts["one_file_name_each"].bindings[0]
    assert each.per_expert
    assert expert_name(each.source, 7) == "experts.7.up_proj.qweight"
    assert each.layout.stored_shape((64, 32)) == (4, 64)
    assert not s.layouts["stacked"].bindings[0].per_expert


def test_flatquant_multiplies_from_both_sides():
    transform = scheme(ROOT / "schemes" / "w4a4_flatquant.q").activations[0].transforms[0]
    rng = np.random.default_rng(0)
    left, right, x = rng.standard_normal((4, 4)), rng.standard_normal((6, 6)), rng.standard_normal((3, 24))
    expected = np.stack([left.T @ row.reshape(4, 6) @ right for row in x]).reshape(3, 24)
    np.testing.assert_allclose(apply_transform(transform, x, {"left": left, "right": right}), expected)


def test_smoothing_multiplies_each_channel():
    transform = local("smoothing").activations[0].transforms[0]
    x, v = np.arange(6.0).reshape(2, 3), np.array([1.0, 10.0, 100.0])
    assert np.array_equal(apply_transform(transform, x, {"v": v}), x * v)


def test_phases_name_their_activation():
    s = local("phases")
    assert s.phases == ("prefill", "decode")
    assert s.activation("decode").name == "decode"
    assert s.activation("both").name == s.activation("").name == "prefill"
    prefill, decode = ({t.name for t in a.operand.loaded} for a in s.activations)
    assert (prefill, decode) == (set(), {"c", "o"})


def test_gate_and_up_share_one_weight():
    output = local("gate_up").output
    assert output.half == ("r", 2)
    assert str(output.value) == "silu(acc[r = 0]) * acc[r = 1]"


def test_a_bias_inside_the_scale():
    output = local("integer_bias").output
    assert names(output.value) == {"acc", "b", "s", "t"}
    assert [t.name for t in output.tensors] == ["b"]


def test_a_code_beyond_the_table_means_zero():
    table = local("code_book").tensor("c")
    values = {"c": np.array(table.value), "q": np.array([0.0, 23.0, 24.0, 31.0])}
    look = evaluate(Item("c", (Ref("q"),)), lambda node: values[node.name], None)
    assert look.tolist() == [-3.0, 3.0, 0.0, 0.0]
