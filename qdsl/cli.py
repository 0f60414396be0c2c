"""The `qdsl` command.  Argument parsing and printing only; the work is elsewhere.

Exit codes: 0 all well, 1 the input is wrong or a check failed, 2 the command line is wrong, 70 a bug of ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import qdsl
from qdsl.artifact import MANIFEST, with_table
from qdsl.choice import TOKENS
from qdsl.diagnostic import Error, SchemeError, Source

TUNED = (  # K, N
    (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672), (4096, 6144), (4096, 28672), (2048, 2048),
)  # fmt: skip
STAGES = ("syntax", "scheme", "plan", "tir", "source")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    except Error as problem:
        print(problem if isinstance(problem, SchemeError) else f"error: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        where = f"{problem.filename}: {problem.strerror}" if problem.filename and problem.strerror else problem
        print(f"error: {where}", file=sys.stderr)
        return 1
    except Exception:
        return _bug(argv)


def _bug(argv: Sequence[str] | None) -> int:
    """An exception that is not the user's: keep what is needed to reproduce it, say so in three lines."""
    directory = Path(tempfile.mkdtemp(prefix="qdsl-bug-"))
    command = "qdsl " + " ".join(argv if argv is not None else sys.argv[1:])
    (directory / "report.txt").write_text(f"{command}\n\n{traceback.format_exc()}")
    last = traceback.format_exc().strip().splitlines()[-1]
    print(f"internal error: {last}\nThis is a bug in qdsl. {directory}/report.txt has the details; "
          f"QDSL_DUMP={directory} {command} adds every stage.", file=sys.stderr)  # fmt: skip
    return 70


# ---- the command line --------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qdsl", description="Quantization schemes in, kernels out.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    p = command("compile", _compile, "compile a scheme to an artifact")
    _scheme_argument(p)
    _target_arguments(p)
    p.add_argument("-o", "--out", metavar="DIR", help="also copy the artifact here (default: only the cache holds it)")
    p.add_argument("--emit", choices=STAGES, metavar="STAGE", help=f"print one stage instead: {', '.join(STAGES)}")
    p.add_argument("--json", action="store_true", help="print the manifest")

    p = command("check", _check, "report every mistake in scheme files")
    p.add_argument("schemes", nargs="+", metavar="SCHEME", help="a .q file or a shipped scheme's name")
    p.add_argument("--json", action="store_true", help="print diagnostics as JSON")

    p = command("fmt", _fmt, "rewrite scheme files in canonical form")
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--check", action="store_true", help="change nothing; fail if a file is not in canonical form")

    p = command("list", _list, "list shipped schemes and targets")
    p.add_argument("--json", action="store_true")

    p = command("show", _show, "explain a scheme or an artifact")
    p.add_argument("scheme", metavar="SCHEME|DIR", help="a .q file, a shipped name, or an artifact directory")
    _param_argument(p)
    p.add_argument("--json", action="store_true", help="print an artifact's manifest")

    p = command("inspect", _inspect, "show what a checkpoint holds, module by module, without loading it")
    p.add_argument("checkpoint", type=Path, metavar="CKPT", help="a directory with config and safetensors")
    p.add_argument("--json", action="store_true", help="print the table as JSON")

    p = command("convert", _convert, "repack a checkpoint for a target's kernels, once")
    p.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a directory with config and safetensors, or a GGUF file"
    )
    p.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="the directory to make; while it is not "
                   "whole it is called OUT.partial, and the same command goes on with it")  # fmt: skip
    p.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("-arch", "--arch", metavar="ARCH", help="sm_80, sm_90a, x86-64-v3, … (default: of this machine)")
    p.add_argument("--phase", default="", metavar="NAME", help="of schemes that have several (default: the first)")
    p.add_argument("--scheme", metavar="SCHEME", help="of a checkpoint of floats: a .q file or a shipped scheme's name")
    _param_argument(p)
    _skip_argument(p)

    p = command("quantize", _quantize, "quantize a checkpoint of floats by a scheme's `quantize` block")
    p.add_argument("checkpoint", type=Path, metavar="MODEL", help="a directory with config.json and safetensors")
    p.add_argument("--scheme", required=True, metavar="SCHEME", help="a .q file or a shipped scheme's name")
    _param_argument(p)
    p.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="the directory to make; while it is not "
                   "whole it is called OUT.partial, and the same command goes on with it")  # fmt: skip
    p.add_argument("--layout", metavar="NAME", help="of the scheme (default: its first that other readers know)")
    _skip_argument(p)

    p = command("verify", _verify, "run compiled kernels against the float64 reference")
    p.add_argument("schemes", nargs="+", metavar="SCHEME", help="a .q file or a shipped scheme's name")
    _param_argument(p)
    _target_arguments(p)
    p.add_argument("--seed", type=int, default=0, help="of the random data (default 0)")
    p.add_argument("--json", action="store_true", help="print one record a scheme")

    p = command("bench", _bench, "measure compiled kernels beside torch's dense product")
    _scheme_argument(p)
    _target_arguments(p)
    p.add_argument("--shapes", type=shapes, default=((4096, 4096),), metavar="KxN,…", help="default 4096x4096")
    p.add_argument("--m", dest="tokens", type=tokens, default=(1, 16, 64), metavar="M,…", help="default 1,16,64")
    p.add_argument("--phase", default="", metavar="NAME", help="of a scheme that has several (default: the first)")
    p.add_argument("--bandwidth", type=_positive, metavar="GB/s", help="of the floor (default: measured here)")
    p.add_argument("--flops", type=_positive, metavar="TFLOP/s", help="of the floor (default: measured here)")
    p.add_argument("--json", action="store_true", help="print the results file instead of a table")
    p.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and floor over M, a panel a shape")

    p = command("tune", _tune, "time every kernel of artifacts on this GPU and keep the best choice")
    p.add_argument("subjects", nargs="+", metavar="DIR|SCHEME", help="an artifact, a folder of them, or a scheme")
    _param_argument(p)
    p.add_argument("--target", choices=("cuda",), default="cuda", help="a CPU has one kernel a scheme")
    usual = ",".join(f"{k}x{n}" for k, n in TUNED)
    p.add_argument("--shapes", type=shapes, default=TUNED, metavar="KxN,…", help=f"default {usual}")
    p.add_argument("--m", dest="tokens", type=tokens, default=TOKENS, metavar="M,…",
                   help=f"and {TOKENS[-1]}; default {','.join(map(str, TOKENS))}")  # fmt: skip
    p.add_argument(
        "--out", type=Path, metavar="FILE.json", help="also keep the tables in this file, beside what it has"
    )
    p.add_argument("--json", action="store_true", help="print every time that was measured")
    return parser


