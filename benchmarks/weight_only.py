"""Every scheme of weights alone on one GPU: qdsl beside its peers, in one process and with the same numbers.

    python benchmarks/weight_only.py --peers DIR --out FILE.json [--append] [--schemes NAME,…] [--tokens M,…] [--only NAME,…]

qdsl comes from prebuilt artifacts (QDSL_ARTIFACTS); peers run with the schemes that they take, in the type of the scheme's
activations.  Every output is compared with float64 before it is timed (`qdsl.runtime.timing.median_us`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import beside
import numpy as np
import torch
from beside import Problem, Run
from peers import Stored

import qdsl
from qdsl.diagnostic import Error
from qdsl.expr import Binary, Expr, Item, Negate, Number, Ref
from qdsl.runtime.repack import torch_dtype
from qdsl.scheme import Extent, Gather, Group, Scheme, Tensor, Var
from qdsl.split import Split, split

SHAPES = ((4096, 14336), (8192, 8192))  # K, N
TOKENS = (1, 16, 64, 256, 2048)
LARGE = 64.0  # codes of floats are no larger: sums of larger ones could be more than an f16 holds
# awq4 comes first: its times are what the others' bytes are compared with
SCHEMES: tuple[tuple[str, dict[str, object]], ...] = (
    ("awq4", {}), ("gptq", {"bits": 2}), ("gptq", {"bits": 3}), ("gptq", {"bits": 5}), ("gptq", {"bits": 6}), ("gptq", {"bits": 8}),
    ("gptq_sym", {}), ("gptq_sym", {"bits": 8}), ("gptq_actorder", {}), ("gptq_sym_actorder", {}), ("hqq", {}), ("nf4", {}),
    ("bnb_fp4", {}), ("mxfp4", {}), ("nvfp4a16", {}), ("q4_0", {}), ("q4_1", {}), ("q8_0", {}), ("w8a16", {}), ("w8a16_group", {}),
    ("w8a16_asym", {}), ("fp8a16_tensor", {}), ("fp8a16_channel", {}), ("fp8a16_block", {}), ("mxfp8", {}),
)  # fmt: skip


# ---- numbers -----------------------------------------------------------------------------------------------------
def random_problem(scheme: Scheme, k: int, n: int, most: int, device: torch.device) -> Problem:
    """Random bit patterns of a scheme's weight, and x."""
    generator = torch.Generator(device).manual_seed(n * 31 + k)
    sizes = {"e": 1, "m": 1, "n": n, "k": k}
    patterns = {t.name: random_bits(t, t.shape(sizes, scheme), k, generator) for t in scheme.weight.loaded}
    values = {t.name: spread(t, scheme, patterns, n, k, device) for t in scheme.weight.tensors}
    weight = evaluated(scheme.weight.decode, values).expand(n, k).contiguous()
    stored = stored_as(scheme, patterns, n, k, device)
    del values
    kind = torch_dtype(scheme.output.dtype)
    x = torch.randn(most, k, device=device, generator=generator).to(kind)
    return Problem(lambda _: patterns, stored, weight, x, x.double() @ weight.t())


