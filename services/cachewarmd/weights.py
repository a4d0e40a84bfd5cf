"""L3: model weights, read once, hashed while read, laid out by a pack plan, sealed.

    model dir (fd) --index--> weight files --one pass: SHA-256 + pack ops--> memfd --> sealed

The daemon's own hash vouches for the bytes, so no engine has to be believed. `read_files` is the
pass itself: the daemon has it done by a process of its own (`packers`), an engine without a daemon
does it where it is.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from cachewarmd import pack, segment
from cachewarmd.errors import ModelFilesError
from cachewarmd.failpoints import hit, may_fail
from cachewarmd.huge_pages import Huge, rounded
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import (
    CHUNK_BYTES,
    FileIdentity,
    WeightFile,
    chunks,
    identity_of,
    open_weight_files,
    tensors_by_name,
)

Progress = Callable[[str, int, int], None]  # phase, done bytes, total bytes
Allocate = Callable[[int, int, Callable[[int], None]], Huge]  # memfd, size, tell bytes done
_NUM_BUFFERS = 4


@dataclass(eq=False)
class Segment:
    """Sealed weights: `fd` is the daemon's own, never handed out (see segment.reopen_readonly)."""

    weights_sha256: bytes
    layout_id: str
    size: int
    fd: int
    huge: Huge = field(default_factory=Huge)


class Reader(Protocol):
    """Something that does what `read_files` does."""

    def __call__(
        self,
        dir_fd: int,
        plan: pb.PackPlan | None,
        progress: Progress,
        obtain: Callable[[], int],
        *,
        follow: bool,
    ) -> tuple[bytes, list[FileIdentity]]: ...


def layout_id(plan: pb.PackPlan) -> str:
    """Hex SHA-256 of the plan: names what the segment holds where."""
    return hashlib.sha256(plan.SerializeToString(deterministic=True)).hexdigest()


def read_files(
    dir_fd: int,
    plan: pb.PackPlan | None,
    progress: Progress,
    obtain: Callable[[], int],
    *,
    follow: bool,
) -> tuple[bytes, list[FileIdentity]]:
    """Hash the files of a directory and pack them; the digest, and which files they were.

    `obtain` is asked for the memfd to pack into once plan and files are known to fit. It stays the
    caller's; no map of it is left at the end. Without a plan the files are only hashed.
    Raises ModelFilesError (also when a file changes while it is read), InvalidRequestError (plan),
    and whatever `obtain` and `progress` raise to end it.
    """
    with open_weight_files(dir_fd, follow=follow) as files:
        placed, target = {}, None
        if plan is not None:
            placed = pack.check_plan(plan, tensors_by_name(files))
            target = segment.map_memory(obtain(), plan.segment_bytes, writable=True)
        return _read_all(files, placed, target, progress), [file.identity for file in files]


def load(
    dir_fd: int,
    plan: pb.PackPlan,
    progress: Progress,
    allocate: Allocate,
    *,
    follow: bool,
    read: Reader = read_files,
) -> tuple[Segment, list[FileIdentity]]:
    """Read into memory for which `allocate` (which answers for the budget) finds room, then seal.

    Raises what `read` and `allocate` raise.
    """
    size, fd, huge = rounded(plan.segment_bytes), -1, Huge()

    def obtain() -> int:
        nonlocal fd, huge
        fd = segment.create_memfd("cachewarm-weights", size)
        may_fail("weights.allocate")
        huge = allocate(fd, size, lambda done: progress("allocate", done, size))
        may_fail("pack.before")
        return fd

    try:
        digest, identities = read(dir_fd, plan, progress, obtain, follow=follow)
        may_fail("pack.after")
        segment.seal_forever(fd)
        hit("weights.sealed")
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return Segment(digest, layout_id(plan), size, fd, huge), identities


class _Hashing(AbstractContextManager["_Hashing"]):
    """A thread that hashes what was read while the reader packs it.

    There are few buffers, so the reader is never far ahead.
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[tuple[Any, memoryview] | None] = queue.SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(memoryview(bytearray(CHUNK_BYTES)))
        self._thread = threading.Thread(target=self._run, name="hash", daemon=True)
        self._thread.start()

    def buffer(self) -> memoryview:
        """One of CHUNK_BYTES to read into; waits until it has been hashed."""
        return self._free.get()

    def update(self, digest: Any, chunk: memoryview) -> None:
        """Hash a part of a buffer, which may be read until the next `buffer`."""
        self._work.put((digest, chunk))

    def finish(self) -> None:
        """Wait until everything is hashed."""
        for buffer in [self.buffer() for _ in range(_NUM_BUFFERS)]:
            self._free.put(buffer)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            digest, chunk = work
            digest.update(chunk)
            buffer = chunk.obj
            self._free.put(memoryview(buffer))

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join()


def _read_all(
    files: list[WeightFile], placed: dict[str, pack.Placed], target: Any, progress: Progress
) -> bytes:
    """SHA-256 of the file; of several (an index is one) that of their digests in name order."""
    total = sum(file.identity[3] for file in files)
    done = 0
    digests = []
    sizes = {name: place.chunk_bytes for name, place in placed.items()}
    phase = "hash" if target is None else "hash and pack"
    with _Hashing() as hashing:
        for file in files:
            digests.append(hashlib.sha256())
            for start, chunk, tensor in chunks(file, sizes, hashing.buffer):
                hashing.update(digests[-1], chunk)
                if tensor is not None and tensor.name in placed:
                    placed[tensor.name].write(start - tensor.start, chunk, target)
                done += len(chunk)
                progress(phase, done, total)
            if identity_of(file.name, os.fstat(file.fd)) != file.identity:
                raise ModelFilesError(f"{file.name}: changed while it was read; try again")
        hashing.finish()
    if len(digests) == 1:
        return digests[0].digest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).digest()