def _scheme_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("scheme", metavar="SCHEME", help="a .q file or a shipped scheme's name")
    _param_argument(p)


def _param_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("-P", dest="params", action="append", default=[], metavar="NAME=VALUE", type=_assignment,
                   help="set a parameter of the scheme, e.g. -P bits=3 -P act=bf16; may be repeated")  # fmt: skip


def _skip_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("--skip", type=_names, metavar="NAME,…", help="linear layers that stay floats, by their names, the last "
                   "parts of these, or modules around them (default: the head)")  # fmt: skip


def _names(text: str) -> list[str]:
    """`lm_head,down_proj` as names; no text, no names."""
    return [name for name in text.split(",") if name]


def _target_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("-arch", "--arch", dest="archs", action="append", default=[], metavar="ARCH",
                   help="sm_80, sm_90a, x86-64-v3, …; may be repeated, one artifact holds them all")  # fmt: skip


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """`4096x14336,8192x8192` as (K, N) pairs."""
    found = []
    for at, part in enumerate(text.split(","), 1):
        size = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", part.strip())
        if size is None:
            raise argparse.ArgumentTypeError(f"item {at} of {text!r} is {part!r}, not KxN; write 4096x14336,8192x8192")
        found.append((int(size[1]), int(size[2])))
    return tuple(dict.fromkeys(found))


def tokens(text: str) -> tuple[int, ...]:
    """`1,16,64` as numbers."""
    found = []
    for at, part in enumerate(text.split(","), 1):
        if re.fullmatch(r"[1-9][0-9]{0,8}", part.strip()) is None:
            raise argparse.ArgumentTypeError(
                f"item {at} of {text!r} is {part!r}, not a number of tokens; write 1,16,64"
            )
        found.append(int(part))
    return tuple(dict.fromkeys(found))


def _positive(text: str) -> float:
    if re.fullmatch(r"[0-9]*\.?[0-9]+(e[0-9]+)?", text) is None or not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return float(text)


# ---- verbs -------------------------------------------------------------------------------------------------------
def _compile(args: argparse.Namespace) -> int:
    if args.emit and (args.out or args.json):
        raise Error("--emit prints a stage and makes no artifact: leave out -o and --json")
    if args.emit == "syntax":
        from qdsl.syntax import parse

        print(parse(qdsl.source(args.scheme)))
        return 0
    scheme = qdsl.load(args.scheme, **dict(args.params))
    if args.emit == "scheme":
        print(_describe(scheme))
        return 0
    if args.emit:
        from qdsl.codegen.target import default_archs, target

        for arch in args.archs or default_archs(args.target)[:1]:
            target(args.target, arch)
            from qdsl.codegen.pipeline import emit

            print(emit(scheme, args.target, arch, args.emit))
        return 0
    artifact = qdsl.compile(scheme, args.target, args.archs, out=args.out)
    print(artifact.manifest.to_json() if args.json else f"{artifact}\n{artifact.path}")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise Error(f"{path}: not a readable text file ({problem})") from None


