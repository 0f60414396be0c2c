"""The command line: every verb, every kind of bad input, exit codes; one clear error and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdsl import cli
from qdsl.codegen import target

ROOT = Path(__file__).parent.parent
VERBS = ("compile", "check", "fmt", "list", "show", "verify", "bench")
GOOD = """\
scheme tiny
    "Bytes and one scale per channel."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

compute f32 -> f32
output f32

layout plain {
    q = "weight" : i8
    s = "scale"  : f32
}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path_factory.mktemp("cache")))
    levels = target.default_archs("cpu")[:1]  # all of them are compiled in test_new_scheme.py
    monkeypatch.setattr(target, "default_archs", lambda kind: ("sm_80",) if kind == "cuda" else levels)


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.q"
    file.write_text(GOOD)
    return file


@pytest.fixture
def failing(capsys):
    """Run a command that must fail with one error and print nothing that looks like a bug; the error's text."""

    def run(*argv: object, code: int = 1) -> str:
        assert cli.main([str(a) for a in argv]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err and "internal error" not in err
        assert err.count("error") >= 1 and err.strip(), err
        return err

    return run


def usage(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


# ---- verbs -------------------------------------------------------------------------------------------------------
def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {verb} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert (text.startswith(f"usage: qdsl {verb}") and "--json" in text) or verb == "fmt"


def test_check_says_what_is_well_and_what_is_not(tiny, tmp_path, capsys):
    assert cli.main(["check", str(tiny), "awq4"]) == 0
    assert capsys.readouterr().out == f"{tiny}: ok, 8.008 bits per weight\nawq4: ok, 4.156 bits per weight\n"
    wrong = tmp_path / "wrong.q"
    wrong.write_text(GOOD.replace(": i8\n    scale", ": i9\n    scale").replace("s[n]", "s[j]"))
    assert cli.main(["check", str(wrong), str(tiny)]) == 1
    out, err = capsys.readouterr()
    assert f"{tiny}: ok" in out, "a wrong file does not hide the next one"
    assert err.count("error[") == 2


def test_check_as_json(tiny, tmp_path, capsys):
    assert cli.main(["check", "--json", str(tiny)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    wrong = tmp_path / "wrong.q"
    wrong.write_text(GOOD.replace("code ", "codes"))
    assert cli.main(["check", "--json", str(wrong)]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["file"], found["line"], found["column"]) == ("unknown-declaration", str(wrong), 5, 5)


def test_fmt_rewrites_and_check_only_looks(tiny, capsys):
    ragged = GOOD.replace("code  q[n, k] :", "code q[n,k]:")
    tiny.write_text(ragged)
    assert cli.main(["fmt", "--check", str(tiny)]) == 1
    assert tiny.read_text() == ragged
    assert "not in canonical form" in capsys.readouterr().err
    assert cli.main(["fmt", str(tiny)]) == 0
    assert tiny.read_text() == GOOD
    assert cli.main(["fmt", "--check", str(tiny)]) == 0


def test_fmt_replaces_a_file_whole_or_not_at_all(tiny, monkeypatch, failing):
    ragged = GOOD.replace("code  q", "code q")
    tiny.write_text(ragged)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space left" in failing("fmt", tiny)
    assert tiny.read_text() == ragged
    assert [f.name for f in tiny.parent.iterdir()] == ["tiny.q"], "nothing is left beside it"


def test_fmt_keeps_a_files_permissions(tiny):
    tiny.write_text(GOOD.replace("code  q", "code q"))
    tiny.chmod(0o640)
    assert cli.main(["fmt", str(tiny)]) == 0
    assert tiny.stat().st_mode & 0o777 == 0o640


def test_fmt_writes_through_a_link(tiny, tmp_path):
    tiny.write_text(GOOD.replace("code  q", "code q"))
    link = tmp_path / "link.q"
    link.symlink_to(tiny)
    assert cli.main(["fmt", str(link)]) == 0
    assert link.is_symlink() and tiny.read_text() == GOOD


def test_list_names_schemes_and_targets(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert "awq4" in text and "sm_90a" in text and "x86-64-v3" in text
    assert cli.main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schemes"]["awq4"]["layouts"] and "sm_80" in found["targets"]["cuda"]


def test_show_explains_schemes_and_artifacts(tiny, tmp_path, capsys):
    assert cli.main(["show", "gptq", "-P", "bits=3", "-P", "group=64"]) == 0
    assert capsys.readouterr().out.startswith("gptq(bits=3, group=64")
    assert cli.main(["compile", str(tiny), "-o", str(tmp_path / "out")]) == 0
    compiled = capsys.readouterr().out
    assert compiled.startswith("tiny() for cpu") or compiled.startswith("tiny for cpu")
    assert cli.main(["show", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out in compiled
    assert cli.main(["show", "--json", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "tiny"


def test_compile_prints_each_stage(tiny, capsys):
    for stage, word in [("syntax", "Weight("), ("scheme", "8.008 bits"), ("plan", "plan of tiny"), ("tir", "def "),
                        ("source", "define ")]:  # fmt: skip
        assert cli.main(["compile", str(tiny), "--emit", stage]) == 0
        assert word in capsys.readouterr().out, stage


def test_both_spellings_of_arch(tiny, capsys):
    for arch in (["-arch=sm_80"], ["--arch", "sm_80"], ["-arch", "sm_80"], ["--arch=sm_80"]):
        assert cli.main(["compile", str(tiny), "--target", "cuda", *arch, "--emit", "plan"]) == 0
        assert "for cuda sm_80" in capsys.readouterr().out


def test_compile_as_json_is_the_manifest(tiny, capsys):
    assert cli.main(["compile", str(tiny), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "cpu"


def test_verify_reports_and_fails_when_a_kernel_is_wrong(tiny, capsys, monkeypatch):
    assert cli.main(["verify", str(tiny)]) == 0
    assert ": ok, " in capsys.readouterr().out
    assert cli.main(["verify", str(tiny), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["passed"] is True
    from qdsl import reference

    right = reference.linear

    def shifted(*args, **kwargs):
        result = right(*args, **kwargs)
        return type(result)(result.y + 1.0, result.bound)

    monkeypatch.setattr(reference, "linear", shifted)
    assert cli.main(["verify", str(tiny)]) == 1
    assert "WRONG" in capsys.readouterr().out


# ---- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", ["compile", "check", "fmt", "show", "verify", "bench"])
def test_a_missing_file(verb, tmp_path, failing):
    assert "absent.q" in failing(verb, tmp_path / "absent.q")


@pytest.mark.parametrize("verb", ["compile", "check", "fmt", "show", "verify", "bench"])
def test_a_directory_that_is_no_artifact(verb, tmp_path, failing):
    assert str(tmp_path) in failing(verb, tmp_path)


@pytest.mark.parametrize("verb", ["compile", "check", "fmt", "show", "verify", "bench"])
@pytest.mark.parametrize("data", [b"\xff\xfe\x00garbage\x80", b"\0" * 64, b"\x7fELF\x02\x01\x01", b"", b"scheme"])
def test_a_file_that_is_no_scheme(verb, data, tmp_path, failing):
    file = tmp_path / "binary.q"
    file.write_bytes(data)
    assert "binary.q" in failing(verb, file)


@pytest.mark.parametrize("verb", ["compile", "check", "show", "verify", "bench"])
def test_an_unknown_scheme(verb, failing):
    assert "did you mean `awq4`?" in failing(verb, "awq5")


def test_a_stage_is_no_artifact(failing, tmp_path):
    for option in (("-o", tmp_path / "out"), ("--json",)):
        assert "leave out -o and --json" in failing("compile", "awq4", "--emit", "plan", *option)


def test_numbers_that_are_too_large(failing):
    assert "whole numbers have at most 18 digits" in failing("compile", "awq4", "-P", "group=99999999999999999999")


def test_an_unknown_scheme_in_compile_emit_syntax(failing):
    assert "did you mean `awq4`?" in failing("compile", "awq5", "--emit", "syntax")


@pytest.mark.parametrize(("setting", "words"), [("bit=3", "bits"), ("bits=17", "bits"), ("bits=three", "bits"),
                                                ("group=0", "group"), ("act=f12", "act")])  # fmt: skip
def test_a_wrong_parameter(setting, words, failing):
    assert words in failing("show", "gptq", "-P", setting)


@pytest.mark.parametrize("setting", ["bits", "bits=", "=3"])
def test_a_parameter_that_is_no_assignment(setting, capsys):
    assert "is not NAME=VALUE" in usage(capsys, "show", "gptq", "-P", setting)


def test_usage_errors(capsys):
    assert "COMMAND" in usage(capsys)
    assert "invalid choice" in usage(capsys, "compil", "awq4")
    assert "invalid choice" in usage(capsys, "compile", "awq4", "--target", "metal")
    assert "invalid choice" in usage(capsys, "compile", "awq4", "--emit", "ptx")


@pytest.mark.parametrize(("target", "arch", "words"), [("cuda", "sm_99", "unknown CUDA architecture `sm_99`"),
                                                       ("cuda", "sm_70", "too old"), ("cuda", "x86-64-v3", "sm_80"),
                                                       ("cpu", "x86-64-v9", "did you mean"), ("cpu", "sm_80", "x86-64-v3")])  # fmt: skip
@pytest.mark.parametrize("verb", ["compile", "verify", "bench"])
def test_an_unknown_architecture(verb, target, arch, words, failing):
    assert words in failing(verb, "awq4", "--target", target, "--arch", arch)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_compiler(target, tiny, monkeypatch, tmp_path, failing):
    from qdsl import cache

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("QDSL_NVCC", raising=False)
    monkeypatch.setattr(cache.metadata, "files", lambda _: None)
    assert {"cpu": "g++", "cuda": "nvcc"}[target] in failing("compile", tiny, "--target", target)
    assert not [p for p in cache.directory().glob("*tiny*") if p.is_dir()], "a failed build leaves nothing"


def test_a_chosen_nvcc_that_is_not_there(tiny, monkeypatch, failing):
    monkeypatch.setenv("QDSL_NVCC", "/nowhere/nvcc")
    assert "/nowhere/nvcc" in failing("compile", tiny, "--target", "cuda")


def test_an_output_directory_that_holds_something_else(tiny, tmp_path, failing):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    assert "exists and is not an artifact" in failing("compile", tiny, "-o", tmp_path / "mine")
    (tmp_path / "file").touch()
    assert f"for {tmp_path / 'file'} is a file" in failing("compile", tiny, "-o", tmp_path / "file" / "a" / "b")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert "error" in failing("compile", tiny, "-o", tiny)
    assert tiny.read_text() == GOOD


def test_an_output_directory_below_a_file(tiny, failing):
    assert str(tiny) in failing("compile", tiny, "-o", tiny / "out")


def test_a_bug_of_ours_says_how_to_report_it(tiny, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("qdsl.load", lambda *_, **__: 1 / 0)
    assert cli.main(["check", str(tiny)]) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "Traceback" not in err
    (report,) = tmp_path.glob("qdsl-bug-*/report.txt")
    assert "Traceback" in report.read_text() and f"qdsl check {tiny}" in report.read_text()


# ---- start-up ----------------------------------------------------------------------------------------------------
PROBE = """
import sys, time
start = time.perf_counter()
from qdsl.cli import main
code = main(sys.argv[1:])
heavy = {m.split(".")[0] for m in sys.modules} & {"tvm", "tvm_ffi", "torch", "transformers"}
assert not heavy, heavy
print(f"seconds {time.perf_counter() - start:.3f}")
sys.exit(code)
"""


def test_check_and_a_cache_hit_import_no_compiler_and_no_torch(tiny):
    made = ["compile", str(tiny), "--arch", *target.default_archs("cpu")]
    assert cli.main(made) == 0
    for argv in (
        ["check", str(tiny)],
        made,
        ["list"],
        ["show", str(tiny)],
        ["fmt", "--check", str(tiny)],
    ):
        done = subprocess.run([sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_installed_command(tiny):
    done = subprocess.run(
        [sys.executable, "-m", "qdsl", "check", str(tiny)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away(tiny):
    command = f"{sys.executable} -m qdsl list --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
