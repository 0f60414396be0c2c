"""Every kernel of `awq4` once, on a shape that fills no tile, for compute-sanitizer: `python benchmarks/sanitized.py`.

From a prebuilt artifact (QDSL_ARTIFACTS).  K goes around every ring more than once, so that slots are filled again, and
rows of y are not aligned for wide stores.
"""

from __future__ import annotations

import numpy as np
import torch

from qdsl import reference
from qdsl.runtime import QuantLinear

M, N, K = 20, 203, 8192


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = QuantLinear("awq4", K, N, bias=False, device=device, dtype=torch.float16)
    patterns = reference.random_patterns(layer.scheme, np.random.default_rng(0), N, K)
    layer.set_patterns({name: p for name, p in patterns.items() if layer.scheme.tensor(name).role != "bias"})
    x = torch.randn(M, K, dtype=torch.float16).to(device)
    y = torch.empty(M, N, dtype=torch.float16, device=device)
    names = layer.kernel.variants(K)
    for name in names:
        y.fill_(float("nan"))
        layer.run_into(x, y, variant=name)
        if not y.isfinite().all():
            raise SystemExit(f"{name} leaves numbers unwritten")
    print(f"{len(names)} kernels ran")


if __name__ == "__main__":
    main()
