"""Shorthands for TVM's script builder: PTX instructions, registers, conditions, 64-bit indices."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

from tvm import tirx
from tvm.tirx.script import builder as T


def ptx(instruction: str, *operands, **options):
    """One instruction; operands that it writes come first."""
    T.evaluate(T.ptx[instruction](*operands, **options))


@contextmanager
def when(condition):
    """An if without an else, around the body of a `with`."""
    with T.If(condition), T.Then():
        yield


def assign(buffer, i: int, value):
    T.buffer_store(buffer, value, [i])


def register(dtype: str, value):
    """A register with that value."""
    buffer = T.alloc_local([1], dtype)
    assign(buffer, 0, value)
    return buffer


SETTLED = "qdsl_settled"  # a function of the device, defined in `host`


def settled(registers: Iterable):
    """What reads these registers stays behind this place. The compiler of C++ knows what an instruction writes, but not
    that it is written later, when it has been waited for."""
    for register in registers:
        T.evaluate(tirx.call_extern("int32", SETTLED, register))


def zeros(n: int, dtype: str):
    buffer = T.alloc_local([n], dtype)
    for i in range(n):
        assign(buffer, i, tirx.const(0, dtype))
    return buffer


def wide(index):
    return T.cast(index, "int64")


def ceildiv(extent, size: int):
    return tirx.truncdiv(extent + (size - 1), tirx.IntImm("int64", size))
