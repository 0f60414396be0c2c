"""`from_pretrained` of transformers through qdsl; importing this module registers it.

    import qdsl.runtime.transformers
    model = AutoModelForCausalLM.from_pretrained("converted")  # what `qdsl convert` or `save_pretrained` wrote

    from qdsl.runtime.transformers import QdslConfig
    model = AutoModelForCausalLM.from_pretrained("an-awq-model", quantization_config=QdslConfig())
    model = AutoModelForCausalLM.from_pretrained("a-float-model", quantization_config=QdslConfig("awq4", group=64))

transformers builds the model on the meta device, then reads and places what is dense.  What is quantized is found and
loaded as `load_quantized` does it: before anything is read the whole checkpoint is matched with the model, and at the end
every quantized module becomes a layer on the device where transformers has put the room for it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import modeling_utils
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qdsl.diagnostic import CheckpointError, Error
from qdsl.runtime.checkpoint import empty_layer, empty_layers, filled, progress, put
from qdsl.runtime.checkpoints import converted
from qdsl.runtime.checkpoints.experts import spellings
from qdsl.runtime.examination import Examination, examine, refuse, scheme_for_floats, wish
from qdsl.runtime.experts import QuantExperts, parts_of
from qdsl.runtime.fused import QuantFused
from qdsl.runtime.linear import QuantLinear
from qdsl.runtime.op import bent
from qdsl.runtime.stored import weights_file
from qdsl.scheme import Scheme
from qdsl.slope import in_units_of_the_model

OLDEST = "5.12"  # what it calls here, older ones call in other ways
if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"qdsl.runtime.transformers needs transformers {OLDEST} or newer, and {transformers.__version__} is installed; "
        "load_quantized works with any"
    )

__all__ = ["QdslConfig", "QdslQuantizer"]


@register_quantization_config(converted.METHOD)
class QdslConfig(QuantizationConfigMixin):
    """Read a checkpoint as `load_quantized` does, whatever `quant_method` its config.json names.

    compile           "auto" compiles kernels that are not found, "never" raises with the command to run instead
    batch_invariant   whether the bits of a row may not depend on the other rows, as for QuantLinear
    phase             the model's role where a scheme has phases, such as "prefill"
    settings          in place of the quantization settings that the checkpoint has, where it is labelled wrong
    scheme            of a float checkpoint: its linears are quantized as they are loaded, except those that `skip` names
    params            the scheme's parameters, which may be given by name as well: QdslConfig(scheme="awq4", group=64)

    These are choices of this load: `save_pretrained` writes none of them, but what has come of them.  Raises Error where no
    such scheme, or parameter of it, is known.
    """

    def __init__(
        self, scheme: str | Path | Scheme | None = None, params: Mapping[str, Any] | None = None,
        skip: Sequence[str] | None = None, compile: str = "auto", batch_invariant: bool = False, phase: str = "",
        settings: Mapping[str, Any] | None = None, **more: Any,
    ):  # fmt: skip
        for name, stated in converted.settings().items():  # of a config.json
            if more.pop(name, stated) != stated:
                raise ValueError(f"quantization_config: {name} is {stated!r} in what this version of qdsl reads")
        if more and scheme is None:
            raise TypeError(
                f"QdslConfig has no {', '.join(f'`{name}`' for name in more)}; a scheme's parameters need a scheme"
            )
        params = params if scheme is None else {**(params or {}), **more}
        scheme_for_floats(scheme, params, skip)  # may raise
        self.quant_method = converted.METHOD
        self.scheme, self.params, self.skip = scheme, params, skip
        self.compile, self.batch_invariant, self.phase = compile, batch_invariant, phase
        self.settings = dict(settings or {})

    @property
    def options(self) -> dict[str, Any]:
        """Of the layers' constructor."""
        return {"compile": self.compile, "batch_invariant": self.batch_invariant, "phase": self.phase}

    def to_dict(self) -> dict[str, Any]:
        return converted.settings()


