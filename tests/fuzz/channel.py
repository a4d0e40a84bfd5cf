"""Messages between front and worker, as each end reads them.

An input is a byte, whose lowest bit says who reads, and the stream up to its end.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import struct
import typing
from contextlib import AbstractContextManager
from typing import Any, cast

import msgspec

from engine import channel
from engine.channel import AsyncChannel, BlockingChannel, BrokenChannelError
from engine.request import (
    Abort,
    Finished,
    FromWorker,
    Output,
    Progress,
    SamplingParams,
    Stats,
    StatsRequest,
    Submit,
    ToWorker,
    WorkerFailed,
    WorkerHello,
)
from tests.fuzz.target import Target, replaced

_loop = asyncio.new_event_loop()


class _Bytes:
    """As much of a socket as the blocking end needs to read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def check(data: bytes) -> None:
    """Messages of the right types, until the stream ends or is broken."""
    stream = data[1:]
    if data[:1] and data[0] & 1:
        _read_as_worker(stream)
    else:
        _read_as_front(stream)


def _read_as_worker(stream: bytes) -> None:
    ours = BlockingChannel(cast(Any, _Bytes(stream)))
    for _ in itertools.count():
        try:
            message = ours.receive()
        except BrokenChannelError:
            return
        _check_message(message, typing.get_args(ToWorker))


def _read_as_front(stream: bytes) -> None:
    reader = asyncio.StreamReader(loop=_loop)
    reader.feed_data(stream)
    reader.feed_eof()
    ours = AsyncChannel(reader, cast(Any, None))
    for _ in itertools.count():
        step = ours.receive()
        try:
            step.send(None)  # all is there, so it ends at the first step
        except StopIteration as end:
            _check_message(end.value, typing.get_args(FromWorker))
        except BrokenChannelError:
            return


def _check_message(message: object, kinds: tuple[type, ...]) -> None:
    assert isinstance(message, kinds), "a message of no known type"
    assert message == msgspec.msgpack.decode(
        msgspec.msgpack.encode(message), type=type(message)
    ) or "nan" in repr(message), "a message that changes on its way"


def plant() -> AbstractContextManager[object]:
    """A worker believes what it is sent to be a message for it."""
    return replaced(channel, "ToWorker", ToWorker | int)


def make() -> Target:
    """A message of each kind, and some in a row."""
    submit = Submit("r", 1, [1, 2, 300], [4], SamplingParams(0.5, 0.9, 5, 0.1), 7, 8, [2])
    to_worker = [submit, Abort(3), StatsRequest()]
    from_worker = [
        WorkerHello(5, "unified"),
        WorkerFailed("no weights"),
        Progress("r", 1, 0, 128),
        Output("r", 1, 0, 3, [5, 6]),
        Finished("r", 1, 0, "error", stop_token_id=2, error=("InternalError", "text")),
        Stats(1, 2, 3, 4, 5, 6, 7, {"decode": 8}, {"decode": 0.5}, 9, "daemon"),
    ]
    seeds = [b"\1" + channel.encode(message) for message in to_worker]
    seeds += [b"\0" + channel.encode(message) for message in from_worker]
    seeds.append(b"\1" + b"".join(map(channel.encode, to_worker)))
    # Unknown fields are passed over, however deep they are.
    nested = msgspec.msgpack.encode({"type": "Abort", "attempt": 1})
    nested = b"\x83" + nested[1:] + b"\xa1x" + b"\x91" * 1500 + b"\x00"
    seeds.append(b"\1" + struct.pack("<I", len(nested)) + nested)
    return Target(check, seeds, plant)
