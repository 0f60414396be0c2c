"""qdsl.runtime: compiled schemes as torch modules.

    from qdsl.runtime import QuantLinear, load_quantized

    layer = QuantLinear("awq4", in_features=4096, out_features=11008, device="cuda")
    layer.load(tensors, prefix="model.layers.0.mlp.up_proj.", layout="autoawq")
    y = layer(x)

    model = load_quantized(AutoModelForCausalLM.from_config(config), directory)

Importing this package starts neither CUDA nor the compiler; kernels are opened at the first call, or by `prepare()`.

Environment:
    QDSL_ARTIFACTS   directories, separated as in PATH, each a compiled artifact or a folder of them.  A layer uses an
                     artifact found there when its scheme text and parameters are the layer's own and it has a library
                     for the device; only then the cache and the compiler are asked.
    QDSL_CACHE       where artifacts compiled on demand are kept
    QDSL_CPU_LEVEL   the highest CPU level to use, such as x86-64-v3; by default what the processor has
"""

from qdsl.artifact import Artifact, open_artifact
from qdsl.runtime.checkpoint import load_quantized
from qdsl.runtime.experts import QuantExperts
from qdsl.runtime.fused import QuantFused
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.stack import QuantStack

__all__ = ["Artifact", "QuantExperts", "QuantFused", "QuantLinear", "QuantStack", "load_quantized", "open_artifact"]
