"""Schemes that nobody has thought of: any declaration of the language's parts, from a seed."""

from __future__ import annotations

import random

CODES = (
    *(f"u{b}" for b in range(1, 9)),
    *(f"i{b}" for b in range(2, 9)),
    "e4m3",
    "e5m2",
    "e3m2",
    "e2m3",
    "e2m1",
    "e3m4",
)
SCALES = ("f16", "bf16", "f32", "f32", "e4m3", "e5m2", "e8m0")
GROUPS = (8, 16, 20, 32, 40, 48, 64, 96, 128)
ACTS = ("f16", "bf16", "f32")


def declaration(seed: int) -> str:
    """The text of a scheme: weights and, half of the time, quantized activations, with an epilogue."""
    rng = random.Random(seed)
    act = rng.choice(ACTS)
    quantized = rng.random() < 0.5
    weight, code = _weight(rng, quantized)
    parts = [f"scheme s{seed}", weight]
    compute = f"{act} -> f32"
    if quantized:
        kind = _operand(rng, code)
        parts.append(_activation(rng, kind))
        compute = f"{kind} -> {'f32' if kind.startswith('e') else 'i32'}"
        if rng.random() < 0.2:
            compute = rng.choice((f"{act} -> f32", "f16 -> f32", "f32 -> f32"))
    parts.append(f"compute {compute}")
    parts.append(_output(rng, act))
    return "\n\n".join(parts) + "\n"


def _operand(rng: random.Random, code: str) -> str:
    if code.startswith("e"):
        return rng.choice((code, "e4m3", "e5m2"))
    return rng.choice(("i8", "i8", "i8", "i4", "e4m3")) if int(code[1:]) <= 4 else "i8"


def _index(rng: random.Random) -> str:
    """What a scale of the weight is of."""
    group = rng.choice(GROUPS)
    return rng.choice(
        ("", "n", "n", f"n, k // {group}", f"n, k // {group}", f"n // {rng.choice((16, 32, 48, 128))}, k // {group}")
    )


def _weight(rng: random.Random, quantized: bool) -> tuple[str, str]:
    code = rng.choice(
        CODES if not quantized else ("u4", "i4", "i4", "i8", "i8", "i8", "u8", "u3", "i5", "e4m3", "e5m2", "e2m1")
    )
    lines, first, index, bits = [f"code q[n, k] : {code}"], "q", _index(rng), code[1:]
    ordered = not quantized and rng.random() < 0.15
    if ordered:
        lines.append(f"index g[k] : idx(k // {rng.choice(GROUPS)})")
        index = "n, g"
    if code.startswith("u") and rng.random() < 0.25:
        numbers = ", ".join(f"{rng.uniform(-1, 1):.3f}" for _ in range(1 << int(bits)))
        lines.append(f"table c[{1 << int(bits)}] : f32 = {{ {numbers} }}")
        first = "c[q]"
    scale = rng.choice(SCALES if index else ("f32", "bf16"))
    lines.append(f"scale s[{index}] : {scale}")
    core = first
    zero = rng.random()
    if first == "q" and not code.startswith("e"):
        if zero < 0.25:
            core = f"(q - {rng.randrange(1 << min(int(bits), 7))})"
        elif zero < 0.5:
            lines.append(f"zero z[{index}] : {rng.choice((code, f'u{min(8, int(bits) + 1)}', 'i8'))}")
            core = "(q - z)"
        elif zero < 0.6:
            lines.append(f"zero z[{index}] : {rng.choice(('f16', 'bf16', 'f32'))}")
            core = "(q - z)"
    if code in ("u4", "i4") and core in ("q", "(q - z)") and not ordered and rng.random() < 0.3:
        lines.append(f"scale u[n, k // {rng.choice((32, 128, 256))}] : {rng.choice(('i8', 'u4'))}")
        core = f"i8({core} * u)"
    decoded = f"{core} * s"
    if rng.random() < 0.2:
        lines.append(f"scale r[{rng.choice(('', 'n'))}] : f32")
        decoded += " * r"
    if rng.random() < 0.12:
        lines.append(f"param p[{index}] : {rng.choice(('f16', 'f32'))}")
        decoded += rng.choice((" + p", " - p"))
    return "weight {\n    " + "\n    ".join([*lines, f"w ~ {decoded}"]) + "\n}", code


def _activation(rng: random.Random, kind: str) -> str:
    most = {"i8": "127", "i4": "7"}.get(kind, f"max({kind})")
    index = rng.choice(("m", "m", "m", "", f"m, k // {rng.choice((16, 32, 64, 128))}"))
    scale = rng.choice(("f32", "f32", "f32", "bf16", "e8m0" if "k" in index else "f32"))
    if index == "" and rng.random() < 0.6:
        lines = ["scale t[] : f32", f"code a[m, k] : {kind} = x / t", "x ~ a * t"]
        if kind == "i8" and rng.random() < 0.5:
            lines = [
                "scale t[] : f32",
                f"zero o[] : {rng.choice(('i8', 'f32'))}",
                "code a[m, k] : i8 = x / t + o",
                "x ~ (a - o) * t",
            ]
    elif kind == "i8" and index in ("m", "") and rng.random() < 0.3:
        lines = [
            f"scale t[{index}] : f32 = (max(amax(x), 0) - min(amin(x), 0)) / 255",
            f"zero o[{index}] : i8 = -128 - min(amin(x), 0) / t",
            "code a[m, k] : i8 = x / t + o",
            "x ~ (a - o) * t",
        ]
    else:
        lines = [f"scale t[{index}] : {scale} = amax(abs(x)) / {most}", f"code a[m, k] : {kind} = x / t", "x ~ a * t"]
    return "activation {\n    " + "\n    ".join(lines) + "\n}"


def _output(rng: random.Random, act: str) -> str:
    value, lines = "acc", []
    if rng.random() < 0.12:
        gate = rng.choice(("relu", "gelu", "silu"))
        return f"output {act} {{\n    half n = (r:2 j)\n    y[m, j] = {gate}(acc[r = 0]) * acc[r = 1]\n}}"
    if rng.random() < 0.6:
        lines.append(f"bias b[n] : {rng.choice((act, 'f32'))}{rng.choice(('', ' optional'))}")
        value = "acc + b"
    if rng.random() < 0.3:
        value = f"{rng.choice(('relu', 'gelu', 'silu'))}({value})"
    if rng.random() < 0.1:
        lines.append(f"residual r0[m, n] : {act}")
        value = f"{value} + r0"
    if value == "acc":
        return f"output {act}"
    return f"output {act} {{\n    " + "\n    ".join([*lines, f"y = {value}"]) + "\n}"
