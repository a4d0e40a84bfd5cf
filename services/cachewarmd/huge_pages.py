"""Shared memory on 2 MiB pages: mappings that can have them, and how the pages come there.

A huge page is mapped as one only where address and file offset are at 2 MiB borders both:

    address    ····|==== 2 MiB ====|==== 2 MiB ====|==·    · held, untouched (up to 2 MiB in all)
    file           |0              |2 MiB          |4 MiB

Whether a memfd gets huge pages by itself is a setting of the host, `never` on most. MADV_COLLAPSE
(Linux 6.1) gives them all the same, and faster than 512 small ones are allocated; but not where
there is no page at all, so one small page per huge one is put there first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20
# <linux/mman.h>; the mmap module has only some of them.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25
_GRACE_S = 0.01
_FAST_ENOUGH = 2e9  # bytes a second
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Huge(NamedTuple):
    """Bytes that lie on huge pages; and if there might be more, the kernel's last reason."""

    num_bytes: int = 0
    refusal: str = ""

    def plus(self, other: Huge) -> Huge:
        """Of two ranges."""
        return Huge(self.num_bytes + other.num_bytes, other.refusal or self.refusal)


def rounded(size: int) -> int:
    """A size whose end is no obstacle to huge pages; what is less than one page stays as it is."""
    return size if size < HUGE_BYTES else _up(size)


def _up(size: int) -> int:
    return -(-size // HUGE_BYTES) * HUGE_BYTES


def map_aligned(
    fd: int, offset: int, size: int, *, writable: bool = False
) -> npt.NDArray[np.uint8]:
    """Map a memfd's bytes from `offset` (a multiple of 2 MiB) at a 2 MiB border.

    The array keeps the mapping alive; it is unmapped with its last view.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Python's mmap takes no address. So it holds a range that is large enough, in which the file
    # replaces what was there: it unmaps both.
    held = mmap.mmap(
        -1, size + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, prot
    )
    whole = np.frombuffer(held, np.uint8)
    skipped = -whole.ctypes.data % HUGE_BYTES
    address = whole.ctypes.data + skipped
    if _libc.mmap(address, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # A forked child that shares these pages would delay the EOF-means-gone rule.
    held.madvise(mmap.MADV_DONTFORK)
    held.madvise(mmap.MADV_DONTDUMP)
    if writable:
        # For pages that come by being touched, where the host's setting is `advise`.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            held.madvise(mmap.MADV_HUGEPAGE)
    return whole[skipped : skipped + size]


def populate(memory: npt.NDArray[np.uint8]) -> None:
    """Enter what is allocated in this process's page table, 64 MiB in about 20 ms; thread-safe.

    Else every small page costs a fault when it is touched first. Where the kernel can't do it, that
    is how it stays.
    """
    _libc.madvise(memory.ctypes.data, memory.nbytes, _MADV_POPULATE_WRITE)


def make_huge(fd: int, offset: int, size: int, go_on: Callable[[], bool] = lambda: True) -> Huge:
    """Put huge pages under as much of a memfd's range as the kernel gives them for.

    Keeps what is there already, at once where it is huge; holes beside a page become zeros. Works
    on sealed memfds and through any descriptor. `go_on` is asked before each page. Raises OSError
    when the range can't be mapped.
    """
    start = _up(offset)
    end = (offset + size) // HUGE_BYTES * HUGE_BYTES
    if start >= end:
        return Huge()
    mapped = map_aligned(fd, start, end - start)
    address = mapped.ctypes.data
    num_bytes, refusal = 0, ""
    for position in range(0, end - start, HUGE_BYTES):
        if not go_on():
            return Huge(num_bytes, refusal or "not in time")
        if why := _collapse(address + position):
            refusal = why
        else:
            num_bytes += HUGE_BYTES
    return Huge(num_bytes, refusal)


def while_fast() -> Callable[[], bool]:
    """A `go_on` for somebody who is waited for: huge pages may be slow to come.

    A virtual machine that gives free memory back to its host gets it anew, and a fragmented one
    must move pages first. Small pages, which are reused, come at two gigabytes a second.
    """
    num_asked, started = 0, time.monotonic()

    def go_on() -> bool:
        nonlocal num_asked
        num_asked += 1
        return time.monotonic() - started < _GRACE_S + num_asked * HUGE_BYTES / _FAST_ENOUGH

    return go_on


def _collapse(address: int) -> str:
    """Empty, or why the huge page there could not be had. Idempotent."""
    if _libc.madvise(address, HUGE_BYTES, _MADV_COLLAPSE) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
