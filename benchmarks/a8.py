"""8-bit activations on one GPU: qdsl beside its peers, in one process and with the same numbers.

    python benchmarks/a8.py --peers DIR --out FILE.json [--append] [--schemes NAME[:FAMILY],…] [--tokens M,…] [--only NAME,…]

qdsl comes from prebuilt artifacts (QDSL_ARTIFACTS) and is timed twice: `qdsl` is the product alone, of activations that have
been quantized, `qdsl_with_quantization` all that a layer does with x in 16 bits.  Peers are products alone but for those that
say otherwise.  Every output is compared with float64 of the dequantized operands before it is timed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import beside
import numpy as np
import torch
import weight_only
from beside import Contender, Run
from peers import Call, Stored
from peers_a8 import PEERS, RULES, Quantized, quantized

import qdsl
from qdsl.diagnostic import Error
from qdsl.runtime import QuantLinear
from qdsl.runtime.bench import Ceilings
from qdsl.runtime.repack import torch_dtype
from qdsl.scheme import Group, Scheme, Tensor

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # K, N
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 4096)
H200 = Ceilings(4.3e12, 1450e12, "an H200: bytes read, measured; dense 8-bit operations, in practice")
# The scheme, its parameters, and the family of peers that it is beside.
SCHEMES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("w8a8_dynamic", {}, "int8"), ("fp8_dynamic", {}, "fp8"), ("fp8_block", {}, "block"),
    ("w4a8_group", {"group": 128}, "w4a8"), ("w4a8_fp8", {}, "w4a8"),
)  # fmt: skip


# ---- numbers -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Problem(beside.Problem):
    """As beside weights alone; y is x as the scheme quantizes it times the exact weight.

    activations   x by each of the rules that contenders follow; `answers` are by rule, too
    """

    activations: Mapping[str, Quantized] = field(default_factory=dict)


def random_problem(scheme: Scheme, family: str, k: int, n: int, most: int, device: torch.device) -> Problem:
    """Random bit patterns of a scheme's weight, and x."""
    generator = torch.Generator(device).manual_seed(n * 31 + k)
    sizes = {"e": 1, "m": 1, "n": n, "k": k}
    patterns = {t.name: random_bits(t, scheme, t.shape(sizes, scheme), k, generator) for t in scheme.weight.loaded}
    stored, peers = stored_as(scheme, patterns, n, device), PEERS[family].values()
    weight = stored.weight
    x = torch.randn(most, k, device=device, generator=generator).to(torch_dtype(scheme.output.dtype))
    activations = {rule: quantized(x, RULES[rule]) for rule in {rule_of(scheme), *(p.rule for p in peers)}}
    answers = {rule: a.exact @ weight.t() for rule, a in activations.items()}
    for peer in (p for p in peers if p.answer == "codes"):
        answers["codes"] = activations[peer.rule].codes.double() @ stored.codes.view(torch.int8).double().t()
    return Problem(lambda _: patterns, stored, weight, x, answers[rule_of(scheme)], answers, activations)


def rule_of(scheme: Scheme) -> str:
    """Of a scheme's activations; raises Error for one that peers do not know."""
    tensors = {t.role: t for t in scheme.activation().operand.tensors}
    groups = [i.size for i in tensors["scale"].index if isinstance(i, Group)]
    own = tensors["code"].dtype.name, *(groups or [None])
    found = next((name for name, rule in RULES.items() if (rule.code, rule.group) == own), None)
    if found is None:
        raise Error(f"{scheme.bound}: no peer quantizes activations as it does")
    return found


def random_bits(t: Tensor, scheme: Scheme, shape: tuple[int, ...], k: int, generator: torch.Generator) -> np.ndarray:
    """Bit patterns: any codes but large floats; zero points in the middle; scales around 1/100 with the 8 bits of a bf16.

    Scales of groups of 4-bit codes are powers of two: peers round products of codes and scales to 8 bits, and so lose nothing.
    """
    if t.role == "code":
        return weight_only.random_bits(t, shape, k, generator)
    if t.role == "zero":
        return t.dtype.encode(np.full(shape, 2.0 ** (scheme.code.dtype.bits - 1)))
    if t.role != "scale":
        raise Error(f"{scheme.bound}: `{t.name}` has no counterpart here")
    random = torch.rand(shape, generator=generator, device=generator.device)
    grouped = any(isinstance(i, Group) and i.size for i in t.index)
    if scheme.code.dtype.bits == 4 and (grouped or t.dtype.is_integer):
        values = 2.0 ** ((random * 4).floor() - (0 if t.dtype.is_integer else 8))
    else:
        values = (random * 0.01 + 0.005).bfloat16()
    return t.dtype.encode(values.double().cpu().numpy())


