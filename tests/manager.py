"""A fake service manager for tests: what a service sends to NOTIFY_SOCKET.

with Manager(str(short_dir / "notify")) as manager:
    ...
    assert manager.receive() == "READY=1"
"""

from __future__ import annotations

import socket
from types import TracebackType

from tests.daemon import PATIENCE_S, wait_readable


class Manager:
    """Receives on `address`, which is a path or, with a leading @, an abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.sock.settimeout(PATIENCE_S)

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sock.close()

    def receive(self) -> str:
        """The next message; TimeoutError when none comes."""
        return self.sock.recv(4096).decode()

    def receive_until(self, start: str) -> list[str]:
        """All messages up to the one that begins so."""
        heard = [self.receive()]
        while not heard[-1].startswith(start):
            heard.append(self.receive())
        return heard

    def drain(self) -> list[str]:
        """All that is there; waits for nothing."""
        heard = []
        while wait_readable(self.sock.fileno(), 0):
            heard.append(self.receive())
        return heard
