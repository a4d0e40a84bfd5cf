"""One client's connection: bytes and descriptors in, frames out, and proof of its end."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable

from cachewarmd import protocol
from cachewarmd.errors import ProtocolError
from cachewarmd.v1 import control_pb2 as pb

_PEERCRED = struct.Struct("3i")
_MAX_UNSENT_BYTES = 32 << 20


_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, Linux 6.5
_SO_PEERGROUPS = 59  # Linux 4.13
_MAX_GROUPS = 256  # what Python's getsockopt takes: 1024 bytes


def _peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A handle on the peer's process. Raises OSError (ESRCH: it is gone).

    By pid only where the kernel has nothing better: the number may be another process's by now.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


class Connection:
    """Non-blocking frames over one accepted socket.

    `on_frame(envelope, fds)` is called for each frame (the callee owns the fds), `on_end()` once.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[pb.Envelope, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = protocol.FrameDecoder()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self.is_closed = False
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        self.pid, self.uid, self._gid = _PEERCRED.unpack(raw)
        self._was_gone = False
        try:
            self._pidfd = _peer_pidfd(sock, self.pid)
        except OSError as exc:
            self._pidfd = -1
            # Anything but "no such process" proves nothing: a peer in another pid namespace has
            # pid 0 here.
            self._was_gone = exc.errno == errno.ESRCH
        self._loop.add_reader(sock.fileno(), self._readable)

    def peer_groups(self) -> frozenset[int]:
        """Group ids the peer had when it connected; only its first when it has more than 256."""
        try:
            raw = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
        except OSError:
            return frozenset((self._gid,))
        return frozenset((self._gid, *struct.unpack(f"{len(raw) // 4}I", raw)))

    def is_open(self) -> bool:
        """Does the peer still hold its end? False as soon as it has closed it or died."""
        if self.is_closed:
            return False
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    async def wait_peer_dead(self, limit_s: float) -> bool:
        """After the end: is the peer's process gone (True), or still there after `limit_s`?

        A process closes its sockets just before it is reported dead, so ask, then wait.
        """
        if self._pidfd < 0:
            if not self._was_gone:
                await asyncio.sleep(limit_s)
            return self._was_gone
        dead = asyncio.Event()
        self._loop.add_reader(self._pidfd, dead.set)
        try:
            await asyncio.wait_for(dead.wait(), limit_s)
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        return True

    def send(self, envelope: pb.Envelope, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame; `fds` are duplicated, the caller keeps its own.

        A peer that does not read is cut off when it owes too much. Raises nothing.
        """
        if self.is_closed:
            return
        envelope.num_fds = len(fds)
        data = memoryview(protocol.encode(envelope))
        self._unsent.append((data, [os.dup(fd) for fd in fds]))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._flush()
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, fds = self._unsent[0]
                sent = protocol.send_with_fds(self._sock, data, fds)
                protocol.close_all(fds)
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent[0] = (data[sent:], [])
                    continue
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, fds = protocol.recv_bytes_and_fds(self._sock)
            if not data:
                self.close()
                return
            frames = self._decoder.feed(data, fds)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as exc:
            self._refuse(exc)
            return
        for envelope, frame_fds in frames:
            if self.is_closed:
                protocol.close_all(frame_fds)
            else:
                self._on_frame(envelope, frame_fds)

    def _refuse(self, exc: Exception) -> None:
        error = pb.ErrorReply(code=pb.ERROR_CODE_PROTOCOL, message=str(exc))
        self.send(pb.Envelope(error=error))
        self.close()

    def close(self) -> None:
        """End it; idempotent. `on_end` runs on the next turn of the loop."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._decoder.close()
        for _, fds in self._unsent:
            protocol.close_all(fds)
        self._unsent.clear()
        self._sock.close()
        self._loop.call_soon(self._on_end)

    def forget_peer(self) -> None:
        """Give up the process handle without waiting (used when the daemon stops)."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
