"""Bytes and descriptors of the control socket, in whatever pieces they come.

An input is one byte for how the stream is cut, one for how many descriptors come with the first
pieces, and the stream.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress

from cachewarmd import protocol
from cachewarmd.errors import ProtocolError
from cachewarmd.protocol import FrameDecoder
from cachewarmd.v1 import control_pb2 as pb
from tests.fuzz.target import Target, replaced

_NULL = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def check(data: bytes) -> None:
    """Every descriptor is handed out or closed; what is a frame can be sent again."""
    cut, counts, stream = *(data[:2].ljust(2, b"\0")), data[2:]
    step = cut or len(stream) or 1
    decoder = FrameDecoder()
    sent: list[int] = []
    taken: list[int] = []
    with suppress(ProtocolError):
        for start in range(0, len(stream), step):
            fds = [os.dup(_NULL) for _ in range(counts & 3)]
            counts >>= 2
            sent += fds
            for envelope, frame_fds in decoder.feed(stream[start : start + step], fds):
                taken += frame_fds
                assert envelope.num_fds == len(frame_fds) <= protocol.MAX_FDS, "descriptors"
                protocol.encode(envelope)
            # Taken and closed at once, so that a number that comes again is another descriptor.
            protocol.close_all(taken)
            taken.clear()
    decoder.close()
    assert not any(map(_is_open, sent)), "a descriptor was leaked"


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _next_without_count(self: FrameDecoder) -> tuple[pb.Envelope, list[int]] | None:
    """As the decoder's own, but whoever names descriptors is believed to have sent them."""
    if len(self._buffer) < 4:
        return None
    end = 4 + int.from_bytes(self._buffer[:4], "little")
    if end > protocol.MAX_FRAME_BYTES:
        raise ProtocolError("too long")
    if len(self._buffer) < end:
        return None
    try:
        envelope = pb.Envelope.FromString(bytes(self._buffer[4:end]))
    except Exception as exc:
        raise ProtocolError("not an Envelope") from exc
    del self._buffer[:end]
    return envelope, [self._fds.popleft() for _ in range(min(envelope.num_fds, protocol.MAX_FDS))]


def plant() -> AbstractContextManager[object]:
    """An unchecked count."""
    return replaced(FrameDecoder, "_next", _next_without_count)


def make() -> Target:
    """Some frames, alone and together, with and without descriptors."""
    hello = pb.Envelope(id=1, num_fds=1, hello=pb.Hello(protocol_version=3, name="engine"))
    lookup = pb.Envelope(id=2, lookup=pb.Lookup(stamp_id=0, keys=b"k" * 32))
    both = protocol.encode(hello) + protocol.encode(lookup)
    seeds = [
        b"\0\1" + protocol.encode(hello),
        b"\0\0" + protocol.encode(lookup),
        b"\x07\1" + both,
        b"\0\1" + both,
    ]
    return Target(check, seeds, plant)
