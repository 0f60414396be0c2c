"""llama.cpp's tensors as contenders of cpu.py, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_problem import F32, Built, Call, Contender, Problem
from torch import Tensor

GGML_F32 = 0
GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_K": 12, "mxfp4": 39}
# What a kind of memory repacks; llama.cpp takes the first of these that the processor has, or else plain memory.
GGML_REPACKS = {"amx": ("q4_0", "q4_K", "q8_0"), "repack": ("q4_0", "q4_K", "mxfp4")}


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleave", ctypes.c_int64), ("size", ctypes.c_size_t),
        ("quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p), ("from_float", ctypes.c_void_p),
    ]  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """llama.cpp's tensors, from $QDSL_GGML, a directory with libggml-base.so and libggml-cpu.so, or from llama_cpp."""

    def __init__(self) -> None:
        place = os.environ.get("QDSL_GGML")
        if not place:
            found = importlib.util.find_spec("llama_cpp")
            if found is None:
                raise ImportError("no llama_cpp here, and $QDSL_GGML names no directory")
            place = str(Path(found.origin).parent / "lib")
        base = ctypes.CDLL(f"{place}/libggml-base.so", ctypes.RTLD_GLOBAL)
        self._libraries = ctypes.CDLL(f"{place}/libggml-cpu.so", ctypes.RTLD_GLOBAL), base
        p, i, n, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
        self.init = self._function("ggml_init", p, _Params)
        self.traits = self._function("ggml_get_type_traits", ctypes.POINTER(_Traits), i)
        self.quantize = self._function("ggml_quantize_chunk", size, i, p, p, n, n, n, p)
        self.tensor = self._function("ggml_new_tensor_2d", p, p, i, n, n)
        self.mul_mat = self._function("ggml_mul_mat", p, p, p, p)
        self.graph = self._function("ggml_new_graph", p, p)
        self.expand = self._function("ggml_build_forward_expand", None, p, p)
        self.data = self._function("ggml_get_data", p, p)
        self.place = self._function("ggml_backend_alloc_ctx_tensors_from_buft", p, p, p)
        self.set = self._function("ggml_backend_tensor_set", None, p, p, size, size)
        self.compute = self._function("ggml_backend_graph_compute", i, p, p)
        self.threads = self._function("ggml_backend_cpu_set_n_threads", None, p, i)
        self.free = self._function("ggml_free", None, p)
        self.free_buffer = self._function("ggml_backend_buffer_free", None, p)
        self.plain = self._function("ggml_backend_cpu_buffer_type", p)()
        self.backend = self._function("ggml_backend_cpu_init", p)()
        registry = self._function("ggml_backend_cpu_reg", p)()
        device = self._function("ggml_backend_reg_dev_get", p, p, size)(registry, 0)
        address = self._function("ggml_backend_reg_get_proc_address", p, p, ctypes.c_char_p)
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(p), p)(address(registry, b"ggml_backend_dev_get_extra_bufts"))(device)
        named = self._function("ggml_backend_buft_name", ctypes.c_char_p, p)
        self.buffers: dict[str, int] = {}
        for at in range(8):
            if not listed[at]:
                break
            self.buffers[named(listed[at]).decode().removeprefix("CPU_").lower()] = listed[at]

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        library = next(library for library in self._libraries if hasattr(library, name))
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found


class Held:
    """Contexts and buffers of one contender, given back together."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml, self.contexts, self.buffers = ggml, [], []

    def context(self) -> int:
        self.contexts.append(self.ggml.init(_Params(1 << 20, None, True)))
        return self.contexts[-1]

    def place(self, context: int, buffer: int) -> None:
        self.buffers.append(self.ggml.place(context, buffer))

    def __del__(self) -> None:
        for buffer in self.buffers:
            self.ggml.free_buffer(buffer)
        for context in self.contexts:
            self.ggml.free(context)


def ggml_family() -> Iterator[Contender]:
    ggml = Ggml()

    @functools.lru_cache(2)
    def quantized(p: Problem, kind: str) -> tuple[np.ndarray, Tensor]:
        """Blocks of a type, and the right output."""
        traits = ggml.traits(GGML_TYPES[kind]).contents
        stored, own = np.empty(p.n * p.k // traits.block * traits.size, np.uint8), torch.empty(p.n, p.k)
        ggml.quantize(GGML_TYPES[kind], p.weight.data_ptr(), stored.ctypes.data, 0, p.n, p.k, None)
        to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(traits.to_float)
        to_float(stored.ctypes.data, own.data_ptr(), own.numel())
        return stored, p.exact(F32, own)

    def made(kind: str, buffer: int) -> Callable[[Problem, int, int], Built]:
        def make(p: Problem, copies: int, threads: int) -> Built:
            stored, exact = quantized(p, kind)
            held, calls = Held(ggml), []
            for _ in range(copies):
                context = held.context()
                w = ggml.tensor(context, GGML_TYPES[kind], p.k, p.n)
                held.place(context, buffer)
                ggml.set(w, stored.ctypes.data, 0, stored.nbytes)
                calls.append(called(held, w, p.n))
            return Built(calls, exact, keep=held)

        return make

    def called(held: Held, w: int, n: int) -> Call:
        graphs: dict[int, tuple[Any, Tensor]] = {}

        def call(x: Tensor) -> Tensor:
            m = x.shape[0]
            if m not in graphs:
                context = held.context()
                a = ggml.tensor(context, GGML_F32, x.shape[1], m)
                y = ggml.mul_mat(context, w, a)
                held.place(context, ggml.plain)
                graph = ggml.graph(context)
                ggml.expand(graph, y)
                ggml.set(a, x.data_ptr(), 0, x.nbytes)  # x is the same at every call
                memory = (ctypes.c_float * (m * n)).from_address(ggml.data(y))
                graphs[m] = graph, torch.frombuffer(memory, dtype=F32).view(m, n)
            graph, y = graphs[m]
            ggml.threads(ggml.backend, torch.get_num_threads())
            if ggml.compute(ggml.backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return y

        return call

    for kind, group, stored in (
        ("q4_0", "w4a8", "i4_group"), ("q4_K", "w4a8", "i4_group"),
        ("q8_0", "w8a8", "i8"), ("mxfp4", "mxfp4", "e2m1"),
    ):  # fmt: skip
        repacks = {name: buffer for name, buffer in ggml.buffers.items() if kind in GGML_REPACKS.get(name, ())}
        for name, buffer in (repacks or {"": ggml.plain}).items():
            yield Contender(f"ggml_{kind}{name and f'_{name}'}", group, stored, F32, made(kind, buffer))
