"""How much memory this process may still take, and the check before taking it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from cachewarmd import segment
from cachewarmd.errors import NoSpaceError
from cachewarmd.huge_pages import Huge

DEFAULT_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Kept back for everything that is not shared memory: heaps, page cache of a busy host.
RESERVE_BYTES = 256 << 20
# Small enough that a client which waits for the allocation sees it move.
_STEP_BYTES = 64 << 20


def _inactive_file_bytes(folder: Path) -> int:
    """Page cache that the kernel gives up first: charged to the cgroup, yet no obstacle."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):
        return 0


def _cgroup_free(root: Path) -> int | None:
    """Room below the tightest limit from our cgroup up to `root`; None = unlimited.

    Above memory.high a cgroup is not killed but throttled to a crawl, which is no better.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line for line in lines if line.startswith("0::")), "0::/")
    path = root / own.removeprefix("0::").lstrip("/")
    free: int | None = None
    for folder in [path, *path.parents]:
        if folder != root and root not in folder.parents:
            break
        for name in ("memory.max", "memory.high"):
            try:
                limit = (folder / name).read_text().strip()
                used = int((folder / "memory.current").read_text())
            except (OSError, ValueError):
                continue
            if limit != "max":
                room = max(0, int(limit) - used + _inactive_file_bytes(folder))
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


class Budget:
    """What may be allocated, less what was promised and is not allocated yet. Thread-safe.

    Without promises two loads at a time, or one beside a pool that is still being filled, would
    each see the same free bytes.
    """

    def __init__(self, cgroup_root: Path) -> None:
        self._cgroup_root = cgroup_root
        self._lock = threading.Lock()
        self._promised = 0

    def available_bytes(self) -> int:
        """Bytes that can still be promised."""
        return max(0, available_bytes(self._cgroup_root) - self._promised)

    def promise(self, needed: int, what: str) -> None:
        """Raises NoSpaceError with needed and available bytes when `needed` does not fit."""
        with self._lock:
            available = self.available_bytes()
            if needed > available:
                raise NoSpaceError(
                    f"{what} needs {needed} bytes, {available} are available "
                    f"(host and cgroup limit, {RESERVE_BYTES} kept back)"
                )
            self._promised += needed

    def settle(self, num_bytes: int) -> None:
        """So much of what was promised is allocated now, or will never be."""
        with self._lock:
            self._promised -= num_bytes

    def allocate(self, fd: int, size: int, what: str, progress: Callable[[int], None]) -> Huge:
        """Promise and allocate a memfd's pages, telling `progress` the bytes done.

        Returns how much lies on huge pages. Raises NoSpaceError.
        """
        self.promise(size, what)
        done = 0
        huge = Huge()
        try:
            while done < size:
                step = min(_STEP_BYTES, size - done)
                huge = huge.plus(segment.reserve(fd, done, step))
                self.settle(step)
                done += step
                progress(done)
        finally:
            self.settle(size - done)
        return huge
