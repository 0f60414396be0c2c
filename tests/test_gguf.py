"""GGUF files: written here element by element, read as whole models; damaged ones and those of other types refused."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import packers
import qdsl
from qdsl.runtime import QuantLinear, load_quantized
from qdsl.runtime.conversion import convert
from qdsl.runtime.examination import examine
from qdsl.runtime.inspection import inspect

transformers = pytest.importorskip("transformers")

HEADS, CACHED, HIDDEN, INNER, VOCABULARY = 4, 2, 64, 96, 32
CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": CACHED, "head_dim": HIDDEN // HEADS, "vocab_size": VOCABULARY,
}  # fmt: skip
SHAPES = {
    "token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN), "blk.0.attn_v": (HIDDEN // 2, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,),
}  # fmt: skip
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}


def records(kind: str, n: int, k: int, rng) -> tuple[bytes, np.ndarray]:
    """(the bytes, the weight) of a tensor of random numbers."""
    if kind in ("F32", "F16"):
        values = rng.standard_normal((n, k)).astype(np.float32 if kind == "F32" else np.float16)
        return values.tobytes(), values.astype(np.float64)
    d = rng.uniform(0.01, 0.02, (n, k // 32)).astype(np.float16)
    m = rng.uniform(-0.1, 0, (n, k // 32)).astype(np.float16)
    q = rng.integers(-128, 128, (n, k)) if kind == "Q8_0" else rng.integers(0, 16, (n, k))
    codes = q.astype(np.int8).reshape(n, -1, 32) if kind == "Q8_0" else packers.gguf_q4_0(q).astype(np.uint8)
    out = b""
    for row in range(n):
        for block in range(k // 32):
            out += d[row, block].tobytes() + (m[row, block].tobytes() if kind == "Q4_1" else b"")
            out += codes[row, block].tobytes()
    wide = d.astype(np.float64).repeat(32, 1)
    lift = {"Q4_0": -8 * wide, "Q4_1": m.astype(np.float64).repeat(32, 1), "Q8_0": 0}[kind]
    return out, q * wide + lift


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def written(path: Path, kinds: dict[str, str], architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write a file whose tensors are of these types (by default Q4_0, norms F32); returns the weights by its names."""
    rng, body, infos, weights = np.random.default_rng(3), b"", b"", {}
    for name, shape in SHAPES.items():
        if name not in kinds and name == "output":
            continue
        kind = kinds.get(name, "F32" if len(shape) == 1 else "Q4_0")
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        raw, weights[name] = (bytes(64), None) if kind == "Q6_K" else records(kind, rows, columns, rng)
        infos += text(f"{name}.weight") + struct.pack("<I", len(shape))
        infos += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", KINDS[kind], len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    pairs = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    for key, value in (("llama.attention.head_count", HEADS), ("llama.attention.head_count_kv", CACHED)):
        pairs += text(key) + struct.pack("<II", 4, value)
    pairs += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    count = infos.count(b".weight")
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 4) + pairs + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return weights


