"""A child process as an event loop sees it, also one that was started before there was a loop."""

from __future__ import annotations

import asyncio
import os
import subprocess


class Child:
    """Knows when the process ends. `returncode` is None until `wait` has seen that."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """To be made on the loop; nobody else may wait for the process from now on."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)  # readable once it has ended
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()  # it has ended: this only takes its status
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self, timeout: float | None = None) -> bool:
        """Has it ended within that time?"""
        await asyncio.wait({self._ended}, timeout=timeout)
        return self._ended.done()

    def terminate(self) -> None:
        """SIGTERM, if it still runs."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._process.kill()
