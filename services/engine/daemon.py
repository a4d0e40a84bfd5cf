"""The front's side of cachewarmd: mind one that was started here, drop the model's blocks."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from pathlib import Path

from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError, InvalidRequestError, NotFoundError
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from engine import errors
from engine.child import Child

_log = get_logger()

_PROBE_TIMEOUT_S = 1.0
_LEAVE_S = 3.0  # until it must have seen that our own processes are gone
_FLUSH_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 20.0
_ALREADY_SERVED = 75


class OurDaemon:
    """The daemon that this engine's start began, if it did; `async with` stops it at the end.

    It is left running if `keep`, and if another engine uses it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | None, socket: Path | None, keep: bool
    ) -> None:
        self._process = process
        self._socket = socket
        self._keep = keep
        self._serves: asyncio.Task[bool] | None = None

    async def ready(self) -> None:
        """Returns when it serves, or never will: that is not fatal, it is logged."""
        if self._serves is not None:
            await asyncio.wait({self._serves})

    async def __aenter__(self) -> OurDaemon:
        if self._process is not None:
            self._serves = asyncio.create_task(_does_serve(self._process))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._serves is None or self._socket is None:
            return
        if await self._serves and not self._keep:
            await stop_daemon(self._socket)


async def _does_serve(process: subprocess.Popen[bytes]) -> bool:
    child = Child(process)
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    line = b""
    with contextlib.suppress(TimeoutError):
        line = await asyncio.wait_for(reader.readline(), _START_TIMEOUT_S)
    pipe.close()
    if line:
        return True
    await child.wait(1.0)
    if child.returncode != _ALREADY_SERVED:
        _log.warning("daemon_not_started_serving_cold", exit_status=child.returncode)
    return False


async def stop_daemon(socket: Path) -> None:
    """Ask the daemon to stop unless another engine uses it."""

    def ask() -> None:
        request = pb.Envelope(shutdown=pb.Shutdown(only_if_unused=True))
        end = time.monotonic() + _LEAVE_S
        with Client.connect(socket, pb.ROLE_ADMIN, "engine", timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                try:
                    client.call(request, _PROBE_TIMEOUT_S)
                    return
                except InvalidRequestError:  # in use; it may not have seen us leave yet
                    if time.monotonic() > end:
                        raise
                time.sleep(0.05)

    try:
        await asyncio.to_thread(ask)
    except CachewarmError as exc:
        _log.info("daemon_left_running", reason=str(exc))


async def flush(socket: Path, model_name: str) -> pb.EvictReply:
    """Drop the model's blocks that nobody uses. Raises NoDaemonError."""

    def ask() -> pb.EvictReply:
        request = pb.Envelope(evict=pb.Evict(model=model_name))
        with Client.connect(socket, pb.ROLE_ADMIN, "engine", timeout=_PROBE_TIMEOUT_S) as client:
            try:
                return client.call(request, _FLUSH_TIMEOUT_S)[0].evict_reply
            except NotFoundError:
                return pb.EvictReply()  # it never held any of that model

    try:
        return await asyncio.to_thread(ask)
    except CachewarmError as exc:
        raise errors.NoDaemonError(f"cachewarmd: {exc}") from exc
