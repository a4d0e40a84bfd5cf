"""The front's end of a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field

from engine.channel import AsyncChannel, BrokenChannelError
from engine.request import Stats, StatsRequest, WorkerHello, WorkerReady
from engine.router import RoutedWorker


@dataclass(eq=False)
class LiveWorker:
    """A worker that said hello. `routed` is None while it is a spare."""

    pid: int
    pidfd: int
    role: str
    channel: AsyncChannel
    ready: WorkerReady | None = None
    routed: RoutedWorker | None = None
    stats: Stats | None = None
    asked_at: float = 0.0  # a StatsRequest that is not answered; 0 = none
    heard_at: float = 0.0
    stats_waiters: list[asyncio.Future[Stats]] = field(default_factory=list)

    def kill(self) -> None:
        """SIGKILL, whatever state it is in. A pid that was taken by another is not hit."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        self.channel.close()
        os.close(self.pidfd)

    def ask(self, now: float) -> None:
        """For its counts, which is also how it shows that it lives."""
        if not self.asked_at:
            self.asked_at = now
            self.channel.send(StatsRequest())


def peer_pid(writer: asyncio.StreamWriter) -> int:
    """Which process has dialled in, by the kernel's word."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(peer[:4], sys.byteorder)


async def greet(pid: int, channel: AsyncChannel, timeout: float) -> LiveWorker:
    """The worker at the other end: it says in which role, within `timeout` seconds.

    Raises BrokenChannelError, with the channel closed, for what is no worker of ours.
    """
    try:
        hello = await asyncio.wait_for(channel.receive(), timeout)
        if not isinstance(hello, WorkerHello):
            raise BrokenChannelError("its first message is no hello")
        return LiveWorker(pid, os.pidfd_open(pid), hello.role, channel)
    except (TimeoutError, BrokenChannelError, OSError) as exc:
        channel.close()
        raise BrokenChannelError(f"process {pid}: {exc}") from exc
