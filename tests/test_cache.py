"""The cache of artifacts: found again, built once, whole or absent, refused when damaged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import qdsl
from qdsl import cache
from qdsl.artifact import MANIFEST, open_artifact
from qdsl.diagnostic import ArtifactError, Error
from qdsl.manifest import FORMAT

TINY = """\
scheme tiny
    "Bytes and one scale per channel."

weight {
    code  q[n, k] : i8
    scale s[n]    : f32
    w ~ q * s
}

compute f32 -> f32
output f32
"""
ARCH = ("x86-64-v2",)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One compiled artifact, to be copied by whoever damages it."""
    path = tmp_path_factory.mktemp("built") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QDSL_CACHE", str(path.parent / "cache"))
        return qdsl.compile(qdsl.parse(TINY), "cpu", ARCH, out=path)


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built.path, tmp_path / "artifact")


def entries(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.is_dir() and not p.name.startswith("."))


def leftovers(home: Path) -> list[str]:
    return sorted(p.name for p in home.iterdir() if p.name.startswith(".") and p.is_dir() and p.name != ".nvcc")


# ---- digests -----------------------------------------------------------------------------------------------------
def test_equal_inputs_have_equal_digests_and_anything_else_another():
    def digest(scheme=None, kind="cpu", archs=ARCH, **tools):
        return cache.digest_of(scheme or qdsl.parse(TINY), kind, archs, {"tvm": "1", **tools})

    assert digest() == digest() == digest(qdsl.parse(TINY + "\n\n# a comment\n".replace("# a comment", "")))
    others = [
        digest(qdsl.parse(TINY.replace("i8", "i4"))), digest(kind="cuda"), digest(archs=("x86-64-v3",)),
        digest(archs=("x86-64-v2", "x86-64-v3")), digest(tvm="2"), digest(qdsl.load("gptq")), digest(qdsl.load("gptq", bits=3)),
    ]  # fmt: skip
    assert len({digest(), *others}) == 1 + len(others)


def test_the_same_digest_twice_is_a_hit(home, monkeypatch):
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    made = (first.path / MANIFEST).stat().st_mtime_ns
    monkeypatch.setattr("qdsl.compilation._build", lambda *_: pytest.fail("compiled again"))
    second = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    assert (second.path, second.manifest) == (first.path, first.manifest)
    assert (second.path / MANIFEST).stat().st_mtime_ns == made
    assert entries(home) == [first.path.name] and leftovers(home) == []


def test_a_deleted_cache_is_made_again(home):
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    shutil.rmtree(home)
    assert qdsl.compile(qdsl.parse(TINY), "cpu", ARCH).path == first.path


# ---- many processes ----------------------------------------------------------------------------------------------
COMPILE = """
import sys, qdsl, qdsl.compilation as compilation
from pathlib import Path
build = compilation._build
def counted(path, *rest):
    Path(sys.argv[1], f"built-{path.name}").touch()
    build(path, *rest)
compilation._build = counted
artifact = qdsl.compile(qdsl.parse(Path(sys.argv[2]).read_text()), "cpu", ("x86-64-v2",))
artifact.library("x86-64-v2")
print(artifact.path)
"""


def start(marks: Path, scheme: Path, code: str = COMPILE) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, marks, scheme], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def scheme(tmp_path):
    file = tmp_path / "tiny.q"
    file.write_text(TINY)
    return file


def test_sixteen_cold_processes_compile_once(home, tmp_path, scheme):
    marks = tmp_path / "marks"
    marks.mkdir()
    processes = [start(marks, scheme) for _ in range(16)]
    results = [(*p.communicate(timeout=120), p.returncode) for p in processes]
    assert [code for *_, code in results] == [0] * 16, [err for _, err, code in results if code]
    assert len({out for out, *_ in results}) == 1
    assert len(list(marks.iterdir())) == 1
    assert len(entries(home)) == 1 and leftovers(home) == []