def built(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG | {"tie_word_embeddings": True} | changes)
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, undone one row at a time."""
    rows = len(weight) // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for pair in range(rows // 2):
            for half in (0, 1):
                out[head * rows + half * rows // 2 + pair] = weight[head * rows + 2 * pair + half]
    return out


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_file_loads_whole(kind, tmp_path):
    path = tmp_path / "model.gguf"
    weights = written(
        path, dict.fromkeys((name for name, shape in SHAPES.items() if len(shape) == 2 and name != "output"), kind)
    )
    model = load_quantized(built(), path)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 7 and model.lm_head.weight is model.model.embed_tokens.weight
    block = model.model.layers[0]
    for name, layer in {
        "attn_v": block.self_attn.v_proj, "attn_output": block.self_attn.o_proj, "ffn_gate": block.mlp.gate_proj,
        "ffn_up": block.mlp.up_proj, "ffn_down": block.mlp.down_proj,
    }.items():  # fmt: skip
        assert np.array_equal(layer.dequantize().numpy(), weights[f"blk.0.{name}"])
    assert np.array_equal(block.self_attn.q_proj.dequantize().numpy(), rotated(weights["blk.0.attn_q"], HEADS))
    assert np.array_equal(block.self_attn.k_proj.dequantize().numpy(), rotated(weights["blk.0.attn_k"], CACHED))
    embedded = model.model.embed_tokens.weight.detach().numpy()
    assert np.array_equal(embedded, weights["token_embd"].astype(np.float32))
    assert np.array_equal(
        block.input_layernorm.weight.detach().numpy(), weights["blk.0.attn_norm"][0].astype(np.float32)
    )
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


def test_types_may_differ_and_heads_be_stored(tmp_path):
    path = tmp_path / "model.gguf"
    weights = written(path, {"token_embd": "F16", "output": "Q8_0", "blk.0.ffn_up": "F16", "blk.0.ffn_down": "Q4_1"})
    model = load_quantized(built(tie_word_embeddings=False), path)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    assert np.array_equal(model.lm_head.dequantize().numpy(), weights["output"])
    table = str(inspect(path, built(tie_word_embeddings=False)))
    assert "gguf by model.gguf, 7 of 8 linears quantized" in table and "of type Q4_1" in table


def test_a_file_is_converted_to_a_directory(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, {"token_embd": "Q8_0", "blk.0.ffn_down": "Q4_1"})
    out = convert(path, tmp_path / "out", model=built())
    one, two = (load_quantized(built(), directory).state_dict() for directory in (path, out))
    assert one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


def test_what_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, {"token_embd": "Q6_K"})
    refused(path, "`token_embd.weight` is Q6_K, [32, 64], which is not supported (supported: F32, F16, BF16, Q4_0")
    written(path, {}, architecture="gemma3")
    refused(path, "general.architecture `gemma3` is not supported (supported: llama)")
    path.write_bytes(b"GGML" + bytes(100))
    refused(path, "it does not begin with GGUF")
    (tmp_path / "model.bin").write_bytes(b"")
    refused(tmp_path / "model.bin", "a checkpoint is a directory, or a file that ends in .gguf")


def refused(path, message):
    with pytest.raises(qdsl.CheckpointError) as caught:
        load_quantized(built(), path)
    assert message in str(caught.value) and str(path) in str(caught.value), str(caught.value)


def test_damaged_files(tmp_path):
    """Cut anywhere, or with a byte of the header changed: an error that names the file, or nothing that is read."""
    path = tmp_path / "model.gguf"
    written(path, {})
    raw, rng, model = path.read_bytes(), random.Random(1), built()
    start = raw.index(b"blk.0.ffn_norm.weight") + 40
    right = {name: (choice.scheme, t.shape) for name, choice, t in seen(model, path)}
    for case in range(300):
        at, whole = rng.randrange(len(raw)), bytearray(raw)
        if case % 2:
            whole = whole[:at]
        else:
            whole[at % start] ^= 1 << rng.randrange(8)
        path.write_bytes(whole)
        found, said = right, ""
        try:
            found = {name: (choice.scheme, t.shape) for name, choice, t in seen(model, path)}
        except qdsl.CheckpointError as problem:
            said = str(problem)
        assert path.name in said if said else found == right and len(whole) == len(raw), f"case {case}: {said}"


def seen(model, path):
    found = examine(model, path)
    if found.problems:
        raise qdsl.CheckpointError("\n".join(found.problems))
    return [(name, choice, found.files.headers[f"{name}.weight"]) for name, choice in found.plan.choices.items()]


@pytest.mark.skipif(not os.environ.get("QDSL_GGUF"), reason="QDSL_GGUF names no file")
def test_a_real_file_says_what_transformers_own_reader_makes_of_it():
    path = Path(os.environ["QDSL_GGUF"])
    right = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    model = load_quantized(
        transformers.AutoModelForCausalLM.from_config(right.config, dtype=torch.float32), path
    ).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.equal(layer.dequantize().float(), right.get_submodule(name).weight), name
    tokens = torch.arange(10)[None] * 7
    with torch.inference_mode():
        expected = right(tokens).logits
        assert (model(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
