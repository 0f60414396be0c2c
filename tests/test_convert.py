"""`qdsl convert`: a checkpoint in kernel layout has the bits of the one it was made of, whatever happens on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint import AWQ, DOWN, built, quantized
from test_models import FIXTURES, needs_fixtures

import qdsl
from qdsl.cli import main
from qdsl.layout import Layout
from qdsl.runtime import load_quantized, writing
from qdsl.runtime.conversion import convert
from qdsl.runtime.stack import QuantStack
from qdsl.runtime.state import EXTRA, Tag

MIXTRAL = AWQ.parent / "awq_moe_mixtral_g64"
Q = f"{DOWN}.q"


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(model, other):
    """Whether two models hold the same bits by the same names."""
    one, two = ({name: bits(t) for name, t in m.state_dict().items()} for m in (model, other))
    return one == two


def stored(directory):
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def index_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The checkpoint with a tokenizer and some files that do not go along."""
    directory = tmp_path_factory.mktemp("source") / "checkpoint"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(AWQ / name, directory)
    for name in ("tokenizer.json", "generation_config.json", "quant_config.json", "README.md", "pytorch_model.bin"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture(scope="module")
def converted(source):
    """Made by the command line."""
    out = source.parent / "converted"
    assert main(["convert", str(source), "-o", str(out)]) == 0
    return out


@pytest.fixture
def writable(converted, tmp_path):
    """A copy of the result whose parts a test may change: (directory, tensors, save)."""
    directory = tmp_path / "copy"
    shutil.copytree(converted, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)

    def save():
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(tensors, file)
        return directory

    return directory, tensors, save


# ---- right -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_it_holds_the_same_bits(source, converted, kind):
    assert same(load_quantized(built(converted, kind), converted), load_quantized(built(source, kind), source))


def test_loading_it_repacks_nothing(converted, monkeypatch):
    def repacked(*_):
        raise AssertionError("repacked")

    model = built(converted, torch.float16)
    monkeypatch.setattr(Layout, "pack", repacked)
    monkeypatch.setattr(Layout, "unpack", repacked)
    assert len(quantized(load_quantized(model, converted))) == 7


def test_what_is_in_the_directory(source, converted):
    assert {f.name for f in converted.iterdir()} == {
        "config.json", "generation_config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        "tokenizer.json",
    }  # fmt: skip
    config, was = (json.loads((d / "config.json").read_text()) for d in (converted, source))
    assert config.pop("quantization_config") == {"quant_method": "qdsl", "format": 1}
    assert was.pop("quantization_config") and config == was
    with safe_open(converted / "model-00001-of-00001.safetensors", "pt") as opened:
        found = json.loads(opened.metadata()["qdsl"])
    ((name, scheme),) = found["schemes"].items()
    assert found["kinds"] == ["cpu"] and name == "awq4(act=f16, group=128, scale_type=f16)"
    assert str(qdsl.parse(scheme["text"], "saved", **scheme["params"]).bound) == name
    assert torch.equal(
        stored(converted)["lm_head.weight"], stored(source)["lm_head.weight"]
    )  # dense tensors keep their type


def test_it_can_be_looked_at(converted, capsys):
    assert main(["inspect", str(converted), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["modules"] if row["module"] == DOWN)
    assert found["format"] == "qdsl" and not found["problems"]
    assert (row["layout"], row["zero"], row["scale"], row["why"]) == ("kernel", 'z = "z"', 's = "s"', "saved for cpu")


def test_another_targets_layout_is_repacked(source, converted, tmp_path):
    """What was made for a GPU loads here; what was made of it again for this CPU is what it would have been at once."""
    out, back = tmp_path / "cuda", tmp_path / "back"
    assert main(["convert", str(source), "-o", str(out), "--target", "cuda", "--arch", "sm_90a"]) == 0
    tag = Tag.from_tensor(stored(out)[f"{DOWN}.{EXTRA}"])
    assert tag.kind == "cuda" and stored(out)[Q].shape != stored(converted)[Q].shape
    assert same(load_quantized(built(out), out), load_quantized(built(source), source))
    again = stored(convert(out, back))
    assert again.keys() == stored(converted).keys()
    assert all(torch.equal(t, again[name]) for name, t in stored(converted).items())
    assert main(["convert", str(source), "-o", str(tmp_path / "no"), "--arch", "z80"]) == 1


@pytest.mark.parametrize(("kind", "arch"), [("cpu", None), ("cuda", "sm_80")])
def test_experts_are_stacks(kind, arch, tmp_path):
    out = convert(MIXTRAL, tmp_path / "out", kind=kind, arch=arch, part=1)
    model = load_quantized(built(out), out)
    assert same(model, load_quantized(built(MIXTRAL), MIXTRAL))
    stacks = [name for name, m in model.named_modules() if isinstance(m, QuantStack)]
    assert stacks and all(f"{name}.{EXTRA}" in stored(out) for name in stacks)
    assert stored(out)["model.layers.0.mlp.experts.gate_up_proj"].numel() == 0
    for damage, message in (
        (lambda t: t.pop(f"{stacks[0]}.{EXTRA}"), "all experts of a layer are, or none"),
        (lambda t: t.update({f"{stacks[0]}.q": t[f"{stacks[0]}.q"][1:].clone()}), "its tag says"),
        (lambda t: t.pop(f"{stacks[0]}.s"), f"`{stacks[0]}.s` is missing, though its tag is there"),
    ):
        tensors = stored(out)
        damage(tensors)
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        shutil.copy(out / "config.json", broken)
        save_file(tensors, broken / "model.safetensors")
        with pytest.raises(qdsl.CheckpointError, match=message):
            load_quantized(built(broken), broken)


@needs_fixtures
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    ["gptq_v1_sym_g64_descact", "ct_nvfp4", "ct_int8_w8a8_static_asym", "ct_mixed_w4_w8", "bnb_nf4_dq", "fp8_block128_ue8m0",
     "ms_w8a8_bf16", "ms_w8a8_mix", "ms_w4a4_flatquant", "gptq_moe_qwen3moe_g64"],
)  # fmt: skip
def test_every_kind_of_scheme(name, kind, tmp_path):
    directory = FIXTURES / name
    out = convert(directory, tmp_path / "out", kind=kind, arch={"cpu": None, "cuda": "sm_90a"}[kind])
    assert same(load_quantized(built(out), out), load_quantized(built(directory), directory))


@needs_fixtures
def test_a_phase_is_that_of_the_layers(tmp_path):
    directory = FIXTURES / "ms_w8a8_mix"
    out = convert(directory, tmp_path / "out", phase="decode")
    right = load_quantized(built(directory), directory, phase="decode")
    assert same(load_quantized(built(out), out, phase="decode"), right)
    with pytest.raises(qdsl.CheckpointError, match="was saved, but a layer in this phase has none"):
        load_quantized(built(out), out, phase="prefill")


def test_floats_are_quantized_on_the_way(tmp_path):
    floats = built(kind=torch.float16)
    del floats.config.quantization_config
    floats.save_pretrained(tmp_path / "floats")
    out = tmp_path / "out"
    assert (
        main(
            [
                "convert",
                str(tmp_path / "floats"),
                "-o",
                str(out),
                "--scheme",
                "awq4",
                "-P",
                "group=64",
                "--skip",
                "lm_head,mlp",
            ]
        )
        == 0
    )
    options = {"scheme": "awq4", "params": {"group": 64}, "skip": ["lm_head", "mlp"]}
    right = load_quantized(built(kind=torch.float16), tmp_path / "floats", **options)
    assert len(quantized(right)) == 4 and same(load_quantized(built(kind=torch.float16), out), right)
    assert main(["convert", str(tmp_path / "floats"), "-o", str(tmp_path / "no"), "-P", "group=64"]) == 1


# ---- interrupted -------------------------------------------------------------------------------------------------
def test_an_interrupted_run_goes_on(source, tmp_path, monkeypatch):
    whole, out = convert(source, tmp_path / "whole", part=100_000), tmp_path / "out"
    partial, saved = tmp_path / "out.partial", []

    def failing(tensors, path, metadata):
        saved.append(path)
        if len(saved) == 4:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patched:
        patched.setattr(writing, "save_file", failing)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, part=100_000)
    assert not out.exists()
    files = sorted(f for f in partial.iterdir() if f.suffix == ".safetensors")
    assert len(files) == 3 and {f.name for f in partial.iterdir()} == {writing.JOURNAL, *(f.name for f in files)}
    files[1].write_bytes(files[1].read_bytes()[:-1])  # as after a crash of the machine
    before = [f.stat().st_mtime_ns for f in files]
    convert(source, out, part=100_000)
    after = [(out / f.name).stat().st_mtime_ns for f in files]
    assert (after[0], after[2]) == (before[0], before[2]) and after[1] > before[1] and not partial.exists()
    assert {f.name for f in out.iterdir()} == {f.name for f in whole.iterdir()} and len(index_of(out)) == len(
        stored(out)
    )
    assert index_of(out) == index_of(whole) and len(set(index_of(out).values())) > 4
    one, two = ({name: bits(t) for name, t in stored(directory).items()} for directory in (out, whole))
    assert one == two