def stored_as(scheme: Scheme, patterns: Mapping[str, np.ndarray], n: int, device: torch.device) -> Stored:
    """The weight as peers know it: the product of all its scales, codes without a sign about the middle of their range."""
    code, tensors = scheme.code.dtype, [t for t in scheme.weight.loaded if t.role == "scale"]
    scale = torch.ones((), device=device)
    for t in tensors:
        values = weight_only.decoded(t, patterns[t.name], device).float()
        scale = scale * values.reshape(len(values) if t.index else 1, -1).t()
    if not any(i.axis == "n" for t in tensors for i in t.index):
        scale = scale.expand(-1, n)
    codes = torch.from_numpy(patterns[scheme.code.name].astype(np.uint8)).to(device)
    middle, block = 2.0 ** (code.bits - 1) if code.kind == "uint" else 0.0, n // scale.shape[1]
    return Stored(code, codes, scale.contiguous(), tensors[0].dtype, constant=middle, block=block)


# ---- contenders --------------------------------------------------------------------------------------------------
def contenders(scheme: Scheme, family: str, pack: Path | None) -> list[Contender]:
    """qdsl without and with quantization, from the same layers, then the peers of the family."""
    dtype = beside.dtype_of(scheme)
    layers = functools.lru_cache(1)(lambda given: beside.layers_of(scheme, given, dtype))

    def product(given: Problem, _: torch.dtype) -> Call:
        return _alone(layers(given))

    def whole(given: Problem, _: torch.dtype) -> Call:
        return lambda x, i: layers(given)[i % len(layers(given))](x)

    ours = [Contender("qdsl", dtype, product, scheme), Contender("qdsl_with_quantization", dtype, whole, scheme)]
    theirs = [
        Contender(name, dtype, _prepare(name, family, pack), scheme, least=peer.least, answer=peer.answer or peer.rule)
        for name, peer in PEERS[family].items()
    ]
    return ours + theirs


def _alone(layers: Sequence[QuantLinear]) -> Call:
    """The last step of what layers do with x, which the first call with a number of tokens quantizes."""
    ready = {}

    def call(x: torch.Tensor, i: int) -> torch.Tensor:
        if len(x) not in ready:
            y = x.new_empty(len(x), layers[0].width)
            ready[len(x)] = layers[0].last_step(x, y), y
        step, y = ready[len(x)]
        step(layers[i % len(layers)])
        return y

    return call


def _prepare(name: str, family: str, pack: Path | None):
    peer = PEERS[family][name]

    def prepare(given: Problem, _: torch.dtype) -> Call:
        product, ready = peer.prepare(given.stored, pack), {}

        def call(x: torch.Tensor, i: int) -> torch.Tensor:
            if len(x) not in ready:
                ready[len(x)] = product(given.activations[peer.rule].first(len(x)))
            return ready[len(x)](i)

        return call

    return prepare


def named(found: Sequence[Contender], only: str | None) -> list[Contender]:
    """Those whose name is, or begins with, one of `only`."""
    wanted = None if only is None else [name.strip() for name in only.split(",")]
    return [c for c in found if wanted is None or any(c.name == w or c.name.startswith(f"{w}_") for w in wanted)]


# ---- runs --------------------------------------------------------------------------------------------------------
def chosen(names: str | None) -> list[tuple[Scheme, str]]:
    """The schemes that are measured, or those of some names, with their families.

    `NAME:FAMILY` is any other scheme, in bf16; raises Error for a name alone that is not among those measured.
    """
    known = {name: (name, params, family) for name, params, family in SCHEMES}
    wanted = list(known.values()) if names is None else []
    for text in names.split(",") if names is not None else ():
        name, colon, family = text.strip().partition(":")
        if colon and family not in PEERS:
            raise Error(f"--schemes: no family {family!r} among {', '.join(PEERS)}")
        if not colon and name not in known:
            raise Error(f"--schemes: no {name!r} among {', '.join(known)}; NAME:FAMILY is any other")
        wanted.append((name, {"act": "bf16"}, family) if colon else known[name])
    return [(qdsl.load(name, **params), family) for name, params, family in wanted]


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", metavar="NAME[:FAMILY],…", help=f"families are {', '.join(PEERS)}; by default all")
    beside.add_arguments(parser, SHAPES)
    args = parser.parse_args(argv)
    args.tokens = args.tokens or TOKENS
    beside.check_arguments(parser, args)
    return args


def side_by_side(run: Run) -> None:
    args = run.args
    schemes = chosen(args.schemes)
    every = [c for scheme, family in schemes for c in contenders(scheme, family, None)]
    for name in args.only.split(",") if args.only else ():
        if not named(every, name):
            raise Error(f"--only: no contender {name!r}; there are {', '.join(dict.fromkeys(c.name for c in every))}")
    for k, n in args.shapes:
        for scheme, family in schemes:
            if found := named(contenders(scheme, family, args.peers), args.only):
                print(f"\n{scheme.bound}", end="")
                run.shape(found, random_problem(scheme, family, k, n, max(args.tokens), run.device), "")


def main(argv: Sequence[str] | None = None) -> int:
    return beside.main(parsed(argv), side_by_side, H200)


if __name__ == "__main__":
    raise SystemExit(main())