def random_bits(t: Tensor, shape: tuple[int, ...], k: int, generator: torch.Generator) -> np.ndarray:
    """Bit patterns: any codes but floats that are none or large, scales around 1/100, inputs in any group."""
    device = generator.device
    if t.role == "index":
        assert isinstance(t.extent, Group) and t.extent.size
        return (torch.randperm(k, generator=generator, device=device) // t.extent.size).cpu().numpy().astype(np.uint32)
    if t.role == "code" or t.dtype.is_integer:
        every = np.arange(1 << t.dtype.bits, dtype=np.uint8)
        allowed = every[np.abs(t.dtype.decode(every)) <= LARGE] if t.dtype.is_float else every
        at = torch.randint(0, len(allowed), shape, dtype=torch.int32, generator=generator, device=device)
        return torch.from_numpy(allowed).to(device)[at].cpu().numpy()
    low, high = {"scale": (0.005, 0.015), "zero": (0.0, 15.0)}.get(t.role, (-0.1, 0.1))
    return t.dtype.encode((torch.rand(shape, generator=generator, device=device) * (high - low) + low).cpu().numpy())


def decoded(t: Tensor, bits: np.ndarray, device: torch.device) -> torch.Tensor:
    """The values of bit patterns, float64."""
    if t.dtype.bits > 8:
        return torch.from_numpy(np.asarray(t.dtype.decode(bits), np.float64)).to(device)
    table = torch.from_numpy(np.asarray(t.dtype.decode(np.arange(1 << t.dtype.bits)), np.float64)).to(device)
    return table[torch.from_numpy(bits.astype(np.uint8)).to(device).int()]


def spread(
    t: Tensor, scheme: Scheme, patterns: Mapping[str, np.ndarray], n: int, k: int, device: torch.device
) -> torch.Tensor:
    """A tensor's values where they meet the codes: [N or 1, K or 1], float64; a table as it is."""
    if isinstance(t.value, tuple):
        return torch.from_numpy(np.asarray(t.dtype.round(np.array(t.value)), np.float64)).to(device)
    if t.role == "index":
        return torch.from_numpy(patterns[t.name].astype(np.int64)).to(device)
    found, axes = decoded(t, patterns[t.name], device), {"n": 0, "k": 1}
    if len(t.index) < 2:
        found = found.reshape((1, -1) if t.index and _axis(t.index[0]) == "k" else (-1, 1))
    for at, i in enumerate(t.index):
        dim = at if len(t.index) == 2 else axes[_axis(i)]
        if isinstance(i, Group) and i.size is not None:
            found = found.repeat_interleave(i.size, dim).narrow(dim, 0, (n, k)[dim])
        elif isinstance(i, Gather):
            found = found[:, torch.from_numpy(patterns[i.tensor].astype(np.int64)).to(device)]
    return found


def _axis(i: object) -> str:
    return i.axis if isinstance(i, Var | Group) else "k"


def evaluated(e: Expr, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An equation of +, -, *, / and tables, on tensors."""
    match e:
        case Number(value):
            return torch.tensor(float(value), dtype=torch.float64, device=next(iter(values.values())).device)
        case Ref(name):
            return values[name]
        case Negate(arg):
            return -evaluated(arg, values)
        case Item(name, (position,)):
            return values[name][evaluated(position, values).long()]
        case Binary(op, left, right):
            a, b = evaluated(left, values), evaluated(right, values)
            return {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}[op](a, b)
        case _:
            raise Error(f"`{e}` has no counterpart here")


def stored_as(
    scheme: Scheme, patterns: Mapping[str, np.ndarray], n: int, k: int, device: torch.device
) -> Stored | None:
    """The weight as peers know it; None for tables, offsets, gathered groups and whatever else they do not."""
    found = split(scheme.weight, scheme.compute.operand, "w")
    assert isinstance(found, Split)
    code, zero, constant, apart = scheme.code, None, 0.0, found.correction is not None
    match found.core, found.correction, found.fold:
        case Ref(name), None, _ if name == code.name:
            pass
        case Binary("-", Ref(name), Number(value)), None, _ if name == code.name:
            constant = float(value)
        case Binary("-", Ref(name), Ref(z)), None, _ if name == code.name:
            zero = scheme.tensor(z)
        case Ref(name), Binary("*", Negate(Ref(z)), Ref(s)), Ref(fold) if name == code.name and s == fold:
            zero = scheme.tensor(z)
        case _:
            return None
    factors = [scheme.tensor(e.name) for e in (found.fold, found.epilogue) if isinstance(e, Ref)]
    if len(factors) != sum(e is not None for e in (found.fold, found.epilogue)):
        return None
    scales, total = [t for t in factors if t.index], [t for t in factors if not t.index]
    if len(scales) > 1 or any(
        isinstance(i, Gather | Extent) for t in (*scales, *([zero] if zero else [])) for i in t.index
    ):
        return None
    factor = float(decoded(total[0], patterns[total[0].name], device)) if total else 1.0
    scale, kind, block = torch.ones((1, n), device=device), (total or scales)[0].dtype, 1
    if scales:
        values = decoded(scales[0], patterns[scales[0].name], device).float()
        scale, kind = values.reshape(len(values), -1).t().contiguous(), scales[0].dtype
        block = scales[0].index[0].size if isinstance(scales[0].index[0], Group) else 1
    zeros = None
    if zero is not None:
        values = decoded(zero, patterns[zero.name], device).float()
        zeros = values.reshape(len(values), -1).t().contiguous()
    codes = torch.from_numpy(patterns[code.name].astype(np.uint8)).to(device)
    return Stored(code.dtype, codes, scale, kind, zeros, apart, constant, factor, block)


# ---- runs --------------------------------------------------------------------------------------------------------
def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", metavar="NAME,…", help="shipped schemes of weights alone; by default all")
    beside.add_arguments(parser, SHAPES)
    args = parser.parse_args(argv)
    args.tokens = args.tokens or TOKENS
    beside.check_arguments(parser, args)
    return args


def chosen(names: str | None) -> list[Scheme]:
    """The schemes that are measured, or those of some names; raises Error for a name that is not among them."""
    wanted = None if names is None else [name.strip() for name in names.split(",")]
    known = list(dict.fromkeys(name for name, _ in SCHEMES))
    if wanted and (unknown := [name for name in wanted if name not in known]):
        raise Error(f"--schemes: no {unknown[0]!r} among {', '.join(known)}")
    return [qdsl.load(name, **params) for name, params in SCHEMES if wanted is None or name in wanted]


def side_by_side(run: Run) -> None:
    args = run.args
    for k, n in args.shapes:
        for scheme in chosen(args.schemes):
            ours = beside.qdsl_with(scheme)
            found = [ours, beside.dense_of(scheme, ours.dtype), *beside.peers_of(scheme, (ours.dtype,))]
            found = beside.chosen(found, args.only)
            missing = beside.missing_pack(found, args.peers)
            print(f"\n{scheme.bound}", end="")
            run.shape(found, random_problem(scheme, k, n, max(args.tokens), run.device), missing)


def main(argv: Sequence[str] | None = None) -> int:
    return beside.main(parsed(argv), side_by_side)


if __name__ == "__main__":
    raise SystemExit(main())