def test_what_another_run_left_is_not_gone_on_with(source, converted, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / writing.JOURNAL).write_text("{}")
    (partial / "model-00001-of-00001.safetensors").write_bytes(b"of something else")
    out = convert(source, tmp_path / "out")
    assert same(load_quantized(built(out), out), load_quantized(built(converted), converted))


def test_nothing_is_overwritten(source, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("the only copy")
    assert main(["convert", str(source), "-o", str(tmp_path / "there")]) == 1
    assert "there: exists; choose another directory or remove it" in capsys.readouterr().err
    assert main(["convert", str(source), "-o", str(tmp_path / "out")]) == 1
    assert "out.partial: is in the way" in capsys.readouterr().err
    assert (tmp_path / "out.partial" / "thesis.txt").exists()


def test_nothing_is_written_of_a_damaged_checkpoint(source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors[f"{DOWN}.scales"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(qdsl.CheckpointError, match=rf"model\.safetensors: .*{DOWN}\.scales` is missing"):
        convert(broken, tmp_path / "out")
    assert {f.name for f in tmp_path.iterdir()} == {"broken"}


# ---- wrong -------------------------------------------------------------------------------------------------------
def _retagged(tensors, **changes):
    name = f"{DOWN}.{EXTRA}"
    tensors[name] = dataclasses.replace(Tag.from_tensor(tensors[name]), **changes).to_tensor()


DAMAGES = {
    "no tag": (lambda t: t.pop(f"{DOWN}.{EXTRA}"), f"`{DOWN}.{EXTRA}` is missing"),
    "no codes": (lambda t: t.pop(Q), f"`{Q}` is missing, though its tag is there"),
    "a shape": (lambda t: t.update({Q: t[Q][:-1].clone()}), f"`{Q}` is [7, "),
    "a type": (lambda t: t.update({Q: t[Q].view(torch.int8)}), "torch.int8, its tag says"),
    "no JSON": (lambda t: t.update({f"{DOWN}.{EXTRA}": torch.zeros(9, dtype=torch.uint8)}), "is not a qdsl tag"),
    "another size": (lambda t: _retagged(t, meaning=["n = 1, k = 2"]), "the saved layer has n = 1, k = 2, the model's n = 256"),
    "no weights": (lambda t: _retagged(t, loaded=False), "it was saved before it had weights"),
    "one more": (lambda t: t.update({f"{DOWN}.x": torch.zeros(1)}), f"`{DOWN}.x` has no place in the model"),
    "another meaning": (lambda t: _retagged(t, params={"act": "f16", "group": 64, "scale_type": "f16"}), f"`{DOWN}.s` is"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_are_named(writable, damage):
    _, tensors, save = writable
    change, message = DAMAGES[damage]
    change(tensors)
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(built(), save())
    assert message in str(caught.value) and "model-00001-of-00001.safetensors: " in str(caught.value)


def test_a_tag_of_any_bytes_is_taken_or_refused(writable):
    """Never anything but a CheckpointError, or the same numbers."""
    _, tensors, save = writable
    right, rng, name = load_quantized(built(), save()), random.Random(1), f"{DOWN}.{EXTRA}"
    whole = tensors[name].clone()
    for _ in range(12):
        tensors[name] = whole.clone()
        tensors[name][rng.randrange(len(whole))] = rng.choice(b'0123456789"[]{},:xnullk')
        with contextlib.suppress(qdsl.CheckpointError):
            found = load_quantized(built(), save())
            assert quantized(found).keys() == quantized(right).keys()


def test_settings_and_models_that_do_not_fit(writable):
    directory, _, _ = writable
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["format"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        qdsl.CheckpointError, match=r"config\.json: format 2 of qdsl's own checkpoints; this version reads 1"
    ):
        load_quantized(built(directory), directory)


def test_a_bias_on_one_side_is_refused(converted):
    with pytest.raises(qdsl.CheckpointError, match="the layer was saved without a bias, and the model has one"):
        load_quantized(built(converted, mlp_bias=True), converted)


# ---- memory ------------------------------------------------------------------------------------------------------
MEASURED = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from qdsl.runtime import load_quantized
from qdsl.runtime.conversion import convert
from qdsl.runtime.quantization import quantize
from qdsl.runtime.writing import give_memory_back

def peak(run):
    give_memory_back()  # or what was freed would be measured as well
    # What a run takes of memory beside what is there before it, at its most: in MiB.
    status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) / 1024
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = run()
    return result, status("VmHWM") - before

def model(layers):
    linears = [nn.Linear(k, n, bias=False, device="meta", dtype=torch.float16) for n, k in layers]
    return nn.ModuleDict({f"layer{at}": linear for at, linear in enumerate(linears)})

directory, layers = Path(sys.argv[1]), json.loads(sys.argv[2])
convert(directory / "small", directory / "once", model=model(layers[:1]))  # compiles and imports
load_quantized(model(layers[:1]), directory / "once")
found, load = peak(lambda: load_quantized(model(layers), directory / "large"))
size = sum(t.nbytes for t in found.state_dict().values()) / 2**20
del found
_, conversion = peak(lambda: convert(directory / "large", directory / "out", model=model(layers), part=1 << 20))
_, again = peak(lambda: load_quantized(model(layers), directory / "out"))
options = {"scheme": "w8a8_dynamic"}
load_quantized(model(layers[:1]), directory / "one float", **options)
found, floats = peak(lambda: load_quantized(model(layers[:6]), directory / "floats", **options))
floats -= sum(t.nbytes for t in found.state_dict().values()) / 2**20
del found
_, written = peak(lambda: quantize(directory / "floats", directory / "q", model=model(layers[:6]), part=1 << 20, **options))
print(json.dumps({
    "final": size, "load": load, "convert": conversion, "load converted": again, "beyond": floats, "quantize": written
}))
"""


def test_memory(tmp_path):
    """At most the final size and two of the largest layers, in 16 bits; conversion does not even hold the model."""
    n, k, group = 1024, 4096, 128
    layers = [(n, k), (k, n)] * 7
    for name, count in (("small", 1), ("large", len(layers))):
        directory = tmp_path / name
        directory.mkdir()
        settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
        tensors = {}
        for at, (rows, columns) in enumerate(layers[:count]):
            tensors[f"layer{at}.qweight"] = torch.full((columns, rows // 8), at, dtype=torch.int32)
            tensors[f"layer{at}.qzeros"] = torch.zeros(columns // group, rows // 8, dtype=torch.int32)
            tensors[f"layer{at}.scales"] = torch.ones(columns // group, rows, dtype=torch.float16)
        save_file(tensors, directory / "model.safetensors")
    for name, count in (("one float", 1), ("floats", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        weights = {f"layer{at}.weight": torch.full(layers[at], 0.5, dtype=torch.float16) for at in range(count)}
        save_file(weights, tmp_path / name / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path, json.dumps(layers)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, two_layers = json.loads(done.stdout.splitlines()[-1]), 2 * (2 * n * k) / 2**20
    print(found, two_layers)
    assert found["final"] > 1.5 * two_layers  # so that a second copy would be seen
    assert found["load"] < found["final"] + two_layers
    assert found["load converted"] < found["final"] + two_layers
    assert found["convert"] < 2 * two_layers  # a file of one layer, and what it takes to make it
    assert found["beyond"] < two_layers and found["quantize"] < 2 * two_layers
