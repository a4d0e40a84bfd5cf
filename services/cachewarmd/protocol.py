"""Frames and file descriptors on the control socket; no I/O of its own but recvmsg/sendmsg.

    +----------------+---------------------------+
    | u32 LE length  | Envelope (length bytes)   |   + SCM_RIGHTS beside the frame's first byte
    +----------------+---------------------------+

asyncio's and uvloop's stream readers drop descriptors silently, so both sides read with recvmsg.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from cachewarmd.errors import InvalidRequestError, ProtocolError
from cachewarmd.v1 import control_pb2 as pb

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 8 << 20
MAX_FDS = 2
KEY_BYTES = 32
# A block as LookupReply tells it: slot, number of tokens, generation, offset in the pool.
BLOCK = struct.Struct("<IIQQ")
_LENGTH = struct.Struct("<I")
_RECV_BYTES = 64 << 10
# Room for more than is allowed, so that a peer that sends too many is seen and refused.
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)


def split_keys(packed: bytes) -> list[bytes]:
    """The keys of a Lookup. Raises InvalidRequestError."""
    if len(packed) % KEY_BYTES:
        raise InvalidRequestError(f"keys: {KEY_BYTES} bytes are expected for each")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def blocks_of(reply: pb.LookupReply) -> Iterable[tuple[int, int, int, int]]:
    """Slot, number of tokens, generation and offset of each. Raises ProtocolError."""
    if len(reply.blocks) % BLOCK.size:
        raise ProtocolError("a lookup's blocks are not whole")
    return BLOCK.iter_unpack(reply.blocks)


def encode(envelope: pb.Envelope) -> bytes:
    """One frame. Raises ProtocolError when it would be over MAX_FRAME_BYTES."""
    size = envelope.ByteSize()
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(size) + envelope.SerializeToString()


def recv_bytes_and_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One recvmsg. b"" = end of stream. Raises ProtocolError when descriptors were cut off."""
    data, ancillary, flags, _ = sock.recvmsg(_RECV_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            usable = len(payload) - len(payload) % fds.itemsize
            fds.frombytes(payload[:usable])
    if flags & socket.MSG_CTRUNC:
        # Too many descriptors sent, or none left in this process: the rest is lost either way.
        close_all(fds)
        raise ProtocolError("file descriptors were truncated")
    return data, list(fds)


def send_with_fds(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int]) -> int:
    """One sendmsg; returns the bytes taken. The descriptors go with the first byte."""
    if not fds:
        return sock.send(data)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    return sock.sendmsg([data], [rights])


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor."""
    for fd in fds:
        os.close(fd)


class FrameDecoder:
    """Turns received pieces into (Envelope, fds). Any violation is a ProtocolError, for good."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int]) -> list[tuple[pb.Envelope, list[int]]]:
        """All frames that are whole now. On ProtocolError every descriptor is closed."""
        self._buffer += data
        self._fds.extend(fds)
        frames: list[tuple[pb.Envelope, list[int]]] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
            if len(self._fds) > MAX_FDS or (self._fds and not self._buffer):
                raise ProtocolError("file descriptors beside a frame that names none")
        except ProtocolError:
            for _, frame_fds in frames:
                close_all(frame_fds)
            self.close()
            raise
        return frames

    def _next(self) -> tuple[pb.Envelope, list[int]] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        envelope = pb.Envelope()
        try:
            envelope.ParseFromString(bytes(self._buffer[_LENGTH.size : end]))
        except DecodeError as exc:
            raise ProtocolError("not an Envelope") from exc
        del self._buffer[:end]
        if envelope.num_fds > min(MAX_FDS, len(self._fds)):
            raise ProtocolError("more file descriptors named than came, or than are allowed")
        return envelope, [self._fds.popleft() for _ in range(envelope.num_fds)]

    def close(self) -> None:
        """Give up what is held; call when the connection ends."""
        close_all(self._fds)
        self._fds.clear()
        self._buffer.clear()
