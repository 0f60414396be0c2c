"""From a compiled artifact to calls: which library fits this machine, and which of its variants serves what.

A `Kernel` is one artifact on one architecture, for layers that want the fastest variants or for those that want one order
of summation.  It lives once in the process, in a table under a text key, so that a
traced graph, a pickle or a copied layer needs to hold nothing but the key.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch

import qdsl
from qdsl import cache
from qdsl.artifact import Artifact, open_artifact
from qdsl.choice import Limits
from qdsl.compilation import default_archs, kernel_buffers, toolchain
from qdsl.diagnostic import ArtifactError, Error, TargetError
from qdsl.dtype import DType
from qdsl.expr import Expr
from qdsl.manifest import Buffer, plain_params
from qdsl.order import ORDERED, SOURCE, Order
from qdsl.runtime.processor import cpu_levels
from qdsl.runtime.repack import torch_dtype
from qdsl.scheme import Scheme, Var
from qdsl.split import WIDENED
from qdsl.transform import loaded, passes, widths

ALIGNMENT = 64  # bytes; what the kernels' widest loads ask of a tensor's first element

_GPUS = (121, 120, 103, 100, 90, 89, 87, 86, 80)


# ---- architectures -----------------------------------------------------------------------------------------------
def best_arch(device: torch.device) -> str:
    """The architecture to compile for on this device."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) == (9, 0):
            return "sm_90a"
        this = 10 * major + minor  # a GPU newer than qdsl runs the PTX of the newest one that qdsl knows
        return f"sm_{max((known for known in _GPUS if known <= this), default=this)}"
    if device.type == "cpu":
        if not cpu_levels():
            raise TargetError(f"this processor ({platform.machine()}) is older than every level qdsl compiles for")
        return cpu_levels()[0]
    raise TargetError(f"qdsl has kernels for the cpu and cuda devices, not for `{device.type}`")


def fitting_arch(libraries: Sequence[str], device: torch.device) -> str | None:
    """The best of an artifact's architectures that runs on the device, or None.

    CUDA: code of exactly this GPU first (sm_90a runs on capability 9.0 alone), else the newest that is not newer, whose
    PTX the driver compiles.
    """
    if device.type == "cpu":
        return next((level for level in cpu_levels() if level in libraries), None)
    return fitting_cuda_arch(libraries, torch.cuda.get_device_capability(device))


def fitting_cuda_arch(libraries: Sequence[str], capability: tuple[int, int]) -> str | None:
    """As `fitting_arch`, for a compute capability such as (9, 0)."""
    this = capability[0] * 10 + capability[1]
    if f"sm_{this}a" in libraries:
        return f"sm_{this}a"
    general = [arch for arch in libraries if arch[3:].isdigit() and int(arch[3:]) <= this]
    return max(general, key=lambda arch: int(arch[3:]), default=None)


# ---- finding artifacts -------------------------------------------------------------------------------------------
def command(scheme: Scheme, origin: str, kind: str, arch: str) -> str:
    """The command that compiles a scheme."""
    params = "".join(f" -P {name}={value}" for name, value in plain_params(scheme).items())
    return f"qdsl compile {origin}{params} --target {kind} --arch {arch}"


def find_artifact(
    scheme: Scheme, device: torch.device, *, given: Artifact | None = None, compile: str = "auto", origin: str = ""
) -> Artifact:
    """The artifact of a scheme for a device.

    Looked for in this order: `given`; the directories of $QDSL_ARTIFACTS; the cache; and, unless `compile` is "never",
    the compiler.  Raises ArtifactError or TargetError with the command that makes one.
    """
    arch = best_arch(device)
    if given is not None and _is_of(given, scheme, device.type):
        return _fitting(given, scheme, device, arch)
    found = [a for a in _prebuilt() if _is_of(a, scheme, device.type)]
    for artifact in found:
        if fitting_arch(tuple(artifact.manifest.libraries), device):
            return artifact
    for archs in ((arch,), default_archs(device.type)):  # as compiled here, and by `qdsl compile`
        if arch in archs and (cached := _cached(scheme, device.type, *archs)):
            return cached
    if compile != "never":
        try:
            return qdsl.compile(scheme, device.type, (arch,))
        except TargetError:
            if older := _any_cached(scheme, device):
                return older
            raise
    if older := _any_cached(scheme, device):
        return older
    wrong = f"; {found[0].path} has only {', '.join(found[0].manifest.libraries)}" if found else ""
    raise ArtifactError(
        f"{scheme.bound} is not compiled for {device.type} {arch}{wrong}; "
        f'run `{command(scheme, origin or scheme.name, device.type, arch)}`, or allow it with compile="auto"'
    )


