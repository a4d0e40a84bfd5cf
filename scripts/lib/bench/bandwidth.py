"""How fast memory is read here: the limit of decoding, which reads all weights for each token."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from engine.kernels import _kernels

_WORD_BYTES = 8


def allocate(num_bytes: int, num_threads: int) -> npt.NDArray[np.uint8]:
    """Memory of that size (rounded up to whole words for each thread), really there.

    In huge pages where the kernel gives them, as the limit shall be the machine's.
    """
    step = _WORD_BYTES * num_threads
    memory = mmap.mmap(-1, -(-num_bytes // step) * step)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # an untouched page is the one page of zeros, which never leaves the cache
    return array


def read_bandwidth(memory: npt.NDArray[np.uint8], num_threads: int, repeats: int) -> float:
    """Bytes/s at which all threads together read the memory once; the best of the repeats."""
    cpus = sorted(os.sched_getaffinity(0))
    threads = _kernels.Threads([cpus[i % len(cpus)] for i in range(num_threads)])
    return _kernels.read_bandwidth(memory, threads, repeats)
