"""Prompts of a job as bytes: each WarmPrompt after its size, u32 little-endian."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError

from cachewarmd import protocol, segment
from cachewarmd.errors import InvalidRequestError, LimitError
from cachewarmd.plan import MAX_ITEMS, MAX_PLAN_BYTES
from cachewarmd.v1 import control_pb2 as pb

_SIZE = struct.Struct("<I")
_MAX_IN_FRAME = protocol.MAX_FRAME_BYTES // 2  # the rest is for the pack plan
MAX_BYTES = MAX_PLAN_BYTES + MAX_ITEMS * _SIZE.size


def put(request: pb.Warmup, prompts: Sequence[pb.WarmPrompt]) -> list[int]:
    """Into the request, or where a frame is too small for them into a memfd, the caller's."""
    if sum(prompt.ByteSize() for prompt in prompts) > _MAX_IN_FRAME:
        return [memfd_of(prompts)]
    request.prompts.extend(prompts)
    return []


def pack(prompts: Iterable[pb.WarmPrompt]) -> Iterator[bytes]:
    """The pieces of the list, in order."""
    for prompt in prompts:
        data = prompt.SerializeToString()
        yield _SIZE.pack(len(data)) + data


def memfd_of(prompts: Iterable[pb.WarmPrompt]) -> int:
    """A memfd, sealed against writing; the caller's."""
    fd = os.memfd_create("cachewarm-plan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(pack(prompts))
        segment.seal_forever(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int) -> None:
    """Others' bytes must not change while we read them. Raises InvalidRequestError, LimitError."""
    info = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, segment.F_GET_SEALS)
    except OSError:
        seals = 0
    needed = segment.F_SEAL_WRITE | segment.F_SEAL_SHRINK
    if not stat.S_ISREG(info.st_mode) or seals & needed != needed:
        raise InvalidRequestError("plan: a memfd sealed against writing and shrinking is allowed")
    if info.st_size > MAX_BYTES:
        raise LimitError(f"plan: {info.st_size} bytes, at most {MAX_BYTES} are allowed")


def read(fd: int, offset: int = 0) -> list[pb.WarmPrompt]:
    """All that lies behind `offset`. Raises InvalidRequestError."""
    prompts: list[pb.WarmPrompt] = []
    with open(os.dup(fd), "rb", buffering=1 << 20) as file:
        file.seek(offset)
        while head := file.read(_SIZE.size):
            if len(prompts) == MAX_ITEMS:
                raise LimitError(f"plan: at most {MAX_ITEMS} items are allowed")
            size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else -1
            data = file.read(size) if 0 <= size <= MAX_PLAN_BYTES else b""
            if len(data) != size:
                raise InvalidRequestError(f"plan: item {len(prompts) + 1} ends before its end")
            try:
                prompts.append(pb.WarmPrompt.FromString(data))
            except DecodeError as exc:
                raise InvalidRequestError(f"plan: item {len(prompts) + 1} is no prompt") from exc
    return prompts