def _check(args: argparse.Namespace) -> int:
    failed, found = 0, []
    for name in args.schemes:
        try:
            scheme = qdsl.load(name)
            if not args.json:
                print(f"{name}: ok, {scheme.bits_per_weight():.4g} bits per weight")
        except SchemeError as problem:
            failed = 1
            if args.json:
                found += [_as_json(d) for d in problem.diagnostics]
            else:
                print(problem, file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=1))
    return failed


def _as_json(d) -> dict:
    place = {}
    if d.span is not None:
        line, column = d.span.source.position(d.span.start)
        place = {"file": d.span.source.path, "line": line, "column": column}
    return {
        "severity": d.severity,
        "id": d.id,
        "message": d.message,
        "label": d.label,
        "notes": list(d.notes),
        "fix": d.fix,
        **place,
    }


def _fmt(args: argparse.Namespace) -> int:
    from qdsl.printer import print_file
    from qdsl.syntax import parse

    status = 0
    for name in args.files:
        path = Path(name)
        text = _read(path)
        formatted = print_file(parse(Source(name, text)))
        if formatted == text:
            continue
        if args.check:
            print(f"{name}: not in canonical form; run `qdsl fmt {name}`", file=sys.stderr)
            status = 1
        else:
            _replace(path.resolve(), formatted)
            print(f"{name}: formatted")
    return status


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the permissions it had, if it was there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _list(args: argparse.Namespace) -> int:
    from qdsl.codegen.target import CPU_LEVELS, GPUS

    schemes = {name: qdsl.load(name) for name in qdsl.shipped()}
    if args.json:
        rows = {
            n: {"doc": s.doc, "params": [*s.params], "layouts": [*s.layouts], "phases": [*s.phases]}
            for n, s in schemes.items()
        }
        print(json.dumps({"schemes": rows, "targets": {"cpu": CPU_LEVELS, "cuda": GPUS}}, indent=1))
        return 0
    width = max(map(len, schemes))
    print("schemes")
    for name, scheme in schemes.items():
        print(f"  {name.ljust(width)}  {scheme.doc}")
        phases = f"; phases: {', '.join(scheme.phases)}" if scheme.phases else ""
        print(f"  {' ' * width}  {scheme.bound}; layouts: {', '.join(scheme.layouts) or 'none'}{phases}")
    print(f"targets\n  cpu   {', '.join(CPU_LEVELS)}\n  cuda  {', '.join(GPUS)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    if Path(args.scheme).is_dir():
        artifact = qdsl.open_artifact(args.scheme)
        print(artifact.manifest.to_json() if args.json else artifact)
        return 0
    print(_describe(qdsl.load(args.scheme, **dict(args.params))))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from qdsl.runtime.inspection import inspect

    found = inspect(args.checkpoint)
    print(found.to_json() if args.json else found)
    return 1 if found.problems else 0


def _convert(args: argparse.Namespace) -> int:
    from qdsl.codegen.target import target

    if args.arch:
        target(args.target, args.arch)  # what is wrong here should not wait for torch
    if args.params and not args.scheme:
        raise Error("-P sets a parameter of a scheme: give --scheme, which quantizes a checkpoint of floats")
    scheme = qdsl.load(args.scheme, **dict(args.params)) if args.scheme else None
    from qdsl.runtime.conversion import convert
    from qdsl.runtime.writing import give_memory_back

    give_memory_back()
    target_ = {"kind": args.target, "arch": args.arch, "phase": args.phase}
    print(convert(args.checkpoint, args.out, **target_, scheme=scheme, skip=args.skip))
    return 0


def _quantize(args: argparse.Namespace) -> int:
    scheme = qdsl.load(args.scheme, **dict(args.params))  # what is wrong here should not wait for torch
    from qdsl.runtime.quantization import quantize
    from qdsl.runtime.writing import give_memory_back

    give_memory_back()
    print(quantize(args.checkpoint, args.out, scheme, layout=args.layout, skip=args.skip))
    return 0


def _describe(scheme: qdsl.Scheme) -> str:
    from qdsl.split import split

    lines = [f"{scheme.bound}: {scheme.doc}", f"  {scheme.bits_per_weight():.4g} bits per weight at 4096 x 4096"]
    phases = {a: f"  ({a.name})" if a.name else "" for a in scheme.activations}
    of_x = [f"  {t}{phase}" for a, phase in phases.items() for t in a.operand.tensors]
    lines += ["tensors", *(f"  {t}" for t in scheme.weight.tensors), *of_x, *(f"  {t}" for t in scheme.output.tensors)]
    lines += ["equations", f"  w ~ {scheme.weight.decode}"]
    for a, phase in phases.items():
        lines += [f"  {t}{phase}" for t in a.transforms]
        lines.append(f"  x ~ {a.operand.decode}{phase}")
    lines += [f"  y = {scheme.output.value}", f"compute {scheme.compute.operand} -> {scheme.compute.accumulator}"]
    lines.append(f"  w: {split(scheme.weight, scheme.compute.operand, 'w')}")
    for a in phases:
        lines.append(f"  x{a.name and f' ({a.name})'}: {split(a.operand, scheme.compute.operand, 'x')}")
    for storage in scheme.layouts.values():
        lines.append(f"layout {storage.name}")
        lines += [f'  {b.tensor}{b.layout} from "{b.source}" ({b.stored})' for b in storage.bindings]
    return "\n".join(lines)


def _verify(args: argparse.Namespace) -> int:
    from qdsl.codegen.target import target

    schemes = [qdsl.load(name, **dict(args.params)) for name in args.schemes]
    for arch in args.archs:
        target(args.target, arch)  # what is wrong here should not wait for torch
    from qdsl.runtime.verify import verify

    failed, records = 0, []
    for scheme, arch in itertools.product(schemes, args.archs or (None,)):
        report = verify(scheme, args.target, arch, seed=args.seed)
        failed |= not report.passed
        records.append(report.as_json())
        if not args.json:
            print(report, flush=True)
    if args.json:
        print(json.dumps(records, indent=1))
    return int(failed)


def _bench(args: argparse.Namespace) -> int:
    from qdsl import plot, results
    from qdsl.codegen.target import target

    scheme = qdsl.load(args.scheme, **dict(args.params))
    for arch in args.archs:
        target(args.target, arch)
    if args.out:
        results.writable(args.out)
    if args.plot:
        plot.require(args.plot)
    from qdsl.runtime.bench import HEADER, Bench

    bandwidth = args.bandwidth and args.bandwidth * 1e9
    operations = args.flops and args.flops * 1e12
    bench = Bench(scheme, args.target, args.archs, args.shapes, args.tokens, bandwidth, operations, args.phase)
    if not args.json:
        print(f"{bench}\n{HEADER}", flush=True)
    rows = []
    for row in bench.rows():
        rows.append(row)
        if not args.json:
            print(row, flush=True)
    found = bench.as_results(rows)
    if args.json:
        print(found.to_json(), end="")
    if args.out:
        results.write(args.out, found)
    if args.plot:
        plot.draw(found, args.plot)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from qdsl.choice import tables_from_json, tables_to_json

    found = [part for name in args.subjects for part in _tunable(name, dict(args.params))]
    kept = {}
    if args.out and args.out.exists():
        try:
            kept = {table.key: table for table in tables_from_json(_read(args.out))}
        except (KeyError, TypeError, ValueError) as problem:
            raise Error(f"{args.out}: not a file of tables ({problem}); remove it or choose another") from None
    elif args.out and not args.out.absolute().parent.is_dir():
        raise Error(f"{args.out}: there is no directory {args.out.parent}")
    from qdsl.runtime.tune import require_gpu, tune

    def report(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    records, arch = [], None
    for tuned in tune(found, require_gpu(), args.shapes, args.tokens, report):
        report("")
        records.append(tuned.as_json())
        if tuned.table is not None:
            if args.out and arch not in (None, tuned.arch):
                raise Error(f"{args.out} is of one architecture; {tuned.artifact.path} is for {tuned.arch}, not {arch}")
            arch, kept[tuned.table.key] = tuned.arch, tuned.table
            if args.out:
                _replace(args.out, tables_to_json(list(kept.values())))
            # as it is now: the tables of other phases may be new
            with_table(qdsl.open_artifact(tuned.artifact.path), tuned.arch, tuned.table, tuned.phase)
        if not args.json:
            print(tuned, flush=True)
    if args.json:
        print(json.dumps(records, indent=1))
    return 0


def _tunable(name: str, params: dict[str, str]) -> list[qdsl.Artifact | qdsl.Scheme]:
    """An artifact, the artifacts of a folder, or a scheme."""
    path = Path(name)
    if not path.is_dir():
        return [qdsl.load(name, **params)]
    inside = [path] if (path / MANIFEST).is_file() else sorted(p.parent for p in path.glob(f"*/{MANIFEST}"))
    if params:
        raise Error(f"{name}: a compiled artifact has its parameters; leave out -P, or name a scheme")
    if not inside:
        raise Error(f"{name}: neither an artifact nor a folder of them; `qdsl compile` makes one")
    return [artifact for artifact in map(qdsl.open_artifact, inside) if _is_for_gpus(artifact)]


def _is_for_gpus(artifact: qdsl.Artifact) -> bool:
    return artifact.manifest.kind == "cuda"


if __name__ == "__main__":
    sys.exit(main())
