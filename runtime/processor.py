"""Which CPU levels this processor runs (`qdsl.codegen.target` says what they are)."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

from qdsl.diagnostic import TargetError, closest

# What a level asks of the processor beyond the level below it, in the words of /proc/cpuinfo.
_X86 = {
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "cascadelake": {"avx512_vnni"},
    "cooperlake": {"avx512_bf16"},
    "sapphirerapids": {"amx_tile", "amx_int8", "amx_bf16"},
}
_ARM = {
    "armv8-a": set[str](),
    "armv8.2-a": {"asimdhp", "fphp"},
    "armv8.6-a": {"asimddp", "bf16", "i8mm"},
}


@functools.cache
def cpu_levels() -> tuple[str, ...]:
    """The levels this process can run, best first.  QDSL_CPU_LEVEL leaves out those above it.

    AMX is there only if the kernel lets this process use it, for which it is asked here, once.  Raises TargetError where
    QDSL_CPU_LEVEL is no level of this architecture.
    """
    arm = platform.machine() in ("aarch64", "arm64")
    known, top = _ARM if arm else _X86, os.environ.get("QDSL_CPU_LEVEL")
    if top and top not in known:
        hint = f"did you mean `{match}`? " if (match := closest(top, known)) else ""
        raise TargetError(
            f"QDSL_CPU_LEVEL is `{top}`, no level of {platform.machine()}; {hint}set it to one of {', '.join(known)}, "
            "or unset it"
        )
    flags, levels = _flags(), list[str]()
    for level, needs in known.items():
        if not needs <= flags or (level == "sapphirerapids" and not _amx_is_permitted()):
            break
        levels.insert(0, level)
        if level == top:
            break
    return tuple(levels)


def _flags() -> set[str]:
    """What /proc/cpuinfo says of the first processor; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split())


def _amx_is_permitted() -> bool:
    """Ask Linux for the state of AMX tiles (8 KiB a thread); without it the first tile instruction ends the process.

    Permission is the process's, its threads and forks have it, too.  A kernel before 5.16 and a sandbox may refuse.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(arch_prctl, request_permission, tile_data) == 0
