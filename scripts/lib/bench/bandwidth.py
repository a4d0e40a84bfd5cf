"""How fast memory is read here: the limit of decoding, which reads all weights for each token."""

from __future__ import annotations

import contextlib
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

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
    parts = np.split(memory.view(np.uint64), num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            # numpy lets go of the interpreter's lock meanwhile.
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, memory.nbytes / (time.perf_counter() - started))
    return best
