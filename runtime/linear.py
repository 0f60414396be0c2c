"""QuantLinear: a linear layer whose weight is stored as a scheme says and multiplied by a compiled kernel.

Buffers carry the declared names and hold the kernel's layout; a checkpoint's layout is met once, in `load`.  Packed
tensors are bits, whatever their type says: `.half()`, `.to(dtype)` and autocast choose another kernel and never touch
them, and a move to a device whose kernels want another layout unpacks and packs again, without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qdsl.artifact import MANIFEST, Artifact, open_artifact
from qdsl.diagnostic import CheckpointError, Diagnostic, Error, closest, error
from qdsl.manifest import Buffer, Manifest, plain_params
from qdsl.order import SOURCE, Inputs, Order
from qdsl.runtime import pages, repack, weight
from qdsl.runtime.artifact import Kernel, find_artifact, refuse_in_capture, register
from qdsl.runtime.artifact import kernel as kernel_of
from qdsl.runtime.buffer import (
    float_format,
    inputs_of,
    moved,
    packed,
    plain_buffer,
    repacked,
    same_bits,
    signed,
    spelled,
    stored_shape,
    torch_type,
    unordered,
    unpacked,
)
from qdsl.runtime.op import linear, multiplied, rows, unseen
from qdsl.runtime.resolve import (
    check_codes,
    check_layer,
    check_quantizes,
    check_rows_stand_alone,
    follows,
    free_extents,
    free_names,
    kept_tensors,
    misfits,
    parsed,
    resolved,
    with_dtype,
)
from qdsl.runtime.state import EXTRA, Tag, tag
from qdsl.runtime.weight import quantized
from qdsl.scheme import Binding, Scheme, Storage, Tensor
from qdsl.slope import in_units_of_the_model, with_own_scales


class QuantLinear(nn.Module):
    """y = x·Wᵀ + b with W as a quantization scheme stores it.

    scheme        a shipped name, the path of a .q file, a `qdsl.Scheme`, or the directory of a compiled artifact
    in_features   K; `out_features` N, the rows of the weight
    bias          whether the scheme's optional bias is present
    device        "cpu", "cuda…" or "meta"; by default torch's
    dtype         torch.float16, bfloat16 or float32: sets the scheme's `act` parameter, by default the scheme's own
    artifact      a compiled artifact (or its directory) to use instead of searching for one
    compile       "auto" compiles what is found neither in $QDSL_ARTIFACTS nor in the cache; "never" raises instead
    phase         the layer's role where a scheme has phases, such as "prefill" or "decode": which activation block it
                  uses, and which tensors it loads; "both" and "" take the first
    batch_invariant   whether the bits of a row of y must not depend on the other rows, nor on how many there are: the
                  layer then keeps to kernels of one order of summation, which is not the fastest for every m. Without it
                  equal calls give equal bits, and other numbers of rows may take kernels that round differently
    params        parameters of the scheme, such as group=64

    The layer has no numbers until `load`, `load_state_dict` or `quantize`, and refuses to run before.
    """

    replaces = "weight"  # the first parameter of an nn.Linear, in whose place it stands

    def __init__(
        self, scheme: str | Path | Scheme, in_features: int, out_features: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        artifact: str | Path | Artifact | None = None, compile: str = "auto", phase: str = "",
        batch_invariant: bool = False, **params: Any,
    ):  # fmt: skip
        super().__init__()
        if compile not in ("auto", "never"):
            raise ValueError(f'compile is "auto" or "never", not {compile!r}')
        if in_features < 1 or out_features < 1:
            raise ValueError(f"a layer has at least one input and one output, not {in_features} and {out_features}")
        given = open_artifact(artifact) if isinstance(artifact, str | Path) else artifact
        if isinstance(scheme, str | Path) and (Path(scheme) / MANIFEST).is_file():
            given = open_artifact(scheme)
            scheme = parsed(given.manifest.text, given.manifest.scheme, tuple(given.manifest.params.items()))
        self.scheme = resolved(scheme, params, dtype)
        self.in_features, self.out_features, self.phase = in_features, out_features, phase
        self.batch_invariant = batch_invariant
        self._residual = next((t for t in self.scheme.output.tensors if t.role == "residual"), None)
        self._has_bias, self._compile, self._given = bias, compile, given
        self._origin = scheme.name if isinstance(scheme, Scheme) else str(scheme)
        check_layer(self.scheme, in_features, out_features, bias, phase)
        if batch_invariant:
            check_rows_stand_alone(self.scheme, phase)
        self._wanted = kept_tensors(self.scheme, bias, phase)
        self._free = dict.fromkeys(free_names(self._wanted), 0)  # extents that the layer's numbers decide
        self._held: dict[str, Buffer] = {}  # what each registered buffer holds
        self._keys: dict[torch.dtype, str] = {}  # activation type -> kernel
        self._operands: dict[torch.dtype, tuple[str, ...]] = {}  # activation type -> buffers, in the kernel's order
        self._ready: dict[torch.dtype, tuple[Kernel, Callable, int]] = {}  # what a plain call on the CPU needs
        self._derived_names: set[str] = set()  # buffers made from others for one kernel
        self._loaded = False
        device = torch.get_default_device() if device is None else torch.device(device)
        kernel = self._kernel_for(self.scheme, device)
        for name in self._wanted:
            self._held[name] = self._home(name, kernel, None)
            shape = stored_shape(self._held[name], self._wanted[name], self._shape(name), self._inputs)
            self.register_buffer(name, pages.zeros(shape, torch_type(self._held[name]), device))
        self._bind(kernel)

    # ---- what the layer is --------------------------------------------------------------------------------------
    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations the layer is made for."""
        found = repack.torch_dtype(self.scheme.output.dtype)
        assert found is not None, "checked at construction"
        return found

    @property
    def device(self) -> torch.device:
        return self._buffers[next(iter(self._wanted))].device

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias as it was loaded, or None."""
        name = next((t.name for t in self._wanted.values() if t.role == "bias"), None)
        return None if name is None else self._buffers[name]

    @property
    def kernel(self) -> Kernel:
        """The kernel of the layer's own activation type."""
        return kernel_of(self._keys[self.dtype])

    @property
    def manifest(self) -> Manifest:
        return self.kernel.artifact.manifest

    @property
    def width(self) -> int:
        """Features of y: fewer than `out_features` when the output block folds several rows into one."""
        half = self.scheme.output.half
        return self.out_features // half[1] if half else self.out_features

    def extra_repr(self) -> str:
        state = (", batch_invariant" if self.batch_invariant else "") + ("" if self._loaded else ", not loaded")
        phase = self.scheme.phase_of(self.phase)
        state = (f", phase={phase}" if phase else "") + state
        return f"{self.scheme.bound}, in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{state}"

    def _shape(self, name: str, free: Mapping[str, int] | None = None) -> tuple[int, ...]:
        return self._wanted[name].shape({**self._sizes, **(free or {})}, self.scheme)

    @property
    def _sizes(self) -> dict[str, int]:
        return {"e": 1, "m": 1, "n": self.out_features, "k": self.in_features, **self._free}

    def _free_extents(self, shapes: Mapping[str, Sequence[int]], loaded: bool = True) -> dict[str, int]:
        """The extents that tensors of these logical shapes decide; raises CheckpointError where they do not fit."""
        if not loaded or not self._free:
            return dict.fromkeys(self._free, 0)
        try:
            return free_extents(self.scheme, self.phase, shapes, self.out_features, self.in_features)
        except ValueError as problem:
            raise CheckpointError(f"{self.scheme.bound}: {problem}") from None

    @property
    def _inputs(self) -> Inputs:
        """The inputs; until the layer has numbers that name the groups of some, those of one group lie side by side."""
        if not self._loaded:
            return Inputs(self.in_features)
        return inputs_of(
            self.scheme, {name: (self._held[name], self._buffers[name]) for name in self._wanted}, self.in_features
        )

    # ---- kernels ------------------------------------------------------------------------------------------------
    def _kernel_for(self, scheme: Scheme, device: torch.device) -> Kernel:
        if device.type == "meta":  # buffers without numbers take the layout of the CPU; `to_empty` gives them another
            device = torch.device("cpu")
        refuse_in_capture(scheme, device.type)
        artifact = find_artifact(scheme, device, given=self._given, compile=self._compile, origin=self._origin)
        limit = artifact.manifest.max_k
        if limit is not None and self.in_features > limit:
            raise Error(
                f"{scheme.bound}: beyond k = {limit} a sum of products could overflow {scheme.compute.accumulator}, "
                f"and this layer has k = {self.in_features}"
            )
        return register(artifact, device, scheme, self.batch_invariant, scheme.phase_of(self.phase))

    def _follows(self, declared: Tensor) -> bool:
        return follows(self.scheme, declared)

    def _home(self, name: str, kernel: Kernel, held: Buffer | None) -> Buffer:
        """What a registered buffer holds: the kernel's layout, or its own plain values if it follows the activations."""
        declared = self._wanted[name]
        if not self._follows(declared):
            return kernel.buffers[name]
        return held or plain_buffer(declared, kernel.buffers[name].dtype)

    def _bind(self, kernel: Kernel) -> None:
        """Make `kernel` the layer's own.  The registered buffers already are in its layout."""
        self._keys, self._operands, self._ready = {}, {}, {}
        self._add(kernel)
        for name in self._derived_names - set(*self._operands.values()):
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._buffers[name]
        self._non_persistent_buffers_set.discard(name)
        self._derived_names.discard(name)

    def _add(self, kernel: Kernel) -> None:
        """Let the layer run a kernel of the layout it holds; what this kernel wants in another type is derived."""
        kind = repack.torch_dtype(kernel.scheme.output.dtype)
        assert kind is not None, "layers are made for activation types that torch has"
        names = []
        for name in kernel.names:
            if name == SOURCE:
                names.append("_x_source")
                fresh = self._source(kernel.order)
            else:
                buffer, declared = kernel.buffers[name], kernel.scheme.tensor(name)
                if name in self._wanted and same_bits(self._held[name], buffer):
                    names.append(name)
                    continue
                names.append(f"_{name}_{declared.dtype}")
                fresh = self._derived(name, declared, buffer)
            known = self._buffers.get(names[-1])
            if known is not None and known.shape == fresh.shape and known.device == fresh.device and not fresh.is_meta:
                known.copy_(fresh)  # in place, so that a captured graph sees the new values
            else:
                self.register_buffer(names[-1], pages.settled(fresh), persistent=False)
                self._derived_names.add(names[-1])
        self._operands[kind] = tuple(names)
        self._keys[kind] = kernel.key
        if self._loaded and self.device.type == "cpu" and not self._needs_residual:
            gather = itemgetter(*names) if len(names) > 1 else lambda buffers: [buffers[names[0]]]
            self._ready[kind] = kernel, gather, self.width
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Kernels read weights while the kernel before them may still run (`codegen.cuda.overlap`).
            torch.cuda.current_stream(self.device).synchronize()

    def _source(self, order: Order) -> torch.Tensor:
        """Of every input in the order of the kernels, where x has it; in torch's own memory, which is aligned."""
        return torch.tensor(order.runs(self._inputs).source, device=self.device)

    def _derived(self, name: str, declared: Tensor, buffer: Buffer) -> torch.Tensor:
        """A tensor that a kernel takes in another form than the layer keeps it."""
        if name not in self._wanted:  # optional and absent, or given with every call: a tensor of no elements
            # (0, 1, …), not (0, 0, …): kernels check strides, and torch gives an empty row the stride 1
            empty = (0, *[1] * (len(buffer.layout.axes) - 1))
            return torch.empty(empty, dtype=torch_type(buffer), device=self.device)
        held, tensor = self._held[name], self._buffers[name]
        if tensor.is_meta:
            shape = stored_shape(buffer, declared, self._shape(name), self._inputs)
            return torch.empty(shape, dtype=torch_type(buffer), device="meta")
        patterns = unpacked(held, declared, tensor, self._shape(name), self._inputs)
        if torch_type(held) != torch_type(buffer):
            patterns = declared.dtype.encode(float_format(held).decode(patterns))
        return packed(buffer, declared, patterns, self._inputs).to(tensor.device)

    def _settle(
        self, scheme: Scheme, device: torch.device, given: Mapping[str, tuple[Buffer, torch.Tensor]], loaded: bool
    ) -> None:
        """Adopt buffers, whatever layout they are in, for a scheme and a device.  Nothing changes if anything fails.

        loaded   whether they hold weights
        """
        bound = bool(self._keys) and scheme is self.scheme and device == self.device
        kernel = self.kernel if bound else self._kernel_for(scheme, device)
        inputs = inputs_of(scheme, given, self.in_features) if loaded else Inputs(self.in_features)
        # Tensors with such extents are held element by element, in their own shape.
        free = self._free_extents({name: tensor.shape for name, (_, tensor) in given.items()}, loaded)
        new, held = {}, {}
        for name, (buffer, tensor) in given.items():
            declared = scheme.tensor(name)
            if declared.dtype != self._wanted[name].dtype and not self._follows(self._wanted[name]):
                raise TypeError(
                    f"with {scheme.output.dtype} activations `{name}` would be {declared.dtype} instead of "
                    f"{self._wanted[name].dtype}, and stored tensors are never cast"
                )
            held[name] = self._home(name, kernel, buffer)
            new[name] = repacked(tensor, buffer, held[name], declared, self._shape(name, free), inputs, device)
        self.scheme, self._held, self._loaded, self._free = scheme, held, loaded, free
        self._wanted = kept_tensors(scheme, self._has_bias, self.phase)
        for name, tensor in new.items():
            known = self._buffers[name]
            same = known.shape == tensor.shape and known.dtype == tensor.dtype and known.device == tensor.device
            if same and not tensor.is_meta and known is not tensor:
                known.copy_(tensor)  # in place, so that a captured graph sees the new values
            elif known is not tensor:
                self._buffers[name] = pages.settled(tensor)
        self._bind(kernel)

    def prepare(self, device: torch.device | str | None = None) -> QuantLinear:
        """Compile or find, and load, every kernel the layer needs, after moving it to `device` if given.

        Call it before a CUDA graph is captured; the first call of the layer does the same otherwise.
        """
        if device is not None:
            self.to(device)
        for key in self._keys.values():
            kernel_of(key).load()
        return self

    # ---- running ------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] for x [..., K], in the type of x (of autocast, where that is on).

        residual   [..., N], for a scheme whose output block declares one: added where that block says
        """
        autocast = torch._C._is_any_autocast_enabled()
        if residual is None and not autocast and unseen(x):  # one token's product takes as long as some tens of lines
            ready = self._ready.get(x.dtype)
            if ready is not None and x.shape[-1:] == (self.in_features,):
                kernel, gather, width = ready
                return multiplied(kernel, x, gather(self._buffers), width)
        if autocast:
            x = _autocast(x)
        key = self._keys.get(x.dtype)
        if key is None or not (self._loaded or x.is_meta) or x.dim() == 0 or x.shape[-1] != self.in_features:
            key = self._explain(x)
        operands = [self._buffers[name] for name in self._operands[x.dtype]]
        if operands[0].device != x.device:
            raise ValueError(f"x is on {x.device}, the layer on {self.device}; move one of them with .to()")
        if residual is not None or self._needs_residual:
            self._add_residual(x, operands, residual)
        return linear(x, operands, self.width, key)

    def run_into(
        self, x: torch.Tensor, y: torch.Tensor, variant: str | None = None, residual: torch.Tensor | None = None
    ) -> None:
        """Run on x [m, K] into a given contiguous y [m, N], outside autograd.

        `variant` is one of `kernel.variants(K)`, by default the artifact's own choice for m, N and K.
        """
        key = self._keys.get(x.dtype)
        if key is None or not self._loaded or x.shape[-1] != self.in_features:
            key = self._explain(x)
        if x.dim() != 2:
            raise ValueError(f"x is {list(x.shape)}, needed is [m, {self.in_features}]")
        if tuple(y.shape) != (x.shape[0], self.width) or y.dtype != x.dtype or not y.is_contiguous():
            raise ValueError(
                f"y is {list(y.shape)} {y.dtype} of strides {list(y.stride())}, needed is a contiguous [{x.shape[0]}, {self.width}] {x.dtype}"
            )
        if not x.shape[0]:
            return
        kernel, operands = kernel_of(key), [self._buffers[name] for name in self._operands[x.dtype]]
        if residual is not None or self._needs_residual:
            self._add_residual(x, operands, residual)
        if variant is None:
            kernel.run_into(rows(x), operands, y)
        elif variant not in (known := kernel.variants(self.in_features)):
            raise ValueError(f"{self.scheme.bound} has no kernel `{variant}` for this layer; it has {', '.join(known)}")
        else:
            kernel.run_variant(variant, rows(x), operands, y)

    def last_step(self, x: torch.Tensor, y: torch.Tensor) -> Callable[[QuantLinear], None]:
        """For benchmarks: `run_into` after x has been quantized, as a call that takes this layer or a copy of it.

        Everything runs once here; the call multiplies what that has left of x, into the same y.  The CPU's SIMD kernels
        quantize x in the same step, which then is all of it.
        """
        self.run_into(x, y)  # says what is wrong with x or y
        names = self._operands[x.dtype]
        call = kernel_of(self._keys[x.dtype]).last_step(rows(x), [self._buffers[name] for name in names], y)
        return lambda layer: call([layer._buffers[name] for name in names])

    @property
    def _needs_residual(self) -> bool:
        declared = self._residual
        return declared is not None and not declared.optional

    def _add_residual(self, x: torch.Tensor, operands: list[torch.Tensor], residual: torch.Tensor | None) -> None:
        """Put the residual among the operands of a call; raises ValueError if it is not what the scheme declares."""
        declared = self._residual
        if declared is None:
            raise ValueError(
                f"{self.scheme.bound} adds no residual; declare one in its output block: "
                f"`residual r[m, n] : {self.scheme.output.dtype} optional`"
            )
        at = kernel_of(self._keys[x.dtype]).names.index(declared.name)
        shape, kind = [*x.shape[:-1], self.width], operands[at].dtype
        if residual is None:
            raise ValueError(
                f"{self.scheme.bound} needs its residual `{declared.name}` with every call: {shape} {kind}"
            )
        if list(residual.shape) != shape or residual.dtype != kind or residual.device != x.device:
            raise ValueError(
                f"the residual is {list(residual.shape)} {residual.dtype} on {residual.device}, "
                f"needed is {shape} {kind} on {x.device}"
            )
        operands[at] = rows(residual)

    def _explain(self, x: torch.Tensor) -> str:
        """The key of a kernel for an input that the fast path did not take, or the error that says why there is none."""
        if not (self._loaded or x.is_meta):  # shapes need no weights
            raise Error(
                f"this QuantLinear ({self.scheme.bound}) has no weights yet; load(), load_state_dict() and quantize() give it some"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            found = f"{x.shape[-1]} features" if x.dim() else "no dimension"
            raise ValueError(f"x {list(x.shape)} has {found}, the layer takes in_features = {self.in_features}")
        if x.dtype in self._keys:
            return self._keys[x.dtype]
        kernel = self._kernel_for(with_dtype(self.scheme, x.dtype), self.device)
        if any(
            not self._follows(self._wanted[name]) and kernel.buffers[name] != held for name, held in self._held.items()
        ):
            raise TypeError(
                f"x is {x.dtype}, and the weights are laid out for the {self.dtype} kernels of this device; "
                f"call layer.to({x.dtype}), or give it {self.dtype}"
            )
        self._add(kernel)
        return kernel.key

    # ---- numbers ------------------------------------------------------------------------------------------------
    def load(self, tensors: Mapping[str, torch.Tensor], prefix: str = "", layout: str | None = None) -> QuantLinear:
        """Take the layer's tensors from a checkpoint.

        tensors   stored tensors by full name
        prefix    what stands before the layout's names, such as "model.layers.0.mlp.up_proj."
        layout    one of the scheme's layouts; may be left out when it has one

        Every shape and type is checked before anything is read, and everything is read before the layer changes; raises
        CheckpointError with all that is wrong.
        """
        storage = self._storage(layout)
        problems = self.mismatches(tensors, prefix, layout)
        given: dict[str, tuple[Buffer, torch.Tensor]] = {}
        for binding in () if problems else storage.bindings:
            try:
                if binding.tensor in self._wanted:
                    given[binding.tensor] = self._read(storage, binding, tensors, prefix)
            except ValueError as problem:
                problems.append(error("value", str(problem), binding.span))
        if problems:
            raise CheckpointError("\n\n".join(map(str, problems)))
        self._take(given)
        return self

    def mismatches(
        self, tensors: Mapping[str, torch.Tensor], prefix: str = "", layout: str | None = None
    ) -> list[Diagnostic]:
        """What keeps `load` from reading these tensors, by shape and type alone (they may be on the meta device)."""
        n, k = self.out_features, self.in_features
        return misfits(self.scheme, self._storage(layout), n, k, self._has_bias, self.phase, tensors, prefix)

    def _read(
        self, storage: Storage, binding: Binding, tensors: Mapping[str, torch.Tensor], prefix: str
    ) -> tuple[Buffer, torch.Tensor]:
        """One tensor in the layout the layer holds it in."""
        declared, shape = self._wanted[binding.tensor], self._shape(binding.tensor)
        if self._follows(declared):
            found = tensors[prefix + binding.source]
            kind = repack.format_of(found.dtype)
            assert kind is not None, "mismatches() admits only floats here"
            own = replace(binding, stored=kind, layout=replace(binding.layout, bits=kind.bits, word=kind.bits))
            words = repack.bits_of(found).reshape(own.layout.stored_shape(shape))
            patterns = repack.patterns_of(own, replace(declared, dtype=kind), words, kind, shape)
            return plain_buffer(declared, spelled(found.dtype)), repack.tensor_of(patterns, found.dtype)
        patterns = repack.read(self.scheme, storage, binding, tensors, prefix, self._sizes)
        check_codes(self.scheme, declared, patterns, prefix + binding.source)
        return self._packed(declared.name, patterns)

    def _packed(self, name: str, patterns: np.ndarray) -> tuple[Buffer, torch.Tensor]:
        held = self._held[name]
        if self._follows(self._wanted[name]):  # may be held in another type at the moment
            held = plain_buffer(self._wanted[name], self.kernel.buffers[name].dtype)
        if held.order or held.parts > 1:  # not all that it takes is known yet
            held = unordered(self._wanted[name], held)
        return held, repack.tensor_of(held.layout.pack(patterns), torch_type(held))

    def _storage(self, layout: str | None) -> Storage:
        layouts = self.scheme.layouts
        if layout is None and len(layouts) == 1:
            return next(iter(layouts.values()))
        if layout is None or layout not in layouts:
            hint = f"; did you mean `{match}`?" if layout and (match := closest(layout, layouts)) else ""
            wanted = "name one of its layouts" if layout is None else f"no layout `{layout}`{hint}"
            raise CheckpointError(f"{self.scheme.bound}: {wanted} ({', '.join(layouts) or 'it has none'})")
        return layouts[layout]

    def set_patterns(self, patterns: Mapping[str, np.ndarray]) -> QuantLinear:
        """Take logical bit patterns (what `Layout.unpack` and `qdsl.reference.quantize` give) by declared name."""
        missing = [name for name in self._wanted if name not in patterns]
        if missing:
            raise CheckpointError(f"{self.scheme.bound}: no patterns for {', '.join(f'`{name}`' for name in missing)}")
        free = self._free_extents({name: patterns[name].shape for name in self._wanted})
        for name in self._wanted:
            if tuple(patterns[name].shape) != self._shape(name, free):
                found, needed = list(patterns[name].shape), list(self._shape(name, free))
                raise CheckpointError(f"{self.scheme.bound}: `{name}` is {found}, the layer needs {needed}")
        self._take({name: self._packed(name, np.asarray(patterns[name])) for name in self._wanted})
        return self

    def _take(self, given: Mapping[str, tuple[Buffer, torch.Tensor]]) -> None:
        """Give the layer all its numbers."""
        given = {name: given[name] for name in self._wanted}  # in declared order, wherever they come from
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        self._settle(self.scheme, device, given, loaded=True)

    @classmethod
    def from_float(cls, linear: nn.Linear, scheme: str | Path | Scheme, **options: Any) -> QuantLinear:
        """A layer quantized from an nn.Linear by the scheme's `quantize` block.

        `options` are those of the constructor; device and dtype default to the linear's.  Raises what `quantize` does.
        """
        weight, bias = linear.weight.detach(), linear.bias
        options = {"device": weight.device, "dtype": weight.dtype, **options}
        layer = cls(scheme, linear.in_features, linear.out_features, bias is not None, **options)
        return layer.quantize(weight, None if bias is None else bias.detach())

    def quantize(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantLinear:
        """Take float numbers, weight [N, K] and bias [N], through the scheme's `quantize` block.

        Raises Error where the scheme has none, needs calibration, or can't hold the numbers.
        """
        check_quantizes(self.scheme, self._has_bias, self.phase)
        needed = (self.out_features, self.in_features)
        if tuple(weight.shape) != needed or (bias is not None) != self._has_bias:
            raise Error(
                f"{self.scheme.bound}: the layer needs a weight {list(needed)} with{'' if self._has_bias else 'out'} a bias, "
                f"not {list(weight.shape)} with{'' if bias is not None else 'out'} one"
            )
        if weight.is_meta:
            raise Error(f"{self.scheme.bound}: the weight is on the meta device and has no numbers to quantize")
        return self.set_weight(quantized(self.scheme, weight), bias)

    def set_weight(self, patterns: Mapping[str, np.ndarray], bias: torch.Tensor | None) -> QuantLinear:
        """Take logical bit patterns of the weight's tensors, and float numbers of the bias where the layer has one."""
        given = {}
        for name, declared in self._wanted.items():
            if name in patterns:
                given[name] = self._packed(name, patterns[name])
            elif (
                self._follows(declared) and repack.format_of(bias.dtype) is not None
            ):  # kept as it is, in memory of its own
                given[name] = (
                    plain_buffer(declared, spelled(bias.dtype)), repack.tensor_of(repack.bits_of(bias), bias.dtype)
                )  # fmt: skip
            else:
                given[name] = self._packed(name, declared.dtype.encode(bias.double().cpu().numpy()))
        self._take(given)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The model's weight [N, K] on the layer's device: exact in float64, or rounded once from that to `dtype`.

        Where the scheme counts x or y in units of its own, as of codes, these are in it (`qdsl.slope`).
        """
        if not self._loaded:
            raise Error("there is nothing to dequantize: the layer has no weights yet")
        n, k, scheme = self.out_features, self.in_features, in_units_of_the_model(self.scheme, self.phase)
        given = with_own_scales(scheme, weight.patterns(scheme, self._buffers, self._held, n, k))
        if dtype is None or dtype == torch.float64:
            return torch.from_numpy(weight.decoded(scheme, given, n, k)).to(self.device)
        kind = repack.format_of(dtype)
        if kind is None:
            raise TypeError(f"dequantize gives float64, float32, float16 or bfloat16, not {dtype}")
        return repack.tensor_of(weight.rounded(scheme, given, n, k, kind), dtype).to(self.device)

    # ---- moving, copying, saving --------------------------------------------------------------------------------
    def _apply(self, fn, recurse=True):
        """Move as nn.Module does, but never cast what is packed: a new float type selects another kernel."""
        kind = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        scheme = with_dtype(self.scheme, kind) if kind.is_floating_point else self.scheme
        was_meta = self.device.type == "meta"
        given = {name: (self._held[name], moved(self._buffers[name], fn)) for name in self._wanted}
        device = next(iter(given.values()))[1].device
        changed = scheme is not self.scheme or device != self.device
        if changed:
            self._settle(scheme, device, given, self._loaded and not was_meta and device.type != "meta")
        own = {name: self._buffers.pop(name) for name in (*self._wanted, *self._derived_names)}
        try:
            super()._apply(fn, recurse)  # whatever else was registered on the layer
        finally:
            self._buffers.update(own)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the kernels, which the next process finds by the scheme."""
        state = self.__dict__.copy()
        state["scheme"] = (self.scheme.text, self.scheme.name, tuple(plain_params(self.scheme).items()))
        state["_given"] = self._given and self._given.path
        state["_buffers"] = {name: signed(b) for name, b in self._buffers.items() if name not in self._derived_names}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - self._derived_names
        return {name: value for name, value in state.items() if name not in ("_keys", "_operands", "_ready", "_wanted")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.scheme = parsed(*state["scheme"])
        path = state["_given"]
        self._given = open_artifact(path) if path is not None and (path / MANIFEST).is_file() else None
        self._wanted = kept_tensors(self.scheme, self._has_bias, self.phase)
        self._keys, self._operands, self._ready, self._derived_names = {}, {}, {}, set()
        for name, buffer in self._held.items():
            self._buffers[name] = pages.settled(self._buffers[name].view(torch_type(buffer)))
        held = {name: (self._held[name], self._buffers[name]) for name in self._wanted}
        self._settle(self.scheme, self.device, held, self._loaded)

    @property
    def tag(self) -> Tag:
        """What the buffers of a state_dict mean."""
        return tag(self.scheme, self.out_features, self.in_features, self.manifest.kind, self._held, self._loaded)

    def state_for(self, buffers: Sequence[Buffer], kind: str) -> dict[str, torch.Tensor]:
        """The state_dict of the layer as kernels of another target take it, on the CPU.

        buffers   how those kernels take tensors (`qdsl.compilation.kernel_buffers`)
        kind      the kind of their device, "cpu" or "cuda"
        """
        wanted = {b.tensor: b for b in buffers}
        held = {name: own if self._follows(self._wanted[name]) else wanted[name] for name, own in self._held.items()}
        state = {
            name: repacked(
                self._buffers[name], own, held[name], self._wanted[name], self._shape(name), self._inputs,
                torch.device("cpu"),
            )
            for name, own in self._held.items()
        }  # fmt: skip
        told = tag(self.scheme, self.out_features, self.in_features, kind, held, self._loaded)
        return {**state, EXTRA: told.to_tensor()}

    def get_extra_state(self) -> torch.Tensor:
        """What the buffers of a state_dict mean, as bytes (`qdsl.runtime.state`)."""
        return self.tag.to_tensor()

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Done by `_load_from_state_dict`, which must know the tag before it reads a buffer."""

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Take saved buffers, repacked if they are in the layout of another device; a tag that disagrees is an error."""
        names = {name: prefix + name for name in self._wanted}
        missing = [key for key in (*names.values(), prefix + EXTRA) if key not in state_dict]
        known = {*names.values(), prefix + EXTRA}
        if strict:
            missing_keys += missing
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        if missing:
            if len(missing) == 1 and missing[0].endswith(EXTRA):
                error_msgs.append(
                    f"{missing[0]} is missing: without it nobody knows the layout of the buffers beside it"
                )
            return
        try:
            saved = Tag.from_tensor(state_dict[prefix + EXTRA])
        except CheckpointError as problem:
            error_msgs.append(f"{prefix.rstrip('.') or 'the layer'}: {problem}")
            return
        given, problem = {}, self.tag.disagreement(saved)
        if not problem:
            given = {b.tensor: (b, state_dict[prefix + b.tensor]) for b in saved.buffers if b.tensor in self._wanted}
            problem = self._misfit(given, saved.loaded)
        if problem:
            error_msgs.append(f"{prefix.rstrip('.') or 'the layer'}: {problem}")
            return
        assign = local_metadata.get("assign_to_params_buffers", False) or self.device.type == "meta"
        device = next(iter(given.values()))[1].device if assign else self.device
        self._settle(self.scheme, device, given, saved.loaded)

    def _misfit(self, given: Mapping[str, tuple[Buffer, torch.Tensor]], loaded: bool) -> str:
        """Where saved buffers are not of the shape and type that their tag says; empty when they are."""
        inputs = Inputs(self.in_features)
        try:
            free = self._free_extents({name: tensor.shape for name, (_, tensor) in given.items()}, loaded)
        except CheckpointError as problem:
            return str(problem)
        for name, (buffer, tensor) in sorted(given.items(), key=lambda item: item[1][0].order is not None):
            needed = stored_shape(buffer, self._wanted[name], self._shape(name, free), inputs)
            if tuple(tensor.shape) != needed or tensor.dtype != torch_type(buffer):
                return f"{name} is {list(tensor.shape)} {tensor.dtype}, its tag says {list(needed)} {buffer.dtype}"
            if loaded and self._wanted[name].role == "index":
                inputs = inputs_of(self.scheme, given, self.in_features)
        return ""


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the type that autocast wants of its device, where that is on."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
