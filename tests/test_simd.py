"""SIMD kernels of CPUs: how schemes meet units, how codes lie, and what comes out for x and codes that are not ordinary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import qdsl
from qdsl import reference
from qdsl.codegen import pipeline
from qdsl.codegen.plan import plan
from qdsl.codegen.simd.blocked import DEPTH, codes
from qdsl.codegen.target import target
from qdsl.dtype import dtype
from qdsl.runtime import QuantLinear, verify
from qdsl.runtime.processor import cpu_levels

HERE = cpu_levels()[0]
LIGHT = next((level for level in cpu_levels() if level == "x86-64-v3"), HERE)  # whose kernels are compiled sooner


def view(name: str, level: str, **params):
    return plan(qdsl.load(name, **params), target("cpu", level)).blocked


def variants(name: str, level: str, **params) -> list[str]:
    return [v.name for v in plan(qdsl.load(name, **params), target("cpu", level)).variants]


# ---- plans -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake", "sapphirerapids"])
def test_all_shipped_schemes_take_them(level):
    slow = set()
    for name in qdsl.shipped():
        scheme = qdsl.load(name)
        if any(p.blocked is None for p in (plan(s, target("cpu", level)) for s in phases(scheme))):
            slow.add(name)
    assert not slow
    assert view("awq4", "x86-64-v2") is None and view("awq4", "armv8.2-a") is None


def phases(scheme):
    return [scheme.in_phase(phase) for phase in scheme.phases or ("",)]


@pytest.mark.parametrize(
    ("name", "params", "units"),
    [
        ("awq4", {"act": "bf16"}, ("f32", "f32", "f32", "bf16", "bf16")),
        ("awq4", {"act": "f32"}, ("f32", "f32", "f32", "f32", "bf16")),  # three planes want tiles
        ("w8a8_dynamic", {}, ("i16", "i16", "u8", "u8", "u8")),
        ("w4a16_int", {}, ("i16", "i16", "u8", "u8", "u8")),
        ("fp8_dynamic", {}, ("f32", "f32", "f32", "bf16", "bf16")),
        ("nf4", {"act": "f16"}, ("f32",) * 5),  # its table is none of bfloat16
    ],
)
def test_the_unit_is_the_best_that_is_exact(name, params, units):
    levels = ("x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake", "sapphirerapids")
    assert tuple(view(name, level, **params).unit for level in levels) == units


def test_planes_hold_all_bits_of_x():
    for act, planes in (("bf16", 1), ("f16", 2), ("f32", 3)):
        assert view("awq4", "sapphirerapids", act=act).planes == planes
        assert 8 * planes >= dtype(act).precision


@pytest.mark.parametrize(
    ("code", "unit", "planes"),
    [
        ("i16 = min(x / t, 32639)", "u8", 2),
        ("i16 = x / t", "i16", 1),  # 32640 is 128 * 256 - 128
        ("i16 = max(min(x / t, 127), -128)", "u8", 1),
        ("i8  = x / t", "u8", 1),
    ],
)
def test_codes_of_x_are_as_many_bytes_as_they_may_need(code, unit, planes):
    text = qdsl.load("w4a16_int").text.replace("i16 = min(x / t, 32639)", code)
    found = plan(qdsl.parse(text), target("cpu", "sapphirerapids"))
    assert (found.blocked.unit, found.blocked.planes) == (unit, planes)
    assert found.blocked.tiles == (unit == "u8")


@pytest.mark.parametrize(
    ("zero", "step"), [("z[n, k // 96] : u4", 96), ("z[n, g] : u4", 96), ("z[n, k] : u4", None), ("z[n] : u4", 0)]
)
def test_zero_points_are_taken_off_the_groups_they_are_of(zero, step):
    """Those of groups that no scale has, which inputs may name; None: no vectors."""
    text = f"""scheme mine "x"
    weight {{ code q[n, k] : u4 index g[k] : idx(k // 96) zero {zero} scale s[n] : f32 w ~ (q - z) * s }}
    compute f16 -> f32
    output f16"""
    found = plan(qdsl.parse(text), target("cpu", HERE)).blocked
    assert (found and (found.step or 0)) == step


@pytest.mark.parametrize(
    ("name", "params", "runs"),
    [
        ("gptq_actorder", {"group": 32, "bits": 6}, "inputs sorted by g, in runs of 32"),
        ("gptq", {"group": 20, "bits": 3}, "inputs in their order, in runs of 32, of 20 inputs"),
    ],
)
def test_groups_that_inputs_name_or_of_any_size_and_codes_of_any_width(name, params, runs, monkeypatch):
    """x is brought into the order of its groups; codes lie in cells of 4 or 8 bits."""
    scheme = qdsl.load(name, **params)
    for level in (HERE, LIGHT):
        planned = plan(scheme, target("cpu", level))
        assert planned.blocked.bits in (4, 8) and str(planned.order) == runs
    monkeypatch.setattr(verify, "SIZES", ((33, 136), (48, verify.MOST)))
    report = verify.verify(scheme, "cpu", LIGHT)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["gate_up_actorder", "gate_up_channel"])
def test_gate_and_up_lie_beside_each_other(name, monkeypatch):
    scheme = qdsl.load(Path(__file__).parent / "schemes" / f"{name}.q")
    planned = plan(scheme, target("cpu", LIGHT))
    assert (planned.inner or planned).blocked.parts == planned.buffer("q").parts == 2
    monkeypatch.setattr(verify, "SIZES", ((17, 136), (48, verify.MOST)))
    report = verify.verify(scheme, "cpu", LIGHT)
    assert report.passed, str(report)


def test_a_sum_that_could_overflow_limits_k():
    """15 * 32768 of each input, and none where so many groups are one by one."""
    for group, limit in ((128, None), (4352, None), (8192, 4369), ("k", 4369)):
        assert plan(qdsl.load("w4a16_int", group=group), target("cpu", HERE)).max_k == limit
    with pytest.raises(
        qdsl.Error, match="beyond k = 4369 a sum of products could overflow i32, and this layer has k = 8192"
    ):
        QuantLinear("w4a16_int", 8192, 32, group="k")


def test_tiles_hold_bytes_as_they_lie_and_finished_weights():
    assert view("w8a8_dynamic", "sapphirerapids").direct
    assert not view("w8a8_dynamic_asym", "sapphirerapids").direct, "sums of weights are made of operands"
    assert variants("awq4", "sapphirerapids", act="bf16") == ["tiles", "folded"]
    assert variants("awq4", "sapphirerapids", act="f16") == ["rows", "stacked", "tiles"], (
        "bfloat16 would round its weights twice"
    )
    assert variants("w8a16", "sapphirerapids") == ["rows", "tiles"]
    assert variants("w8a16_group", "sapphirerapids") == ["rows", "tiles", "folded"]
    assert variants("w8a8_dynamic", "cascadelake") == ["rows", "panel"]
    assert view("w4a16_int", "sapphirerapids").signed and view("w4a8_group", "sapphirerapids").signed
    assert not view("w4a8_dynamic", "sapphirerapids").signed, "its offset is taken off once"


def test_x_is_quantized_in_the_loop_that_multiplies_it():
    for variant in plan(qdsl.load("w8a8_dynamic"), target("cpu", "sapphirerapids")).variants:
        (step,) = variant.steps
        assert step.args == ("x", "q", "s", "b", "y")


@pytest.mark.parametrize(
    ("name", "level", "instructions"),
    [
        ("awq4", "sapphirerapids", ("tdpbf16ps", "permvar")),
        ("w8a8_dynamic", "sapphirerapids", ("tdpbssd", "vpdpbusd")),
        ("w4a16_int", "sapphirerapids", ("tdpbssd", "vpdpbusd")),
        ("w8a8_dynamic", "x86-64-v3", ("pmadd.wd",)),
    ],
)
def test_code_has_the_instructions_of_the_unit(name, level, instructions):
    text = pipeline.emit(qdsl.load(name), "cpu", level, "source")
    assert all(i in text for i in instructions)


# ---- layouts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", sorted(set(DEPTH.values())))
def test_a_shift_makes_operands_of_neighbouring_inputs(bits, depth):
    per_word = 32 // bits
    n, k = 40, 3 * per_word
    patterns = np.random.default_rng(0).integers(0, 1 << bits, (n, k)).astype(np.uint8)
    layout = codes(bits, depth)
    words = layout.pack(patterns)
    assert words.nbytes * 8 == 64 * k * bits, "no bit is wasted, but for features beyond the last"
    np.testing.assert_array_equal(layout.unpack(words, (n, k)), patterns)
    part, mask = 32 // depth, (1 << bits) - 1
    for i in range(3):
        for q in range(per_word // depth):
            for p in range(depth):
                found = (words[0, i] >> (part * p + bits * q)) & mask
                np.testing.assert_array_equal(found, patterns[:32, i * per_word + q * depth + p])


# ---- numbers -----------------------------------------------------------------------------------------------------
def layer_of(name: str, k: int, n: int, **params):
    scheme = qdsl.load(name, **params)
    bias = any(t.role == "bias" and not t.optional for t in scheme.output.tensors)
    layer = QuantLinear(scheme, k, n, bias)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(3), n, k)
    patterns = {name: p for name, p in patterns.items() if not layer.scheme.tensor(name).optional}
    return layer.set_patterns(patterns), patterns


@pytest.mark.parametrize(
    ("name", "params"),
    [("awq4", {"act": "bf16"}), ("awq4", {"act": "f32"}), ("w4a16_int", {}), ("w8a8_dynamic", {}), ("mxfp4", {})],
)
@pytest.mark.parametrize(("k", "n"), [(128, 32), (384, 31), (1152, 97)])
def test_every_variant_is_right_for_tails_and_writes_all_of_y(name, params, k, n):
    layer, patterns = layer_of(name, k, n, **params)
    for m in (1, 2, 5, 16, 17, 33, 70):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(layer.dtype)
        right = reference.linear(layer.scheme, x.double().numpy(), patterns, n, precision=layer.manifest.precision)
        for variant in layer.kernel.variants(k):
            y = torch.full((m, n), float("nan"), dtype=layer.dtype)
            layer.run_into(x, y, variant)
            assert (np.abs(y.double().numpy() - right.y) <= right.bound).all(), (variant, m)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("awq4", {"act": "bf16"}),
        ("awq4", {}),
        ("w4a16_int", {}),
        ("w8a8_dynamic", {}),
        ("w4a8_group", {}),
        ("fp8_block", {}),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name, params):
    layer = QuantLinear(qdsl.load(name, **params), 512, 40, batch_invariant=True)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(3), 40, 512)
    layer.set_patterns({name: p for name, p in patterns.items() if not layer.scheme.tensor(name).optional})
    x = torch.randn(65, 512, generator=torch.Generator().manual_seed(1)).to(layer.dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    for m in (2, 5, 16, 17, 33, 65):
        assert torch.equal(layer(x[:m]), alone[:m])


@pytest.mark.parametrize("act", ["f16", "bf16", "f32"])
def test_one_hot_x_gives_the_weight(act):
    """Every code of every column, through every variant: planes of x and planes of codes are exact."""
    layer, patterns = layer_of("w8a16", 512, 64, act=act)
    weight = reference.decode_weight(layer.scheme, patterns, 64, 512)
    x = torch.eye(512).to(layer.dtype)
    expected = torch.from_numpy(weight.T.copy()).to(torch.float32).to(layer.dtype)
    for variant in layer.kernel.variants(512):
        y = torch.empty(512, 64, dtype=layer.dtype)
        layer.run_into(x, y, variant)
        assert torch.equal(y, expected), variant


@pytest.mark.parametrize("level", [HERE, "x86-64-v3"])
@pytest.mark.parametrize(
    ("name", "params"),
    [("w8a16", {}), ("fp8a16_channel", {"fmt": "e4m3"}), ("fp8a16_channel", {"fmt": "e5m2"}), ("fp8a16_channel", {"fmt": "e3m4"})],
)  # fmt: skip
def test_every_byte_is_what_its_format_says(name, params, level, monkeypatch):
    """Subnormal numbers and zeros of both signs, exactly; a feature that has a code of no number is none, and no other is."""
    monkeypatch.setenv("QDSL_CPU_LEVEL", level)
    cpu_levels.cache_clear()
    try:
        layer = QuantLinear(qdsl.load(name, **params, act="f32"), 256, 70)
        code = layer.scheme.code.dtype
        values = code.decode(np.arange(256))
        q = (np.arange(256) + 37 * np.arange(70)[:, None]) % 256
        q[~np.isfinite(values[q])] = 0
        none = np.flatnonzero(np.isnan(values))
        spoiled = np.arange(70) % 3 == 1 if len(none) else np.zeros(70, bool)
        for n in np.flatnonzero(spoiled):
            q[n, 5 * n % 256] = none[n % len(none)]
        patterns = {"q": q.astype(np.uint8), "s": np.full(70, np.float32(1).view(np.uint32))}
        layer.set_patterns(patterns)
        expected = torch.from_numpy(np.where(spoiled, np.nan, values[q].T)).float()
        for variant in layer.kernel.variants(256):
            for rows in (slice(0, 256), slice(130, 131), slice(7, 9)):
                y = torch.empty(len(expected[rows]), 70)
                layer.run_into(torch.eye(256)[rows].contiguous(), y, variant)
                torch.testing.assert_close(y, expected[rows], rtol=0, atol=0, equal_nan=True)
    finally:
        cpu_levels.cache_clear()


@pytest.mark.parametrize("level", [HERE, "x86-64-v3"])
@pytest.mark.parametrize("bits", [3, 6])
@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "bytes"])
def test_codes_with_a_sign_narrower_than_their_cells(bits, quantized, level, monkeypatch):
    """Every code by a one-hot x, exactly: what a code lacks of its cell's bits is no sign."""
    inputs = "activation { scale t[m] : f32 = amax(abs(x)) code a[m, k] : i8 = x / t x ~ a * t }\n" * quantized
    compute = "i8 -> i32" if quantized else "f32 -> f32"
    text = f"scheme mine\nweight {{ code q[n, k] : i{bits} scale s[n] : f32 w ~ q * s }}\n{inputs}compute {compute}\noutput f32"
    monkeypatch.setenv("QDSL_CPU_LEVEL", level)
    cpu_levels.cache_clear()
    try:
        layer, k, n = QuantLinear(qdsl.parse(text), 128, 40), 128, 40
        q = (np.arange(k) + 5 * np.arange(n)[:, None]) % (1 << bits)
        layer.set_patterns({"q": q.astype(np.uint8), "s": np.full(n, np.float32(1).view(np.uint32))})
        expected = torch.from_numpy(dtype(f"i{bits}").decode(q).T.copy()).float()
        assert "portable" not in layer.kernel.variants(k)
        for variant in layer.kernel.variants(k):
            y = torch.empty(k, n)
            layer.run_into(torch.eye(k), y, variant)
            assert torch.equal(y, expected), variant
    finally:
        cpu_levels.cache_clear()


@pytest.mark.parametrize("level", [HERE, "x86-64-v3"])
def test_codes_that_a_group_rescales_to_bytes(level, monkeypatch):
    """All codes by all zeros by all scales, exactly: what a byte does not hold is cut off."""
    monkeypatch.setenv("QDSL_CPU_LEVEL", level)
    cpu_levels.cache_clear()
    try:
        layer, k, n = QuantLinear(qdsl.load("w4a8", act="f32"), 256, 16 * 128), 256, 16 * 128
        q = np.arange(k) % 16 * np.ones((n, 1), int)
        zeros, scales = np.divmod(np.arange(n), 128)
        z = np.stack([zeros, zeros], 1)
        r = np.stack([scales, scales - 128], 1)  # of the first and the second 128 inputs
        one = np.full(n, np.float32(1).view(np.uint32))
        layer.set_patterns(
            {"q": q.astype(np.uint8), "z": z.astype(np.uint8), "r": (r & 0xFF).astype(np.uint8), "s": one}
        )
        weight = np.clip((q - z.repeat(128, 1)) * r.repeat(128, 1), -128, 127)
        x = torch.zeros(32, k)
        x[torch.arange(32), torch.arange(16).repeat(2) + torch.tensor([0, 128]).repeat_interleave(16)] = 127
        expected = x.double().numpy() @ weight.T
        for variant in layer.kernel.variants(k):
            y = torch.empty(32, n)
            layer.run_into(x, y, variant)
            assert np.array_equal(y.double().numpy(), expected), variant
    finally:
        cpu_levels.cache_clear()


@pytest.mark.parametrize("group", [128, "k"])
def test_every_code_of_x_is_its_planes(group):
    """All upper bytes by the ends of lower ones, by all codes of weights, exactly; scales of x are 1."""
    codes = torch.arange(-127, 128)[:, None] * 256 + torch.tensor([-128, -127, -1, 0, 127])
    codes, k = codes.clamp(-32639, 32639).flatten().float(), 256
    layer, _ = layer_of("w4a16_int", k, 32, group=group)
    q = np.arange(32)[:, None] % 16 * np.ones((1, k), int)
    one = layer.scheme.tensor("s").dtype.encode(np.ones((32, 1 if group == "k" else 2)))
    layer.set_patterns({"q": q.astype(np.uint8), "s": one, "z": np.full(one.shape, 9, np.uint8)})
    x = torch.zeros(len(codes), k)
    x[:, 5], x[:, 17], x[:, 6], x[:, 133] = codes, 32639, codes, 32639
    expected = 2 * (codes[:, None] + 32639).double() * (torch.arange(32) % 16 - 9)
    for variant in layer.kernel.variants(k):
        y = torch.empty(len(codes), 32)
        layer.run_into(x, y, variant)
        assert torch.equal(y.double(), expected), variant


def test_a_scale_of_x_is_rounded_to_bfloat16():
    text = """scheme mine "x"
    weight { code q[n, k] : i8 scale s[n] : f32 w ~ q * s }
    activation { scale t[m] : bf16 = amax(abs(x)) / 127 code a[m, k] : i8 = x / t x ~ a * t }
    compute i8 -> i32
    output f32"""
    scheme, n, k = qdsl.parse(text), 16, 64
    layer = QuantLinear(scheme, k, n)
    rng = np.random.default_rng(0)
    patterns = reference.random_patterns(scheme, rng, n, k)
    layer.set_patterns(patterns)
    x = torch.from_numpy(rng.standard_normal((9, k), np.float32))
    expected = reference.linear(scheme, x.numpy(), patterns, n)
    assert (np.abs(layer(x).numpy() - expected.y) <= expected.bound).all()


@pytest.mark.parametrize("level", [HERE, "x86-64-v2"])
@pytest.mark.parametrize(
    "weight", ["scale s[n] : f32 w ~ q * s", "scale s[n, k // 64] : f32 param p[n] : f16 w ~ q * s + p"]
)
def test_no_x_gives_nothing_however_large_what_cancels(weight, level):
    """Of codes with a zero point, whose products with weights of one sign sum to more than a float32 holds exactly."""
    text = f"""scheme mine "x"
    weight {{ code q[n, k] : i8 {weight} }}
    activation {{ scale t[] : f32 zero o[] : i8 code a[m, k] : i8 = x / t + o x ~ (a - o) * t }}
    compute i8 -> i32
    output f32"""
    scheme, n, k = qdsl.parse(text), 33, 14337
    layer = QuantLinear(scheme, k, n, artifact=qdsl.compile(scheme, "cpu", (level,)))
    rng = np.random.default_rng(0)
    patterns = reference.random_patterns(scheme, rng, n, k)
    patterns |= {"q": rng.integers(90, 128, (n, k)), "o": np.array(101)}
    layer.set_patterns(patterns)
    for m in (1, 40):
        assert not layer(torch.zeros(m, k)).any(), m


@pytest.mark.parametrize(("name", "params"), [("awq4", {"act": "f32"}), ("awq4", {"act": "bf16"}), ("nf4", {})])
def test_what_is_not_finite_stays_in_its_row(name, params):
    layer, _ = layer_of(name, 256, 48, **params)
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
    for variant in layer.kernel.variants(256):
        clean, y = (torch.empty(20, 48, dtype=layer.dtype) for _ in range(2))
        layer.run_into(x, clean, variant)
        dirty = x.clone()
        dirty[3, 7], dirty[17, 200] = float("inf"), float("nan")
        layer.run_into(dirty, y, variant)
        others = [r for r in range(20) if r not in (3, 17)]
        assert torch.equal(y[others], clean[others]), variant
        assert y[17].isnan().all() and not y[3].isfinite().any(), variant


def test_the_largest_floats_are_no_infinities():
    """Rounding the first plane of x to bfloat16 would make one of the largest float32."""
    layer, patterns = layer_of("w8a16", 64, 32, act="f32")
    x = torch.zeros(40, 64)
    x[:, 5] = torch.finfo(torch.float32).max / 2**12
    right = reference.linear(layer.scheme, x.double().numpy(), patterns, 32, precision=layer.manifest.precision)
    for variant in layer.kernel.variants(64):
        y = torch.empty(40, 32)
        layer.run_into(x, y, variant)
        assert (np.abs(y.double().numpy() - right.y) <= right.bound).all(), variant
