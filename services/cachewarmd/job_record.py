"""A job as a later daemon finds it: a memfd of its own in the fd store.

    | head | request, JSON | a row for each item | prompts, until the job has ended |

The daemon is the only writer. Rows and the head's changing half are written in place, each by one
write: a daemon that dies leaves the old or the new one. The memfd is stored once it is whole.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
from google.protobuf.message import DecodeError

from cachewarmd import prompt_list
from cachewarmd.errors import InvalidRequestError
from cachewarmd.failpoints import hit
from cachewarmd.plan import MAX_ITEMS
from cachewarmd.v1 import control_pb2 as pb

_MAGIC = b"cwjob\0\0\1"
_FIXED = struct.Struct("<8sQQ")  # magic, bytes of the JSON, number of items
_STATE = struct.Struct("<16s32s208s")  # state, weights' SHA-256, error
_ROW = struct.Struct("<BBHIIQQ100s")
_JSON_OFFSET = _FIXED.size + _STATE.size
_MAX_JSON_BYTES = 64 << 20
_ALREADY_WARM = 1


class Told(msgspec.Struct):
    """What a job was asked for, but its prompts."""

    job_id: Annotated[int, msgspec.Meta(ge=1)]
    began: float
    request: bytes
    path: str  # of the model's directory
    dir_key: tuple[int, int]
    follow_links: bool

    def warmup(self) -> pb.Warmup:
        """Raises ValueError."""
        try:
            return pb.Warmup.FromString(self.request)
        except DecodeError as exc:
            raise ValueError("the request is malformed") from exc


class JobRecord:
    """One memfd, owned. Raises ValueError for one that is no record."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        magic, num_json, self.num_items = _FIXED.unpack(_read(fd, _FIXED.size, 0))
        if magic != _MAGIC or num_json > _MAX_JSON_BYTES or self.num_items > MAX_ITEMS:
            raise ValueError("not a job of this version")
        self._rows = _JSON_OFFSET + num_json
        self._prompts = self._rows + self.num_items * _ROW.size
        if os.fstat(fd).st_size < self._prompts:
            raise ValueError("the job's record is cut")
        try:
            content = json.loads(_read(fd, num_json, _JSON_OFFSET))
            self.told = msgspec.convert(content, Told)
        except (msgspec.ValidationError, RecursionError) as exc:
            raise ValueError(str(exc)) from exc

    @classmethod
    def create(cls, told: Told, prompts: list[pb.WarmPrompt]) -> JobRecord:
        """Raises OSError."""
        content = {**msgspec.structs.asdict(told), "request": base64.b64encode(told.request)}
        content["request"] = content["request"].decode()
        payload = json.dumps(content).encode()
        # Not sealed: it shrinks when the prompts are not needed any more, and nobody maps it.
        fd = os.memfd_create("cachewarm-job", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o400)
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(_FIXED.pack(_MAGIC, len(payload), len(prompts)))
                file.write(_STATE.pack(b"pending", bytes(32), b""))
                file.write(payload)
                row = _ROW.pack(pb.ITEM_STATE_PENDING, 0, 0, 0, 0, 0, 0, b"")
                file.writelines(row for _ in prompts)
                file.writelines(prompt_list.pack(prompts))
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def write_state(self, state: str, weights_sha256: bytes, error: str) -> None:
        digest = weights_sha256.ljust(32, b"\0")
        data = _STATE.pack(state.encode(), digest, _cut(error, 208))
        os.pwrite(self.fd, data, _FIXED.size)

    def read_state(self) -> tuple[str, bytes, str]:
        """State, weights' digest (empty while not known), error."""
        data = _read(self.fd, _STATE.size, _FIXED.size)
        state, digest, error = _STATE.unpack(data)
        return _text(state), digest if any(digest) else b"", _text(error)

    def write_item(self, item: pb.JobItem, num_attempts: int) -> None:
        """What became of an item; before anybody is told."""
        row = _ROW.pack(
            item.state,
            _ALREADY_WARM if item.already_warm else 0,
            min(num_attempts, 0xFFFF),
            item.num_tokens,
            item.done_tokens,
            item.first_us,
            item.last_us,
            _cut(item.detail, 100),
        )
        hit("job.item.before")
        os.pwrite(self.fd, row, self._rows + item.index * _ROW.size)
        hit("job.item.after")

    def read_items(self, items: Iterable[pb.JobItem]) -> dict[int, int]:
        """Put what is known into the items; returns their numbers of attempts."""
        data = _read(self.fd, self.num_items * _ROW.size, self._rows)
        attempts = {}
        for item, row in zip(items, _ROW.iter_unpack(data), strict=True):
            state, flags, attempts[item.index], *numbers, detail = row
            if state not in pb.ItemState.values():
                raise ValueError(f"item {item.index} has no state")
            item.state, item.detail = state, _text(detail)
            item.already_warm = bool(flags & _ALREADY_WARM)
            item.num_tokens, item.done_tokens, item.first_us, item.last_us = numbers
        return attempts

    def read_prompts(self) -> list[pb.WarmPrompt]:
        """Raises InvalidRequestError."""
        prompts = prompt_list.read(self.fd, self._prompts)
        if len(prompts) != self.num_items:
            raise InvalidRequestError("the job's prompts are not all there")
        return prompts

    def drop_prompts(self) -> None:
        """The job has ended: megabytes that nobody needs."""
        os.truncate(self.fd, self._prompts)

    def close(self) -> None:
        os.close(self.fd)


def _read(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise ValueError("the job's record is cut")
    return data


def _cut(text: str, size: int) -> bytes:
    return text.encode(errors="replace")[:size]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")
