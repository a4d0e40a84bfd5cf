"""L3: model weights, read once, hashed while read, laid out by a pack plan, sealed.

    model dir (fd) --index--> weight files --one pass: SHA-256 + pack ops--> sealed memfd

The daemon's own hash vouches for the bytes, so no engine has to be believed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachewarmd import pack, segment
from cachewarmd.errors import ModelFilesError
from cachewarmd.failpoints import hit, may_fail
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import (
    FileIdentity,
    WeightFile,
    chunks,
    identity_of,
    open_weight_files,
    tensors_by_name,
)

Progress = Callable[[str, int, int], None]  # phase, done bytes, total bytes
Allocate = Callable[[int, int, Callable[[int], None]], None]  # memfd, size, tell bytes done


@dataclass(frozen=True)
class Segment:
    """Sealed weights: `fd` is the daemon's own, never handed out (see segment.reopen_readonly)."""

    weights_sha256: bytes
    layout_id: str
    size: int
    fd: int


def layout_id(plan: pb.PackPlan) -> str:
    """Hex SHA-256 of the plan: names what the segment holds where."""
    return hashlib.sha256(plan.SerializeToString(deterministic=True)).hexdigest()


def load(
    dir_fd: int, plan: pb.PackPlan, progress: Progress, allocate: Allocate, *, follow: bool
) -> tuple[Segment, list[FileIdentity]]:
    """Read, hash and pack in one pass over the files, then seal.

    Raises ModelFilesError (also when a file changes while it is read), InvalidRequestError (plan),
    and whatever `allocate` (which answers for the memory budget) and `progress` raise to end it.
    """
    size = plan.segment_bytes
    with open_weight_files(dir_fd, follow=follow) as files:
        placed = pack.check_plan(plan, tensors_by_name(files))
        fd = segment.create_memfd("cachewarm-weights", size)
        try:
            may_fail("weights.allocate")
            allocate(fd, size, lambda done: progress("allocate", done, size))
            may_fail("pack.before")
            target = segment.map_memory(fd, size, writable=True)
            digest = _read_all(files, placed, target, progress)
            del target, placed  # the writable map must be gone before the seal
            may_fail("pack.after")
            segment.seal_forever(fd)
            hit("weights.sealed")
        except BaseException:
            os.close(fd)
            raise
        return Segment(digest, layout_id(plan), size, fd), [file.identity for file in files]


def hash_files(
    dir_fd: int, progress: Progress, *, follow: bool
) -> tuple[bytes, list[FileIdentity]]:
    """Only the digest and identities, for files that may be what is loaded already."""
    with open_weight_files(dir_fd, follow=follow) as files:
        return _read_all(files, {}, None, progress), [file.identity for file in files]


def _read_all(
    files: list[WeightFile], placed: dict[str, pack.Placed], target: Any, progress: Progress
) -> bytes:
    """SHA-256 of the file; of several (an index is one) that of their digests in name order."""
    total = sum(file.identity[3] for file in files)
    done = 0
    digests = []
    phase = "hash" if target is None else "hash and pack"
    for file in files:
        digest = hashlib.sha256()
        for start, chunk, tensor in chunks(file):
            digest.update(chunk)
            if tensor is not None and tensor.name in placed:
                placed[tensor.name].write(start - tensor.start, chunk, target)
            done += len(chunk)
            progress(phase, done, total)
        if identity_of(file.name, os.fstat(file.fd)) != file.identity:
            raise ModelFilesError(f"{file.name}: changed while it was read; try again")
        digests.append(digest.digest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(digests)).digest()
