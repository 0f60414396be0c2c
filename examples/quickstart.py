"""A quantized Llama in compiled kernels, against the same model in float64.

    python examples/quickstart.py [--target cpu|cuda] [DIRECTORY]

Loads an AWQ checkpoint (by default a small one that comes with the tests), runs a prompt, and compares the logits with
the same model in float64 whose weights are (q - z) * s, decoded here and not by qdsl, without any rounding.  Exits with
1 if they differ by more than 1e-5 of the largest logit on the CPU in float32, or 2e-3 on CUDA in float16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qdsl
from qdsl.runtime import QuantLinear, load_quantized

CHECKPOINT = Path(__file__).parent.parent / "tests" / "data" / "awq_g128"
PROMPT = (1, 17, 254, 301, 42, 99, 7, 480, 33, 128, 5, 211, 366, 64, 90, 150)
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-3}
DTYPE = {"cpu": torch.float32, "cuda": torch.float16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=CHECKPOINT, help="of an AWQ checkpoint of a Llama")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()

    if not (args.directory / "config.json").is_file():
        raise qdsl.CheckpointError(f"{args.directory}: no config.json; give the directory of an AWQ checkpoint")
    config = LlamaConfig.from_pretrained(args.directory)
    model = load_quantized(
        built(config, DTYPE[args.target]), args.directory, device=args.target, dtype=DTYPE[args.target]
    )
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    print(f"{len(layers)} quantized layers, {layers[0].scheme.bound}, on {args.target} in {DTYPE[args.target]}")

    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = model(tokens.to(args.target)).logits.double().cpu()
        expected = exact(config, args.directory)(tokens).logits
    error = float((logits - expected).abs().max() / expected.abs().max())
    print(f"largest relative logit error: {error:.2e} (allowed: {TOLERANCE[args.target]:.0e})")

    with torch.inference_mode():
        for _ in range(16):
            best = model(tokens.to(args.target)).logits[:, -1:].argmax(-1).cpu()
            tokens = torch.cat([tokens, best], 1)
    print("generated tokens:", *tokens[0, len(PROMPT) :].tolist())
    return 0 if error <= TOLERANCE[args.target] else 1


def built(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with parameters of one type; tables that transformers keeps in float32 stay so."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


# ---- the model in float64 ----------------------------------------------------------------------------------------
def exact(config: LlamaConfig, directory: Path) -> nn.Module:
    """The checkpoint's model in float64, its quantized weights decoded exactly."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if not file.name.startswith("reference"):
            tensors |= load_file(file)
    weights = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name in tensors:
        if name.endswith(".qweight"):
            prefix = name.removesuffix("qweight")
            del weights[prefix + "scales"]
            stored = (tensors[prefix + kind].numpy() for kind in ("qweight", "qzeros", "scales"))
            weights[prefix + "weight"] = torch.from_numpy(decode_awq(*stored))
    model = built(config, torch.float64)
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    # Whatever the model's type, transformers computes these two in float32.
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, Norm64(module.weight, module.variance_epsilon))
    model.model.rotary_emb = Rotary64(model.model.rotary_emb.inv_freq.double())
    return model


def decode_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight [n, k] in float64: (q - z) * s, exactly."""

    def codes(words: np.ndarray) -> np.ndarray:
        # A word holds 8 columns of a row; column c is in nibble (0, 4, 1, 5, 2, 6, 3, 7)[c].
        columns = [(words >> 4 * nibble) & 15 for nibble in (0, 4, 1, 5, 2, 6, 3, 7)]
        return np.stack(columns, -1).reshape(len(words), -1).astype(np.float64)

    group = len(qweight) // len(scales)
    zeros, steps = (np.repeat(a, group, 0) for a in (codes(qzeros), scales.astype(np.float64)))
    return np.ascontiguousarray(((codes(qweight) - zeros) * steps).T)


class Norm64(nn.Module):
    def __init__(self, weight: nn.Parameter, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class Rotary64(nn.Module):
    def __init__(self, frequencies: torch.Tensor):
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except qdsl.Error as problem:
        sys.exit(f"error: {problem}")