def buffers_of(scheme: Scheme, kind: str, arch: str) -> tuple[Buffer, ...]:
    """How the kernels of an architecture, which this machine need not have, take a scheme's tensors.

    Asks the directories of $QDSL_ARTIFACTS, the cache and the compiler's planner; raises TargetError where none knows.
    """
    for artifact in _prebuilt():
        if arch in artifact.manifest.libraries and _is_of(artifact, scheme, kind):
            return artifact.manifest.buffers[arch]
    return kernel_buffers(scheme, kind, arch)


def _fitting(artifact: Artifact, scheme: Scheme, device: torch.device, arch: str) -> Artifact:
    """The artifact a user named, if it has code for this device."""
    if fitting_arch(tuple(artifact.manifest.libraries), device) is None:
        raise ArtifactError(
            f"{artifact.path}: has kernels for {', '.join(artifact.manifest.libraries)}, this device needs {arch}; "
            f"run `{command(scheme, scheme.name, device.type, arch)} -o {artifact.path}`"
        )
    return artifact


def _is_of(artifact: Artifact, scheme: Scheme, kind: str) -> bool:
    m = artifact.manifest
    return m.kind == kind and m.text == scheme.text and dict(m.params) == plain_params(scheme)


def _prebuilt() -> list[Artifact]:
    """Artifacts of $QDSL_ARTIFACTS: each entry is an artifact or a folder of them."""
    found = []
    for entry in filter(None, os.environ.get("QDSL_ARTIFACTS", "").split(os.pathsep)):
        for manifest in sorted([*Path(entry).glob("manifest.json"), *Path(entry).glob("*/manifest.json")]):
            found.append(_opened(manifest.parent, manifest.stat().st_mtime_ns))
    return found


@functools.lru_cache(maxsize=256)
def _opened(path: Path, modified: int) -> Artifact:
    return open_artifact(path)


def _cached(scheme: Scheme, kind: str, *archs: str) -> Artifact | None:
    digest = cache.digest_of(scheme, kind, archs, toolchain(kind))
    return cache.find(cache.entry(scheme, archs, digest), digest)


def _any_cached(scheme: Scheme, device: torch.device) -> Artifact | None:
    """A cached artifact for an older architecture that this device runs as well."""
    levels = cpu_levels() if device.type == "cpu" else tuple(f"sm_{n}" for n in _GPUS)
    for archs in (default_archs(device.type), *((arch,) for arch in levels)):
        if fitting_arch(archs, device) and (artifact := _cached(scheme, device.type, *archs)):
            return artifact
    return None


