"""`qdsl inspect`: the table of a checkpoint, from settings and headers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_models import LOADED

from qdsl.cli import main
from qdsl.diagnostic import CheckpointError
from qdsl.runtime.examination import refuse
from qdsl.runtime.inspection import inspect

pytest.importorskip("transformers")

DATA = Path(__file__).parent / "data"
FIXTURES = Path(os.environ["QDSL_FIXTURES"]) if os.environ.get("QDSL_FIXTURES") else None


def test_the_table(capsys):
    assert main(["inspect", str(DATA / "awq_g128")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{DATA / 'awq_g128'}: awq by config.json, 7 of 8 linears quantized"
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in lines[1:]]
    assert [cell.strip() for cell in rows[0]] == ["module", "n x k", "scheme", "layout", "w", "zero", "scale", "why"]
    assert [cell.strip() for cell in rows[1]] == [
        "model.layers.0.self_attn.q_proj", "256 x 256", "awq4(group=128, scale_type=f16)", "autoawq", "(q - z) * s",
        'z = "qzeros"', 's = "scales"', "4 bits, group_size 128; qweight has the shape of gemm",
    ]  # fmt: skip
    assert [cell.strip() for cell in rows[-1]] == ["lm_head", "512 x 256", "dense", "stored as float16"]


def test_the_table_as_json(capsys):
    assert main(["inspect", str(DATA / "awq_gemv_g128"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "awq" and not found["problems"] and len(found["modules"]) == 8
    assert found["modules"][0]["layout"] == "autoawq_gemv" and found["modules"][-1]["scheme"] == ""


def test_what_is_wrong_is_said_below_the_table(tmp_path, capsys):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((DATA / "awq_g128" / file).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "problem: model.safetensors: model.layers.0.self_attn.q_proj: " in text and "layout needs [4, 256]" in text
    assert "groups of 128 along k would make it so" in text
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of", "architectures": None}))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "transformers can't build this model" in capsys.readouterr().err
    for verb in (["inspect"], ["convert", "-o", str(tmp_path / "out")], ["quantize", "--scheme", "awq4", "-o", "out"]):
        assert main([*verb, str(tmp_path / "absent")]) == 1
        assert f"{tmp_path / 'absent'}: no such file or directory" in capsys.readouterr().err


@pytest.mark.skipif(FIXTURES is None, reason="QDSL_FIXTURES names no folder of checkpoints")
@pytest.mark.parametrize("name", LOADED)
def test_every_checkpoint_that_loads_can_be_looked_at(name):
    found = inspect(FIXTURES / name)
    assert not found.problems and not found.notices
    assert sum(bool(row.scheme) for row in found.modules) == LOADED[name]
    assert all(row.why for row in found.modules)


def test_experts_have_a_row_for_each_projection(capsys):
    assert main(["inspect", str(DATA / "awq_moe_mixtral_g64")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": awq by config.json, 4 of 5 linears, 3 of 3 projections of experts quantized")
    rows = [line.split()[:4] for line in lines if ".experts." in line]
    assert rows == [
        [f"model.layers.0.mlp.experts.{own}_proj", "4", "x", n]
        for own, n in (("gate", "256"), ("up", "256"), ("down", "128"))
    ]


def test_an_error_lists_the_first_of_many_problems():
    with pytest.raises(CheckpointError, match=r"- layer 19 lacks scales\n- and 5 more$"):
        refuse(Path("model"), [f"layer {i} lacks scales" for i in range(25)])
