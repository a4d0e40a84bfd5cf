"""Anonymous shared memory: memfds, seals, read-only descriptors, mappings.

A memfd has no name, so nothing is left behind when the last holder dies. Readers only ever get an
O_RDONLY descriptor of a 0400 memfd: mmap(PROT_WRITE) and mprotect on it fail, and another uid
cannot reopen it through /proc. (The same uid can: separate users are the boundary against malice,
this is one against bugs.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

import numpy as np
import numpy.typing as npt

from cachewarmd.errors import InvalidRequestError, NoSpaceError
from cachewarmd.huge_pages import HUGE_BYTES, Huge, make_huge, map_aligned, while_fast

# <linux/fcntl.h>; the fcntl module has only some of them before Python 3.12.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8


def create_memfd(name: str, size: int) -> int:
    """New memfd of `size` bytes, mode 0400, size sealed. No page is allocated yet."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o400)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, offset: int, size: int, *, is_patient: bool = False) -> Huge:
    """Allocate the pages now, huge ones where the kernel gives them fast; tells how many are.

    `is_patient` waits for huge pages that are slow to come.
    A full tmpfs is ENOSPC here, where a first touch would be SIGBUS. Raises NoSpaceError. A memory
    cgroup's limit is no error but a SIGKILL, so callers check `budget.available_bytes` first.
    """
    try:
        for start in range(offset, offset + size, HUGE_BYTES):
            os.posix_fallocate(fd, start, 1)
        go_on = (lambda: True) if is_patient else while_fast()
        huge = make_huge(fd, offset, size, go_on)
        os.posix_fallocate(fd, offset, size)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.ENOMEM):
            raise NoSpaceError(f"the kernel refused {size} bytes of shared memory") from exc
        raise
    return huge


def seal_forever(fd: int) -> None:
    """Nobody can write, resize or unseal it from here on. Needs that no writable map is left."""
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)


def reopen_readonly(fd: int) -> int:
    """A new O_RDONLY descriptor of the same memory: the only kind handed to clients."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def check_private_pool(fd: int, size: int) -> None:
    """A client's private pool must be a memfd of the told size that cannot shrink.

    Raises InvalidRequestError. The daemon never maps it: preadv of it cannot raise SIGBUS.
    """
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size != size:
        raise InvalidRequestError(f"private pool: expected a memfd of {size} bytes")
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as exc:
        raise InvalidRequestError("private pool: not a memfd") from exc
    if not seals & F_SEAL_SHRINK:
        raise InvalidRequestError("private pool: F_SEAL_SHRINK is required")


def map_memory(fd: int, size: int, *, writable: bool = False) -> npt.NDArray[np.uint8]:
    """Map all of it. The array keeps the mapping alive; it is unmapped with its last view."""
    return map_aligned(fd, 0, size, writable=writable)