@register_quantizer(converted.METHOD)
class QdslQuantizer(HfQuantizer):
    """What transformers asks while it loads and saves a model."""

    quantization_config: QdslConfig

    def __init__(self, quantization_config: QdslConfig, **options: Any):
        super().__init__(quantization_config, **{**options, "pre_quantized": True})  # of what transformers itself loads

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, Mapping) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                f"device_map puts modules on {', '.join(sorted(places))}: quantized layers can't be offloaded; name one "
                'device, or GPUs alone (device_map="auto" may fit with a larger max_memory)'
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype is {dtype}: activations are float16, bfloat16 or float32")
        return dtype

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        """Find out what is quantized, and leave room for it."""
        if not checkpoint_files:
            raise ValueError("qdsl reads the files of a checkpoint; from_pretrained was given a state_dict")
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError("tensor parallelism of transformers can't slice quantized layers; leave out tp_plan")
        self.directory = Path(checkpoint_files[0]).parent
        config = self.quantization_config
        with _usual_defaults(), _tied(model):
            asked = wish(model, config.scheme, config.params, config.skip)
            prefix = _prefix(model, checkpoint_files)
            self.found = examine(model, self.directory, config.phase, config.settings, asked, prefix=prefix)
        for notice in self.found.notices:
            warnings.warn(f"{self.directory}: {notice}", stacklevel=2)
        refuse(self.directory, [*self.found.problems, *_rearranged(self.found)])
        layers = empty_layers(model, self.directory, self.found, torch.device("meta"), None, config.options)
        self.replaced = {name: model.get_submodule(name) for name in layers}
        for name, layer in layers.items():
            put(model, name, Room(sum(buffer.nbytes for buffer in layer.buffers())))
        for name in [n for n in model.all_tied_weights_keys if n.rpartition(".")[0] in layers]:
            del model.all_tied_weights_keys[name]  # a head that is stored quantized is not tied
        around = {spelling for name in layers for spelling in spellings(name)}
        around |= {stored for name in layers for stored in self.found.fused.stored(name)}
        inside = re.escape(prefix)
        ours = [rf"^{inside}{re.escape(name)}\." for name in around]
        ours += [f"^{inside}{re.escape(name)}$" for name in self.found.plan.skipped]
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ours}

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        """Put a layer into every room."""
        found, options = self.found, self.quantization_config.options
        for name in progress(
            self.replaced,
            "loading quantized layers" if self.quantization_config.scheme is None else "quantizing layers",
        ):
            old, device = self.replaced[name], model.get_submodule(name).room.device
            layer = empty_layer(name, old, found, device, None, options)
            put(model, name, filled(layer, name, found, next(old.parameters()).dtype))
        model._weight_conversions = []  # or `save_pretrained` would give tensors the names of older models
        del self.found, self.replaced, model._keys_to_ignore_on_load_unexpected  # back to the class's own

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # of a configuration that has been saved
        layers = _layers(model)
        if experts := [name for name, layer in layers.items() if isinstance(layer, QuantExperts)]:
            raise Error(
                f"{experts[0]}: experts stay quantized; load_quantized leaves the checkpoint's floats as they are"
            )
        for name, layer in layers.items():
            for own in parts_of(layer).values():
                if reason := bent(own.scheme):
                    raise Error(f"{name}: {own.scheme.bound} has no nn.Linear to become: {reason}; it stays quantized")
        for name, layer in layers.items():
            bias = _float_bias(layer)
            dense = nn.Linear(layer.in_features, layer.out_features, bias is not None, "meta", dtype)
            dense.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
            if bias is not None:
                dense.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
            put(model, name, dense)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes: the form of `qdsl convert`, in the layout of the device the model is on."""
        state, layers = model.state_dict(), _layers(model)
        for name, layer in layers.items():
            state |= converted.guard(f"{name}.{layer.replaces}", state)
        return state, converted.metadata(own.tag for layer in layers.values() for own in parts_of(layer).values())

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: gradients go through to the input

    @property
    def is_compileable(self) -> bool:
        return True


class Room(nn.Module):
    """Where a quantized layer will be, while transformers places the rest of the model: as many bytes, in no state_dict."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("room", torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)


def _float_bias(layer: QuantLinear | QuantFused) -> torch.Tensor | None:
    """What is added to x·Wᵀ, or None: y of zeros where sums are counted in units of their own, which may hold x's zero point."""
    parts = parts_of(layer).values()
    counted = [in_units_of_the_model(part.scheme, part.phase) is not part.scheme for part in parts]
    if layer.bias is None and not any(counted):
        return None
    biases = []
    for part, own in zip(parts, counted, strict=True):
        zero = torch.zeros(part.in_features, dtype=part.dtype, device=part.device)
        biases.append(part(zero) if own or part.bias is None else part.bias)
    return torch.cat(biases)


def _layers(model: nn.Module) -> dict[str, QuantLinear | QuantFused | QuantExperts]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear | QuantFused | QuantExperts)}
    return {name: m for name, m in found.items() if name.rpartition(".")[0] not in found}


def _prefix(model: nn.Module, files: Sequence[str]) -> str:
    """What transformers drops of the names of a checkpoint, where the model is the part of it without a head."""
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or hasattr(model, model.base_model_prefix):
        return ""
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            if any(name.startswith(prefix) for name in opened.keys()):  # noqa: SIM118  (a file handle, not a dictionary)
                return prefix
    return ""


def _rearranged(found: Examination) -> list[str]:
    """Linears that are not quantized, and which transformers looks for under the model's names."""
    names = (name for name in (*found.fused.joined, *found.fused.rows) if name not in found.quantized)
    return [
        f"`{name}` is stored as {', '.join(f'`{each}`' for each in found.fused.stored(name))} and is not quantized; "
        "load_quantized reads it, and so does from_pretrained after `qdsl convert`"
        for name in names
    ]


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """torch's own device and type for new tensors: transformers has others while it builds a model."""
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(kind)


@contextmanager
def _tied(model: nn.Module) -> Iterator[None]:
    """The model with its tied parameters the same objects, which they are not while transformers loads it."""
    own = {}
    for target, source in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        own[target] = model.get_parameter(target)
        setattr(model.get_submodule(module), name, model.get_parameter(source))
    try:
        yield
    finally:
        for target, parameter in own.items():
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, parameter)


# ---- in place of the format that config.json names ---------------------------------------------------------------
_get_hf_quantizer = modeling_utils.get_hf_quantizer


def _ours_first(config: Any, quantization_config: Any, *args: Any, **options: Any) -> Any:
    """As transformers' own, which refuses a configuration of another format than config.json names, and files of other
    names than its own: with a QdslConfig they are found as `load_quantized` finds them."""
    if isinstance(quantization_config, QdslConfig):
        directory = Path(getattr(config, "_name_or_path", ""))
        if directory.is_dir() and not hasattr(config, "transformers_weights"):
            with suppress(
                CheckpointError
            ):  # in a subfolder perhaps; transformers looks there, or says that there are none
                config.transformers_weights = weights_file(directory).name
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
    return _get_hf_quantizer(config, quantization_config, *args, **options)


modeling_utils.get_hf_quantizer = _ours_first