def test_a_builder_killed_midway_leaves_nothing_in_the_way(home, tmp_path, scheme):
    marks = tmp_path / "marks"
    marks.mkdir()
    hang = COMPILE.replace(
        "    build(path, *rest)", "    (path / 'half').write_text('written')\n    import time; time.sleep(600)"
    )
    victim = start(marks, scheme, hang)
    deadline = time.monotonic() + 60
    while not list(home.glob(".*/half")):
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.02)
    waiting = start(marks, scheme)  # blocked on the victim's lock, or starting up; death releases it
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert entries(home) == []
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert entries(home) == [Path(out.strip()).name] and leftovers(home) == []


def test_what_dead_builders_left_is_swept(home):
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    stale = home / f".{first.path.name}-dead"
    stale.mkdir()
    (stale / "half").write_text("written")
    shutil.rmtree(first.path)
    qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    assert leftovers(home) == []


def test_a_failed_build_leaves_nothing(home, monkeypatch):
    def broken(path, *_):
        (path / "half").write_text("written")
        raise qdsl.TargetError("no")

    monkeypatch.setattr("qdsl.compilation._build", broken)
    with pytest.raises(qdsl.TargetError):
        qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    assert entries(home) == leftovers(home) == []


# ---- a cache that can't be written -------------------------------------------------------------------------------
def test_a_cache_below_a_file_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "file" / "cache"))
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    first.library(*ARCH)
    assert qdsl.compile(qdsl.parse(TINY), "cpu", ARCH).path == first.path, "kept for as long as the process lives"


def test_a_read_only_cache_is_used_as_far_as_it_goes(home, monkeypatch):
    held = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("qdsl.cache.Path.mkdir", refuse)
        assert qdsl.compile(qdsl.parse(TINY), "cpu", ARCH).path == held.path
    real = cache.tempfile.mkdtemp
    monkeypatch.setattr(cache.tempfile, "mkdtemp", lambda *a, **k: refuse() if k.get("dir") == home else real(*a, **k))
    other = qdsl.compile(qdsl.parse(TINY.replace("i8", "i4")), "cpu", ARCH)
    assert home not in other.path.parents
    other.library(*ARCH)
    assert entries(home) == [held.path.name]


def test_a_lock_that_can_t_be_had_is_done_without(home, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache.fcntl, "flock", unsupported)
    assert qdsl.compile(qdsl.parse(TINY), "cpu", ARCH).path.parent == home.resolve()


def test_a_copy_may_go_anywhere_and_replaces_only_artifacts(built, tmp_path, home):
    out = tmp_path / "deep" / "below" / "out"
    assert qdsl.compile(qdsl.parse(TINY), "cpu", ARCH, out=out).path == out
    assert qdsl.compile(qdsl.parse(TINY.replace("i8", "i4")), "cpu", ARCH, out=out).manifest.text != built.manifest.text
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(Error, match="is not an artifact"):
        qdsl.compile(qdsl.parse(TINY), "cpu", ARCH, out=tmp_path / "full")


# ---- damage ------------------------------------------------------------------------------------------------------
def library(path: Path) -> Path:
    return path / f"kernel.{ARCH[0]}.so"


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_library_that_changed_is_refused(copy, damage):
    data = library(copy).read_bytes()
    library(copy).write_bytes({"truncated": data[:-100], "changed": data[:-1] + b"!", "empty": b""}[damage])
    with pytest.raises(ArtifactError) as refused:
        open_artifact(copy).library(*ARCH)
    text = str(refused.value)
    assert str(library(copy)) in text and "will not be loaded" in text
    assert f"remove {copy} and run `qdsl compile tiny --target cpu --arch x86-64-v2`" in text


def test_a_library_changed_while_keeping_size_and_time_is_refused(copy):
    artifact = open_artifact(copy)
    file = artifact.library(*ARCH)
    before, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ArtifactError):
        artifact.library(*ARCH)


def test_a_library_that_is_missing_or_of_no_architecture_here(copy):
    library(copy).unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        open_artifact(copy).library(*ARCH)
    with pytest.raises(ArtifactError, match="sm_80"):
        open_artifact(copy).library("sm_80")


