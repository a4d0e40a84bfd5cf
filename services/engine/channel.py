"""Typed messages over a Unix socket: msgpack frames, one side blocking, the other asyncio."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from engine.request import FromWorker, ToWorker

if TYPE_CHECKING:  # a worker has no event loop, and its start is waited for
    import asyncio

_LENGTH = struct.Struct("<I")
# 128K prompt ids and as many output ids, five bytes each at most, with room.
MAX_MESSAGE_BYTES = 8 << 20

# What decoding raises; fields that nobody knows are passed over, but not at any depth.
_NOT_OURS = (msgspec.MsgspecError, RecursionError)
_encoder = msgspec.msgpack.Encoder()


def encode(message: FromWorker | ToWorker) -> bytes:
    """One frame: u32 little-endian length, msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class BrokenChannelError(Exception):
    """The peer closed, or sent what is no frame of ours."""


class BlockingChannel:
    """A worker's end: `receive` on one thread, `send` on another."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        """Raises BrokenChannelError."""
        try:
            self._sock.sendall(encode(message))
        except OSError as exc:
            raise BrokenChannelError(str(exc)) from exc

    def receive(self) -> ToWorker:
        """Wait for the next. Raises BrokenChannelError."""
        try:
            head = self._file.read(_LENGTH.size)
            (size,) = _LENGTH.unpack(head)
            if size > MAX_MESSAGE_BYTES:
                raise BrokenChannelError(f"message of {size} bytes")
            return self._decoder.decode(self._file.read(size))
        except (OSError, struct.error, *_NOT_OURS) as exc:
            raise BrokenChannelError(str(exc)) from exc


class AsyncChannel:
    """The front's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def send(self, message: ToWorker) -> None:
        """Queue it; a worker that is gone shows at `receive`."""
        if not self._writer.is_closing():  # uvloop raises for one that the peer has reset
            self._writer.write(encode(message))

    async def receive(self) -> FromWorker:
        """Wait for the next. Raises BrokenChannelError."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_MESSAGE_BYTES:
                raise BrokenChannelError(f"message of {size} bytes")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (OSError, EOFError, *_NOT_OURS) as exc:
            raise BrokenChannelError(str(exc)) from exc

    def close(self) -> None:
        """End it."""
        self._writer.close()
