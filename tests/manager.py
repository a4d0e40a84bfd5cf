"""A fake service manager for tests: what a service sends to NOTIFY_SOCKET, and its fd store.

with Manager(str(short_dir / "notify")) as manager:
    ...
    assert manager.receive() == "READY=1"
"""

from __future__ import annotations

import os
import socket
from types import TracebackType

from tests.daemon import PATIENCE_S, wait_readable


class Manager:
    """Receives on `address`, which is a path or, with a leading @, an abstract name.

    With `is_store` it stores descriptors as it is told to, and that is not among the messages.
    """

    def __init__(self, address: str, *, is_store: bool = False) -> None:
        self.address = address
        self._is_store = is_store
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.sock.settimeout(PATIENCE_S)
        self.stored: dict[str, int] = {}

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sock.close()
        for fd in self.stored.values():
            os.close(fd)

    def receive(self) -> str:
        """The next message; TimeoutError when none comes."""
        while (text := self._next()) is None:
            pass
        return text

    def _next(self) -> str | None:
        """None = it was about a descriptor, and is done."""
        data, fds, _, _ = socket.recv_fds(self.sock, 4096, 4)
        text = data.decode()
        if self._is_store and text.startswith("FDSTORE"):
            name = text.partition("FDNAME=")[2]
            if name in self.stored:
                os.close(self.stored.pop(name))
            if fds:
                self.stored[name] = fds.pop()
            return None
        for fd in fds:
            os.close(fd)
        return text

    def receive_until(self, start: str) -> list[str]:
        """All messages up to the one that begins so."""
        heard = [self.receive()]
        while not heard[-1].startswith(start):
            heard.append(self._next())
        return [text for text in heard if text is not None]

    def drain(self) -> list[str]:
        """All that is there; waits for nothing."""
        heard = []
        while wait_readable(self.sock.fileno(), 0):
            heard.append(self._next())
        return [text for text in heard if text is not None]
