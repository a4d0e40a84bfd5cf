"""How much memory this process may still take, and the preflight check before taking it."""

from __future__ import annotations

from pathlib import Path

import psutil

from cachewarmd.errors import NoSpaceError

# Kept back for everything that is not shared memory: heaps, page cache of a busy host.
RESERVE_BYTES = 256 << 20


def _cgroup_free(root: Path) -> int | None:
    """Room below the tightest memory.max from our cgroup up to `root`; None = unlimited."""
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        line = "0::/"
    path = root / line.rpartition(":")[2].lstrip("/")
    free: int | None = None
    for folder in [path, *path.parents]:
        if folder != root and root not in folder.parents:
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            room = max(0, int(limit) - used)
            free = room if free is None else min(free, room)
    return free


def available_bytes(cgroup_root: Path) -> int:
    """Bytes that may be allocated now: the least of host memory and cgroup room, less a reserve.

    Exceeding a cgroup limit through shared memory is a SIGKILL, never an error, so this is asked
    before every large allocation.
    """
    available: int = psutil.virtual_memory().available
    room = _cgroup_free(cgroup_root)
    if room is not None:
        available = min(available, room)
    return max(0, available - RESERVE_BYTES)


def check(needed: int, what: str, cgroup_root: Path) -> None:
    """Raises NoSpaceError with needed and available bytes when `needed` does not fit."""
    available = available_bytes(cgroup_root)
    if needed > available:
        raise NoSpaceError(
            f"{what} needs {needed} bytes, {available} are available "
            f"(host and cgroup limit, {RESERVE_BYTES} kept back)"
        )
