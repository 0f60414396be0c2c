"""The tag that travels with a layer's saved buffers, so that bits are never read by the wrong layout.

A state_dict holds buffers in kernel layout.  Beside them lies `_extra_state`: a tensor of bytes (so that safetensors and
`torch.load(weights_only=True)` take it) with what the buffers mean, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from qdsl.diagnostic import CheckpointError
from qdsl.manifest import Buffer, buffer_from_json, plain_params
from qdsl.scheme import Scheme

FORMAT = 2
EXTRA = "_extra_state"  # torch's name for what `get_extra_state` returns


@dataclass(frozen=True)
class Tag:
    """What a layer's buffers hold.

    scheme    name and parameters
    meaning   one line per thing that must agree before bits can be reinterpreted: sizes, declarations, equations
    kind      the device kind whose kernels the layout is for
    loaded    whether the buffers hold weights at all
    """

    scheme: str
    text: str
    params: Mapping[str, int | str]
    meaning: Sequence[str]
    kind: str
    buffers: tuple[Buffer, ...]
    loaded: bool

    def to_tensor(self) -> torch.Tensor:
        data = asdict(self)
        for entry, buffer in zip(data["buffers"], self.buffers, strict=True):
            entry["line"] = f"{buffer.tensor}{buffer.layout}"
        return torch.from_numpy(np.frombuffer(json.dumps({"format": FORMAT, **data}).encode(), np.uint8).copy())

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> Tag:
        """The tag back from its bytes; raises CheckpointError when they are not one."""
        try:
            data = json.loads(bytes(tensor.cpu().numpy()))
            if data.pop("format") != FORMAT:
                raise ValueError(f"not format {FORMAT}")
            data["buffers"] = tuple(map(buffer_from_json, data["buffers"]))
            return Tag(**data)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"its `_extra_state` is not a qdsl tag ({problem})") from None

    def disagreement(self, saved: Tag) -> str:
        """Where a saved tag means something else than this one, both sides shown; empty when they agree."""
        if list(saved.meaning) == list(self.meaning):
            return ""
        ours, theirs = list(self.meaning), list(saved.meaning)
        lines = [f"saved from {saved.scheme}, loaded into {self.scheme}:"]
        lines += [f"  saved: {line}" for line in theirs if line not in ours]
        lines += [f"  layer: {line}" for line in ours if line not in theirs]
        return "\n".join(lines)


def tag(scheme: Scheme, n: int, k: int, kind: str, held: Mapping[str, Buffer], loaded: bool) -> Tag:
    """The tag of a layer; `held` is what each of its buffers holds."""
    output = {t.name for t in scheme.output.tensors}
    declared = [t for t in scheme.tensors if t.name in held and t.name not in output]
    meaning = [f"n = {n}, k = {k}", *(str(t) for t in declared), f"w ~ {scheme.weight.decode}"]
    meaning += [f"{t.name} = {list(t.value)}" for t in scheme.weight.tensors if isinstance(t.value, tuple)]
    meaning += [f"x ~ {a.operand.decode}" for a in scheme.activations]
    meaning += [f"y = {scheme.output.value}"]
    buffers = tuple(held[t.name] for t in scheme.tensors if t.name in held)  # in one order, however they came
    return Tag(scheme.bound, scheme.text, plain_params(scheme), meaning, kind, buffers, loaded)
