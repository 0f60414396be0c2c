"""Layouts: bit-exact against published packers, and pack, unpack, address and repack agree for random digit splits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packers
import qdsl
from qdsl.check import check
from qdsl.diagnostic import Source
from qdsl.layout import Axis, Digit, Lane, Layout, Repack, Run, plain
from qdsl.syntax import parse


def line(declared: str, binding: str) -> Layout:
    """The layout that one line of a scheme file declares for one tensor."""
    code = "" if declared.startswith("code") else "code v[n, k] : u4"
    text = f"""
        scheme one_line
        weight {{ {code} {declared} w ~ {"v" if code else "q"} }}
        compute f16 -> f32
        output f16
        layout here {{ {binding} {'v = "v" : u8' if code else ""} }}
    """
    return check(parse(Source("one_line.q", text))).layouts["here"].bindings[0].layout


def codes(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape).astype(np.uint32)


def holds(layout: Layout, elements: np.ndarray, words: np.ndarray) -> None:
    """`layout` stores `elements` as exactly `words`, and reads them back."""
    packed = layout.pack(elements)
    assert packed.shape == words.shape == layout.stored_shape(elements.shape)
    assert np.array_equal(packed.astype(np.uint64), words)
    assert np.array_equal(layout.unpack(packed, elements.shape), elements)


# ---- the published formats ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("axes", ["k, c {l: 0 2 4 6 1 3 5 7}", "k, c {a b}"])
def test_autoawq(axes):
    left = "(c l)" if "l:" in axes else "(c b:4 a:2)"
    q = codes(4, 64, 32)
    holds(line("code q[n, k] : u4", f'q[{left}, k] = "qweight"[{axes}] : i32'), q, packers.autoawq_gemm(q))


def test_autoawq_word_of_the_format_description():
    layout = line("code q[n, k] : u4", 'q[(c l), k] = "qweight"[k, c {l: 0 2 4 6 1 3 5 7}] : i32')
    assert layout.pack(np.arange(1, 9, dtype=np.uint8)[:, None]) == 0x86427531


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_autogptq(bits):
    q = codes(bits, 8, 96)
    holds(line(f"code q[n, k] : u{bits}", 'q[n, (r l:32)] = "qweight"[r {l}, n] : i32'), q, packers.autogptq(q, bits))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("k", [32, 64, 96])
def test_autogptq_one_code_at_each_position(bits, k):
    """All bits of one code and none of the others, of weights along k and of zero points along n."""
    only = np.eye(k, dtype=np.uint8) * ((1 << bits) - 1)
    for tensor in ("q", "z"):
        holds(stored("gptq", "gptq_v2", tensor, bits=bits), only, along_k(tensor, packers.autogptq, only, bits))


def along_k(tensor, pack, elements, bits):
    """What a packer of codes along k makes of codes, or of zero points [n, g], which lie along n."""
    return pack(elements, bits) if tensor == "q" else pack(elements.T, bits).T


@pytest.mark.parametrize("bits", sorted(packers.PLANES))
def test_gptq_planar(bits):
    runs, low = [], 0
    for width in packers.PLANES[bits]:
        runs.append(f"{{l}}.{low}:{width}")
        low += width
    q = codes(bits, 4, 96)
    layout = line(f"code q[n, k] : u{bits}", f'q[n, (r l:32)] = "qweight"[r {" ".join(runs)}, n] : i32')
    holds(layout, q, packers.gptq_planar(q, bits))


@pytest.mark.parametrize("bits", range(1, 9))
def test_compressed_tensors_dense(bits):
    q = codes(bits, 4, 96)
    layout = line(f"code q[n, k] : u{bits}", 'q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32')
    holds(layout, q, packers.compressed_tensors_dense(q, bits))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [8, 31, 40])
def test_words_of_padding_alone_may_be_missing(bits, k):
    """Runs of 32 codes; the packer stores as many words as the codes of a row begin."""
    q = codes(bits, 4, k)
    layout = line(f"code q[n, k] : u{bits}", 'q[n, (r l:32)] = "weight_packed"[n, r {l}] : i32')
    least, whole = packers.compressed_tensors_dense(q, bits).astype(np.uint32), layout.pack(q)
    assert layout.least_shape(q.shape) == least.shape and np.array_equal(whole[:, : least.shape[1]], least)
    assert not whole[:, least.shape[1] :].any()
    assert np.array_equal(layout.unpack(least, q.shape), q) and np.array_equal(layout.unpack(whole, q.shape), q)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("k", [96, 256, 31])
def test_compressed_tensors_padded(bits, k):
    per_word = 32 // bits
    q = codes(bits, 4, k)
    binding = f'q[n, (r l:{per_word})] = "weight_packed"[n, r {{l pad {32 % bits}}}] : i32'
    holds(line(f"code q[n, k] : u{bits}", binding), q, packers.compressed_tensors_padded(q, bits))


def stored(scheme: str, layout: str, name: str, **params) -> Layout:
    """The layout of one tensor of a shipped scheme."""
    bindings = qdsl.load(scheme, **params).layouts[layout].bindings
    return next(b.layout for b in bindings if b.tensor == name)


def test_modelslim_row_pairs():
    q = codes(4, 12, 40)
    holds(stored("w4a8_dynamic", "modelslim", "q"), q, packers.modelslim_row_pairs(q))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
def test_modelslim_scale_in_i64(values):
    s = np.array(values, np.float32)
    holds(stored("w8a8_quant_bias", "modelslim_f16", "d"), s.view(np.uint32), packers.modelslim_scale_in_i64(s))


def test_bitsandbytes_nf4():
    q = codes(4, 8, 16)
    holds(line("code q[n, k] : u4", 'q[n, (b l)] = "weight"[n b {l: 1 0}, 1] : u8'), q, packers.bitsandbytes_nf4(q))


def test_gguf_q4_0():
    q = codes(4, 4, 64)
    holds(line("code q[n, k] : u4", 'q[n, (b l:2 j:16)] = "qs"[n, b, j {l}] : u8'), q, packers.gguf_q4_0(q))


def test_low_nibble_first():
    q = codes(4, 4, 64)
    holds(line("code q[n, k] : e2m1", 'q[n, (b l:2)] = "weight"[n, b {l}] : u8'), q, packers.low_nibble_first(q))


def test_marlin_weight():
    q = codes(4, 128, 64)
    binding = 'q[(o j:4 b:2 c:8), (i h:2 t:4 p:2)] = "B"[i, o c t j {p b h}] : i32'
    holds(line("code q[n, k] : u4", binding), q, packers.marlin_weight(q))


def test_marlin_scales():
    s = codes(16, 128, 3)
    grouped = line("scale s[n, k // 128] : f16", 's[(o j:8 i:8), g] = "s"[g, o i j] : f16')
    holds(grouped, s, packers.marlin_grouped_scale(s))
    channel = line("scale s[n] : f16", 's[(o a:4 i:4 b:2)] = "s"[o i a b] : f16')
    holds(channel, s[:, 0], packers.marlin_channel_scale(s[:, 0]))


def test_block_scale_swizzle():
    s = codes(8, 256, 8)
    layout = line("scale s[n, k // 16] : e4m3", 's[(R r:4 q:32), (C c:4)] = "sf"[R C q r c] : u8')
    holds(layout, s, packers.block_scale_swizzle(s))


def test_kernel_layout_is_what_wgmma_reads():
    q = codes(4, 128, 192)
    binding = 'q[(o r:2 c:8), (i s:4 h:2 t:4 p:2)] = "B"[o, i, c t, s {p h r}] : i32'
    tile, block, warp, lane, step = 0, 1, 2, 3, 4
    words = packers.wgmma_weight(q).transpose(tile, warp, block, lane, step).reshape(128 // 16, 192 // 64, 32, 4)
    holds(line("code q[n, k] : u4", binding), q, words)


# ---- random layouts ----------------------------------------------------------------------------------------------
@st.composite
def layouts(draw, rank: int | None = None, bits: int | None = None) -> Layout:
    """Any layout the language can declare: split digits, orders, bit ranges, padded words."""
    rank = rank or draw(st.integers(0, 3))
    bits = bits or draw(st.integers(1, 8))
    word = draw(st.sampled_from([w for w in (8, 16, 32) if w >= bits]))
    names = iter("abcdefghijkl")
    dims = []
    for _ in range(rank):
        rest = [Digit(next(names), draw(st.integers(1, 5))) for _ in range(draw(st.integers(0, 2)))]
        open_at = draw(st.integers(0, len(rest)))
        dims.append((*rest[:open_at], Digit(next(names)), *rest[open_at:]))
    fixed = [d for dim in dims for d in dim if d.extent]
    packed = draw(st.lists(st.sampled_from(fixed), unique=True, max_size=3)) if fixed else []
    others = draw(st.permutations([d.name for dim in dims for d in dim if d not in packed]))
    cuts = sorted(draw(st.lists(st.integers(0, len(others)), max_size=2)))
    axes = [Axis(tuple(others[a:b])) for a, b in zip([0, *cuts], [*cuts, len(others)], strict=True)]
    if packed:
        at = draw(st.integers(0, len(axes) - 1))
        axes[at] = Axis(axes[at].digits, tuple(draw(runs(packed, bits, word))))
    return Layout(tuple(dims), tuple(axes), bits, word)


@st.composite
def runs(draw, digits: list[Digit], bits: int, word: int) -> list[Run]:
    """One dense run, or planes of bit ranges in any order; each padded to whole words."""
    edges = sorted({0, bits, *draw(st.lists(st.integers(0, bits), max_size=2))})
    planes = list(pairwise(edges))
    result = []
    for low, high in draw(st.permutations(planes)):
        lanes = []
        for d in draw(st.permutations(digits)):
            order = draw(st.none() | st.permutations(range(d.extent)).map(tuple))
            lanes.append(Lane(d.name, order))
        pad = -math.prod(d.extent for d in digits) * (high - low) % word
        result.append(Run(tuple(lanes), None if len(planes) == 1 else (low, high - low), pad))
    return result


@st.composite
def filled(draw, layout: Layout) -> np.ndarray:
    """Random elements of a ragged size."""
    rest = [math.prod(d.extent for d in dim if d.extent) for dim in layout.dims]
    shape = [draw(st.integers(1, 2 * r + 1)) for r in rest]
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(0, 1 << layout.bits, shape).astype(np.uint8)


layout_and_elements = layouts().flatmap(lambda layout: st.tuples(st.just(layout), filled(layout)))
quick = settings(max_examples=150)


@quick
@given(layout_and_elements)
def test_unpack_inverts_pack(case):
    layout, x = case
    packed = layout.pack(x)
    assert packed.shape == layout.stored_shape(x.shape)
    assert np.array_equal(layout.unpack(packed, x.shape), x)


@quick
@given(layout_and_elements)
def test_padding_is_written_as_zero_and_never_read(case):
    layout, x = case
    used = layout.pack(np.full_like(x, (1 << layout.bits) - 1))
    assert int(np.bitwise_count(used).sum()) == x.size * layout.bits
    packed = layout.pack(x)
    assert not np.any(packed & ~used)
    assert np.array_equal(layout.unpack(packed | ~used, x.shape) & ((1 << layout.bits) - 1), x)


@quick
@given(layout_and_elements)
def test_address_agrees_with_pack(case):
    layout, x = case
    words = layout.pack(x)
    for index in np.ndindex(x.shape):
        assert read(layout, words, index, x.shape) == x[index]


def read(layout: Layout, words: np.ndarray, index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    value = 0
    for field in layout.address(index, shape):
        part = int(words[field.index]) >> field.shift
        if field.shift + field.width > layout.word:
            assert field.following is not None, "a field over the end of its word names the next"
            part |= int(words[field.following]) << (layout.word - field.shift)
        value |= (part & ((1 << field.width) - 1)) << field.low
    return value


@quick
@given(st.data())
def test_repack_is_unpack_then_pack_and_inverts(data):
    bits, rank = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 2))
    source, target = data.draw(layouts(rank, bits)), data.draw(layouts(rank, bits))
    x = data.draw(filled(source))
    repack = Repack(source, target)
    words = repack(source.pack(x), x.shape)
    assert np.array_equal(words, target.pack(x))
    assert np.array_equal(repack.inverse(words, x.shape), source.pack(x))


# ---- edges -------------------------------------------------------------------------------------------------------
def test_straddling_codes_are_found_one_by_one():
    """Code 7 at each of 32 positions, zeros elsewhere: 3-bit codes 10 and 21 lie in two words."""
    layout = line("code q[n, k] : u3", 'q[n, (r l:32)] = "qweight"[r {l}, n] : i32')
    for at in range(32):
        x = np.zeros((1, 32), np.uint8)
        x[0, at] = 7
        words = layout.pack(x)
        stream = sum(int(w) << (32 * i) for i, w in enumerate(words[:, 0]))
        assert stream == 7 << (3 * at)
        assert [read(layout, words, (0, j), x.shape) for j in range(32)] == x[0].tolist()


def test_wrong_stored_shape_is_named():
    layout = plain(2, 8)
    with pytest.raises(ValueError, match=r"stored shape is \[2, 4\], the layout needs \[4, 2\]"):
        layout.unpack(np.zeros((2, 4), np.uint8), (4, 2))


def test_a_size_that_fixed_digits_cannot_hold_is_refused():
    layout = Layout(((Digit("a", 2), Digit("b", 4)),), (Axis(("a", "b")),), 8, 8)
    with pytest.raises(ValueError, match=r"9 elements do not fit \(a:2 b:4\)"):
        layout.stored_shape((9,))


def test_a_layout_prints_as_its_line():
    binding = 'q[(o r:2 c:8), (i s:4 h:2 t:4 p:2)] = "B"[o, i, c t, s {p h r}] : i32'
    layout = line("code q[n, k] : u4", binding)
    left, right = "[(o r:2 c:8), (i s:4 h:2 t:4 p:2)]", "[o, i, c t, s {p h r}]"
    assert str(layout) == f"{left} = {right} : 4-bit elements in 32-bit words"


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_groups_of_all_of_k_are_one(bits):
    """`(g j:group)` with `group=k`: one g, and a j for every input."""
    scheme = qdsl.load("hqq", bits=bits, group="k")
    (binding,) = (b for b in scheme.layouts["hqq"].bindings if b.tensor == "q")
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (32, 72)).astype(np.uint8)
    assert str(binding.layout.dims[1][0]) == "g:1"
    assert binding.layout.stored_shape(codes.shape) == (32 * bits // 8, 72)
    assert np.array_equal(binding.layout.unpack(binding.layout.pack(codes), codes.shape), codes)


def test_bits_of_a_word_have_places():
    """Any order of a word's bits, there and back, word by word and as an expression."""
    rng = np.random.default_rng(0)
    plain = Layout(((Digit("i"), Digit("l", 8)),), (Axis(("i",), (Run((Lane("l"),)),)),), 4, 32)
    moved = replace(plain, places=tuple(map(int, rng.permutation(32))))
    elements = rng.integers(0, 16, 40).astype(np.uint8)
    words = moved.pack(elements)
    assert np.array_equal(moved.unpack(words, (40,)), elements) and not np.array_equal(words, plain.pack(elements))
    assert np.array_equal(moved.restored(words), plain.pack(elements))
    assert [moved.restored(int(word)) for word in words] == plain.pack(elements).tolist()
    bit = 1 << 5
    assert moved.restored(1 << moved.places[5]) == bit and "bits at" in str(moved)
