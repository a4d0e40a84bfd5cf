"""Keeping shared memory from being swapped out, as far as RLIMIT_MEMLOCK lets us."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt

_CAP_IPC_LOCK = 14  # <linux/capability.h>

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def raise_limits() -> None:
    """To what this process may have: descriptors, and memory that stays."""
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (hard, hard))


def refusal(num_bytes: int) -> str:
    """Why so much can't be locked, with needed and allowed bytes; empty = nothing is against it.

    The kernel does not count against the limit of who has CAP_IPC_LOCK.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed in (resource.RLIM_INFINITY, -1) or num_bytes <= allowed or _is_privileged():
        return ""
    return f"{num_bytes} bytes are to be locked, RLIMIT_MEMLOCK allows {allowed}"


def _is_privileged() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def lock(memory: npt.NDArray[np.uint8]) -> str:
    """Lock mapped, allocated memory; empty, or why the kernel did not. Ends with the mapping."""
    if _libc.mlock(memory.ctypes.data, memory.size) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