@pytest.mark.parametrize("name", ["../outside.so", "/etc/hostname"])
def test_a_manifest_can_t_name_a_file_outside(copy, name):
    data = json.loads((copy / MANIFEST).read_text())
    data["libraries"] = {ARCH[0]: name}
    (copy / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(ArtifactError):
        open_artifact(copy).library(*ARCH)


def _without(key: str):
    def change(text: str) -> str:
        data = json.loads(text)
        del data[key]
        return json.dumps(data)

    return change


DAMAGES = {
    "empty": lambda t: "", "cut": lambda t: t[: len(t) // 2], "binary": lambda t: "\x00\x01", "list": lambda t: "[]",
    "null": lambda t: "null", "number": lambda t: "7", "old": lambda t: t.replace(f'"format": {FORMAT}', '"format": 0'),
    "no-buffers": _without("buffers"), "no-digests": _without("digests"), "no-format": _without("format"),
    "buffers-wrong": lambda t: json.dumps({**json.loads(t), "buffers": [3]}),
    "variants-wrong": lambda t: json.dumps({**json.loads(t), "variants": {"a": 1}}),
    "table-missing": lambda t: json.dumps({**json.loads(t), "tables": {}}),
    "table-wrong": lambda t: t.replace('"source": "one variant"', '"origin": "one variant"'),
    "table-of-others": lambda t: t.replace('"name": "portable"', '"name": "carried"'),
    "libraries-wrong": lambda t: json.dumps({**json.loads(t), "libraries": [1]}),
    "digests-wrong": lambda t: json.dumps({**json.loads(t), "digests": None}),
    "extra": lambda t: json.dumps({**json.loads(t), "surprise": 1}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_one_clear_error(copy, damage):
    (copy / MANIFEST).write_text(DAMAGES[damage]((copy / MANIFEST).read_text()))
    with pytest.raises(ArtifactError) as refused:
        open_artifact(copy).library(*ARCH)
    assert str(copy / MANIFEST) in str(refused.value) and "\n" not in str(refused.value)


def test_a_manifest_that_is_no_text(copy):
    (copy / MANIFEST).write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ArtifactError, match=MANIFEST):
        open_artifact(copy)


def test_an_entry_without_a_manifest_is_built_again(home):
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    (first.path / MANIFEST).unlink()
    again = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    assert again.path == first.path and again.library(*ARCH).exists()
    assert len(entries(home)) == 1 and leftovers(home) == []


def test_an_entry_with_a_damaged_manifest_says_how_to_mend_it(home):
    first = qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)
    (first.path / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match=f"remove {first.path} and compile again"):
        qdsl.compile(qdsl.parse(TINY), "cpu", ARCH)


@pytest.mark.parametrize("what", ["absent", "file", "empty"])
def test_no_artifact_at_all(tmp_path, what):
    path = tmp_path / "thing"
    if what == "file":
        path.write_text("")
    if what == "empty":
        path.mkdir()
    with pytest.raises(ArtifactError, match=str(path)):
        open_artifact(path)


# ---- compilers ---------------------------------------------------------------------------------------------------
def test_which_nvcc(tmp_path, monkeypatch):
    def fake(name: str) -> str:
        file = tmp_path / name / "nvcc"
        file.parent.mkdir()
        file.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.2'\n")
        file.chmod(0o755)
        return str(file)

    chosen, found = fake("chosen"), fake("found")
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "found") + os.pathsep + "/usr/bin" + os.pathsep + "/bin")
    monkeypatch.setenv("QDSL_NVCC", chosen)
    assert cache.nvcc() == chosen
    monkeypatch.delenv("QDSL_NVCC")
    assert cache.nvcc() == found
    assert "99.1" in cache.nvcc_version(found)
    monkeypatch.setenv("QDSL_NVCC", str(tmp_path / "nothing"))
    with pytest.raises(qdsl.TargetError, match="QDSL_NVCC is"):
        cache.nvcc()
