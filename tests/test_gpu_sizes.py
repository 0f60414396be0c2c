"""Sizes beyond 32-bit offsets and 65,535 blocks, on a GPU.  Rows and columns at the ends and in the middle are checked."""

import pytest
import torch

import qdsl
from qdsl.runtime import QuantLinear

pytestmark = pytest.mark.gpu

SIZES = [  # m, n, k
    (32_768, 65_536, 64),  # m · n = 2^31
    (524_289, 64, 4096),  # m · k = 2^31 + 4096
    (23_491, 128_256, 64),  # m · n = 3.01e9
    (65_536, 32, 64),
    (262_141, 48, 128),
    (2, 250_880, 128),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["awq4", "w8a16", "w8a8_dynamic"])
def test_large(name, size):
    m, n, k = size
    scheme = qdsl.load(name)
    torch.manual_seed(0)
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}[scheme.output.dtype.name]
    layer = QuantLinear.from_float(torch.nn.Linear(k, n, bias=False, device="cuda", dtype=kind), scheme)
    x = torch.randn(m, k, device="cuda", dtype=layer.dtype)
    y = layer(x)
    rows = torch.tensor([0, 1, m // 2, m - 1], device="cuda")
    truth = x[rows].double() @ layer.dequantize(torch.float64).cuda().t()
    error = (y[rows].double() - truth).abs().max() / truth.abs().max()
    assert error < 2e-2, f"activations of {scheme.name} round; a wrong offset would be of order 1"

    del x, y
    torch.cuda.empty_cache()