def refuse_in_capture(scheme: Scheme, kind: str) -> None:
    """Raises Error while a CUDA graph is captured: nothing may be compiled, loaded or copied there; or without CUDA."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise Error(f'{scheme.bound} was asked for on CUDA, and torch sees no GPU here; `device="cpu"` runs everywhere')
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Error(
            f"the kernels of {scheme.bound} are not loaded, and nothing can be loaded while a CUDA graph is captured; "
            "call `layer.prepare()`, or run the layer once on such an input, before the capture"
        )


# ---- kernels -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Call:
    """One function of the library and how to gather its arguments from (x, buffers…, y, computed…)."""

    function: Callable
    gather: Callable[[list], tuple]


class Kernel:
    """One artifact on one architecture.

    names             the loaded tensors in the order `__call__` takes them; last, where kernels want the inputs in an order
                      of their own, `SOURCE`: of every input in that order, where x has it
    batch_invariant   whether every m is served by variants of one order of summation
    phase             whose variants these are; `scheme` has its activation block alone
    """

    def __init__(
        self, artifact: Artifact, arch: str, scheme: Scheme, batch_invariant: bool = False, phase: str = ""
    ):  # fmt: skip
        m, scheme = artifact.manifest, scheme.in_phase(phase)
        self.artifact, self.arch, self.scheme, self.batch_invariant = artifact, arch, scheme, batch_invariant
        self.phase, self.on_cpu, table = phase, m.kind == "cpu", m.tables[arch][phase]
        same = hashlib.sha256(f"{m.digest} {table}".encode()).hexdigest()  # a table may change: `qdsl tune`
        about = [m.scheme, *filter(None, [phase]), arch, same[:16], *(["batch-invariant"] if batch_invariant else [])]
        self.key = " ".join(about)
        known = self.buffers
        self.ordered = self.order is not None
        self.names = (
            *(t.name for t in scheme.tensors if t.loaded and t.name in known),
            *((SOURCE,) if self.ordered else ()),
        )
        steps = [step for variant in m.variants[arch][phase] for step in variant.steps]
        used = {arg for step in steps for arg in step.args}
        self.computed = tuple(t for t in scheme.tensors if isinstance(t.value, Expr) and t.name in used)
        self.widened = WIDENED in used
        block = scheme.activation()
        self.transforms = block.transforms if block else ()
        self._variants: dict[str, tuple[_Call, ...]] | None = None
        self._by_shape: dict[tuple[int, int], tuple[list[int], list[tuple[_Call, ...]]]] = {}
        self._templates: dict[tuple[int, int], list[tuple[list[int], int, torch.dtype]]] = {}
        shaping = {name for t in self.transforms for name in loaded(t)}
        self._shaping = [at for at, name in enumerate(self.names) if name in shaping]
        self._widths: dict[tuple, list[int]] = {}
        self._rooms = threading.local()
        self._rows: dict[int, torch.Tensor] = {}  # one of each width, for its shape and type

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {b.tensor: b for b in self.artifact.manifest.buffers[self.arch]}

    @property
    def order(self) -> Order | None:
        """The order of inputs that the kernels take."""
        return self.artifact.manifest.order(self.arch)

    def load(self) -> None:
        """Open the library (its digest is checked first) and look up the functions."""
        if self._variants is not None:
            return
        refuse_in_capture(self.scheme, self.artifact.manifest.kind)
        import tvm_ffi

        library = tvm_ffi.load_module(str(self.artifact.library(self.arch)))
        widened = [WIDENED] if self.widened else []
        between = [*(t.name for t in self.computed), *(p.name for p in passes(self.transforms)), *widened, ORDERED]
        pool = ["x", *self.names, "y", *between]
        self._variants = {
            v.name: tuple(
                _Call(library[step.function], itemgetter(*(pool.index(arg) for arg in step.args))) for step in v.steps
            )
            for v in self.artifact.manifest.variants[self.arch][self.phase]
        }

    def __call__(self, x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """y [m, n] for x [m, k], contiguous and aligned; buffers in the order of `names`."""
        m = x.shape[0]
        if m == 1 and self.on_cpu:  # torch reads a shape that it is told for longer than it copies one
            like = self._rows.get(n)
            if like is None:
                like = self._rows[n] = x.new_empty((1, n))
            y = torch.empty_like(like)
        else:
            y = x.new_empty((m, n))
        self.run_into(x, buffers, y)
        return y

    def run_into(self, x: torch.Tensor, buffers: Sequence[torch.Tensor], y: torch.Tensor) -> None:
        """The same into a given y, on torch's current stream."""
        if self.on_cpu:
            torch.get_num_threads()  # the first of a thread gives OpenMP what `torch.set_num_threads` says
        m, k = x.shape
        shape = y.shape[1], k
        limits, variants = self._by_shape.get(shape) or self._chosen(shape)
        pool = [x, *buffers, y]
        if self.computed or self.transforms or self.ordered:
            reuse = m == 1 and self.on_cpu and not (self.transforms or self.ordered)
            pool += (self._room if reuse else self._allocate)(x, buffers, y.shape[1])
        for call in variants[bisect_left(limits, m)]:
            call.function(*call.gather(pool))

    def run_variant(self, name: str, x: torch.Tensor, buffers: Sequence[torch.Tensor], y: torch.Tensor) -> None:
        """The same with a variant of one's own choice, which must be right for k."""
        self.load()
        pool = [x, *buffers, y, *self._allocate(x, buffers, y.shape[1])]
        for call in self._variants[name]:
            call.function(*call.gather(pool))

    def last_step(
        self, x: torch.Tensor, buffers: Sequence[torch.Tensor], y: torch.Tensor
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        """For benchmarks: the product alone, of the variant that serves x, as a call that takes the buffers.

        All steps run once here. The call finds what those before the last have computed of x, and writes y anew.
        """
        m, k = x.shape
        limits, variants = self._chosen((y.shape[1], k))
        calls, computed = variants[bisect_left(limits, m)], self._allocate(x, buffers, y.shape[1])
        for call in calls:
            call.function(*call.gather([x, *buffers, y, *computed]))
        last = calls[-1]
        return lambda given: last.function(*last.gather([x, *given, y, *computed]))

    def variants(self, k: int) -> list[str]:
        """The variants that are right for k inputs."""
        m = self.artifact.manifest
        legal = m.legal(self.arch, k, self.phase)
        return [v.name for v in m.variants[self.arch][self.phase] if v.name in legal]

    def limits(self, n: int, k: int) -> Limits:
        """Up to how many tokens which variant serves an [n, k] weight."""
        m = self.artifact.manifest
        return (m.limits_of_one_order if self.batch_invariant else m.limits)(self.arch, n, k, self.phase)

    def _chosen(self, shape: tuple[int, int]) -> tuple[list[int], list[tuple[_Call, ...]]]:
        """The variants for a shape (of y's features and k), as ascending limits of m and what to call up to each, and beyond."""
        self.load()
        half, (width, k) = self.scheme.output.half, shape
        limits = self.limits(width * half[1] if half else width, k)
        ends = [end for end, _ in limits if end is not None]
        self._by_shape[shape] = ends, [self._variants[name] for _, name in limits]
        return self._by_shape[shape]

    def _room(self, x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int) -> list[torch.Tensor]:
        """As `_allocate`, but the same for all calls of a thread: kernels of a CPU are done when they return, and for one
        token an allocation takes longer than what is written there."""
        rooms: dict = vars(self._rooms)
        shape = n, x.shape[1]
        if shape not in rooms:
            rooms[shape] = self._allocate(x, buffers, n)
        return rooms[shape]

    def _allocate(self, x: torch.Tensor, buffers: Sequence[torch.Tensor], n: int) -> list[torch.Tensor]:
        """Room for what the steps compute between them: codes and scales of the activations, x on its way through
        transforms, what is multiplied of it, and x in another order."""
        m, k = x.shape
        template = self._templates.get((n, k))
        if template is None:
            sizes = {"e": 1, "m": 1, "n": n, "k": k}
            template = [
                (
                    list(t.held_shape(sizes, self.scheme)) or [1],  # kernels take a scalar as one element
                    t.held.index(Var("m")) if Var("m") in t.index else -1,
                    _native(t.dtype),
                )
                for t in self.computed
            ]
            self._templates[n, k] = template
        result = []
        for shape, at, kind in template:
            result.append(x.new_empty([m if i == at else size for i, size in enumerate(shape)], dtype=kind))
        if self.transforms:
            shapes = tuple(buffers[at].shape for at in self._shaping)
            found = self._widths.get((k, shapes))
            if found is None:  # buffers of transforms hold their tensors element by element, in their shape
                named = zip((self.names[at] for at in self._shaping), shapes)
                found = self._widths[k, shapes] = widths(self.transforms, {"x": x.shape, **dict(named)})
            result += [x.new_empty((m, width), dtype=torch.float32) for width in found]
        if self.widened:
            result.append(torch.empty_like(x))
        if self.ordered:
            result.append(x.new_empty((m, buffers[-1].shape[0])))
        return result


def _native(format: DType) -> torch.dtype:
    """The torch type of a computed tensor: native where torch has it, bit patterns in bytes up to 8 bits."""
    if format.bits <= 8:
        return torch.uint8
    return torch_dtype(format) or (torch.int16 if format.bits == 16 else torch.int32)


_KERNELS: dict[str, Kernel] = {}


def register(
    artifact: Artifact, device: torch.device, scheme: Scheme, batch_invariant: bool = False, phase: str = ""
) -> Kernel:
    """The process's kernel of an artifact on this device; its library is opened at the first call or `load()`."""
    arch = fitting_arch(tuple(artifact.manifest.libraries), device)
    assert arch is not None, "find_artifact returns artifacts that fit"
    kernel = Kernel(artifact, arch, scheme, batch_invariant, phase)
    known = _KERNELS.get(kernel.key)
    if known is None or (known._variants is None and not known.artifact.path.exists()):
        _KERNELS[kernel.key] = known = kernel
    return known


def kernel(key: str) -> Kernel:
    """The registered kernel of a key; raises Error when this process has made no layer with it."""
    try:
        return _KERNELS[key]
    except KeyError:
        raise Error(
            f"no QuantLinear of this process uses the kernel `{key}`; construct or unpickle the layer first"
        ) from None
