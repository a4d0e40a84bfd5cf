"""Worker processes: spawn, hear, replace. A worker is exec'd anew, never forked from the front."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from cachewarmd import options
from engine.channel import AsyncChannel, BrokenChannelError
from engine.config import WorkerConfig
from engine.errors import StartError
from engine.request import (
    Finished,
    Output,
    Progress,
    Stats,
    StatsRequest,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from engine.router import Router

_log = structlog.get_logger()

_DIAL_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_MAX_FAILED_STARTS = 3
_STATS_TIMEOUT_S = 2.0


def entry_command(program: str) -> list[str]:
    """Command line of one of our programs with this interpreter; -P keeps stray files out."""
    code = f"import sys; from {program}.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]


def worker_environment() -> dict[str, str]:
    """Spinning OpenMP threads starve a busy machine: they wait passively unless told otherwise."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


class WorkerSupervisor:
    """Keeps one unified worker alive and tells the router of it.

    `socket_path` is where workers dial in. `on_state(ready)` is called when a worker is ready and
    when it is lost.
    """

    def __init__(
        self,
        config: WorkerConfig,
        socket_path: Path,
        router: Router,
        on_state: Callable[[WorkerReady | None], None],
    ) -> None:
        self._config = config
        self._path = socket_path
        self._router = router
        self._on_state = on_state
        self._dialled: asyncio.Queue[AsyncChannel] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._channel: AsyncChannel | None = None
        self._stats: asyncio.Future[Stats] | None = None
        self._stopping = False
        self.info: WorkerReady | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Until `stop`. Raises StartError when workers die before they are ready, time after time.

        A worker that names its reason (no such model, say) is not tried again.
        """
        await self._listen()
        failed = 0
        try:
            while not self._stopping:
                was_ready = await self._one_life()
                failed = 0 if was_ready else failed + 1
                if failed >= _MAX_FAILED_STARTS and not self._stopping:
                    raise StartError(f"the worker died {failed} times before it was ready")
        finally:
            self._router.no_worker_left()
            await self._close()

    async def _listen(self) -> None:
        try:
            options.ensure_private_dir(self._path.parent)
        except options.OptionError as exc:
            raise StartError(str(exc)) from exc
        if self._path.exists() and stat.S_ISSOCK(self._path.lstat().st_mode):
            self._path.unlink()  # of an engine that died on this port; we hold the port now
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._on_dial, str(self._path))
        except OSError as exc:
            raise StartError(f"worker socket {self._path}: {exc.strerror}") from exc
        finally:
            os.umask(before)

    def _on_dial(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._dialled.put_nowait(AsyncChannel(reader, writer))

    async def _one_life(self) -> bool:
        """Spawn a worker and hear it until it is gone; was it ever ready?"""
        self._process = await asyncio.create_subprocess_exec(
            *entry_command("engine"),
            "worker",
            "--role",
            self._config.role,
            "--front",
            f"unix:{self._path}",
            "--config-json",
            self._config.to_json(),
            stdin=asyncio.subprocess.DEVNULL,
            env=worker_environment(),
        )
        died = asyncio.create_task(self._process.wait())
        was_ready = False
        try:
            channel = await self._wait_for_dial(died)
            if channel is None:
                return False
            self._channel = channel
            was_ready = await self._hear(channel)
        finally:
            if was_ready:
                self._router.worker_lost()
                self.info = None
                self._on_state(None)
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            await self._reap(died)
        return was_ready

    async def _wait_for_dial(self, died: asyncio.Task[int]) -> AsyncChannel | None:
        dialled = asyncio.create_task(self._dialled.get())
        await asyncio.wait(
            {dialled, died}, timeout=_DIAL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if dialled.done():
            return dialled.result()
        dialled.cancel()
        return None

    async def _hear(self, channel: AsyncChannel) -> bool:
        """Everything a worker says, until it is gone."""
        was_ready = False
        try:
            while True:
                message = await channel.receive()
                match message:
                    case WorkerHello():
                        if self._process is None or message.pid != self._process.pid:
                            _log.warning("stranger_on_worker_socket", pid=message.pid)
                            return was_ready
                    case WorkerReady():
                        was_ready, self.info = True, message
                        self._router.worker_ready(channel.send)
                        self._on_state(message)
                    case WorkerFailed():
                        raise StartError(message.message)
                    case Stats():
                        if self._stats is not None and not self._stats.done():
                            self._stats.set_result(message)
                    case Output() | Finished() | Progress():
                        if not self._router.on_message(message):
                            return was_ready
        except BrokenChannelError:
            if not self._stopping:
                _log.warning("worker_lost", pid=self.pid)
            return was_ready

    async def _reap(self, died: asyncio.Task[int]) -> None:
        """A worker leaves when its channel closes; one that does not is killed."""
        assert self._process is not None
        patience = _STOP_TIMEOUT_S if self._stopping else 0.2
        await asyncio.wait({died}, timeout=patience)
        if not died.done():
            self._process.kill()
        await died

    async def stats(self) -> Stats | None:
        """Counts of the worker now; None when there is none or it does not answer in time."""
        if self._channel is None or self.info is None:
            return None
        if self._stats is None or self._stats.done():
            self._stats = asyncio.get_running_loop().create_future()
            self._channel.send(StatsRequest())
        done, _ = await asyncio.wait({self._stats}, timeout=_STATS_TIMEOUT_S)
        return self._stats.result() if done else None

    def stop(self) -> None:
        """Let the worker finish its last publishes and go; `run` then ends."""
        self._stopping = True
        if self._channel is not None:
            self._channel.close()
        elif self._process is not None and self._process.returncode is None:
            self._process.terminate()  # not dialled in yet

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        while not self._dialled.empty():
            self._dialled.get_nowait().close()
        self._path.unlink(missing_ok=True)


def free_port_probe(host: str, port: int) -> None:
    """Raises StartError when something listens there already, under any form of the address.

    A wildcard address binds silently over a loopback one, so asking the kernel is not enough.
    """
    if not port:
        return
    target = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    try:
        with socket.create_connection((target, port), timeout=1.0):
            pass
    except OSError:
        return
    raise StartError(f"{host}:{port} is in use: another server listens there")
