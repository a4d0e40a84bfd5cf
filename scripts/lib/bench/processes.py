"""The real programs as child processes, and a clean machine afterwards, whatever happened."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2
from engine.client import EngineClient
from engine.spawn import entry_command
from scripts.lib.bench.errors import BenchError

START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 40.0  # above the engine's own limit for streams that run
_GONE_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 30.0
_NO_PROGRESS_S = 5.0
_ASK_TIMEOUT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def adopt_orphans() -> None:
    """Make this process the parent of what its children leave behind: workers, a daemon.

    So they can be found, waited for and counted. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _environment(runtime_dir: Path) -> dict[str, str]:
    """The caller's without settings of our programs: those measured stand on the command line.

    And as installed programs start: their modules compiled once.
    """
    ours = ("CACHEWARMD_", "CACHEWARM_ENGINE_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "XDG_RUNTIME_DIR": str(runtime_dir)}


class Program:
    """One of our programs. `started` is the moment just before it was."""

    def __init__(self, command: Sequence[str], runtime_dir: Path, log: Path) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(runtime_dir),
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def wait_ready(self) -> dict[str, Any]:
        """Its `ready` line. Raises BenchError when it ends, or says nothing for long."""
        assert self.process.stdout is not None
        fd, text = self.process.stdout.fileno(), b""
        end = self.started + START_TIMEOUT_S
        while not text.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BenchError(self._failure(f"said nothing for {START_TIMEOUT_S:g} s"))
            part = os.read(fd, 4096)
            if not part:
                raise BenchError(self._failure("ended instead of starting"))
            text += part
        ready: dict[str, Any] = json.loads(text.splitlines()[0])
        return ready

    def _failure(self, what: str) -> str:
        tail = self._log.read_text(errors="replace").splitlines()[-5:]
        return "\n".join([f"{self._log.stem} {what}:", *tail])

    def descendants(self) -> list[psutil.Process]:
        """What it has started and is still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """SIGKILL it and all that it has started, as a crash of the whole would; waits for them."""
        doomed = self.descendants()
        self.process.kill()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(doomed, _GONE_TIMEOUT_S)
        self._close()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


class Daemon(Program):
    """A cachewarmd that serves; `is_held` = under its holder, which starts it again."""

    def __init__(
        self, socket: Path, pool_bytes: str | None, runtime_dir: Path, log: Path, *, is_held: bool
    ) -> None:
        self.socket = socket
        config = _empty_config(runtime_dir)
        command = [*entry_command("cachewarmd"), "--socket", str(socket), "--config", str(config)]
        command += [] if pool_bytes is None else ["--pool-bytes", pool_bytes]
        command += ["--holder"] if is_held else []
        super().__init__(command, runtime_dir, log)

    def status(self) -> control_pb2.StatusReply:
        """Raises CachewarmError."""
        observer = control_pb2.ROLE_OBSERVER
        with Client.connect(self.socket, observer, "bench", timeout=_ASK_TIMEOUT_S) as client:
            request = control_pb2.Envelope(status=control_pb2.Status())
            return client.call(request, _ASK_TIMEOUT_S)[0].status_reply

    def settle(self) -> None:
        """Returns when its pool has all its pages: it allocates them while it serves already.

        One that has given up, for want of memory, is known by no progress. Raises CachewarmError.
        """
        size, grown = -1, time.monotonic()
        while time.monotonic() < grown + _NO_PROGRESS_S:
            pool = self.status().pool
            if pool.committed_bytes >= pool.pool_bytes:
                return
            if pool.committed_bytes > size:
                size, grown = pool.committed_bytes, time.monotonic()
            time.sleep(0.05)


class Engine(Program):
    """A `cachewarm-engine serve`; `target` is its address once it is ready."""

    def __init__(
        self, model: Path, cachewarmd: str, flags: Sequence[str], runtime_dir: Path, log: Path
    ) -> None:
        command = [*entry_command("engine"), "serve", "--model", str(model), *flags]
        command += ["--cachewarmd", cachewarmd, "--port", "0", "--http-port", "off"]
        command += ["--config", str(_empty_config(runtime_dir))]
        super().__init__(command, runtime_dir, log)
        self.target = ""

    def wait_ready(self) -> dict[str, Any]:
        ready = super().wait_ready()
        self.target = ready["address"]
        return ready

    def client(self) -> EngineClient:
        """A new one; use it in a `with`."""
        return EngineClient(self.target)

    def settle(self) -> None:
        """Returns when no request is there and what was computed has been published.

        The last is seen by private blocks that are free again. After half a minute the measurement
        goes on in any case; what it finds in the cache stands in its result.
        """
        end = time.monotonic() + _IDLE_TIMEOUT_S
        with self.client() as client:
            while time.monotonic() < end:
                info = client.server_info()
                if not (info.num_requests_running or info.num_requests_waiting) and all(
                    worker.num_private_blocks_free == worker.num_private_blocks
                    for worker in info.workers
                ):
                    return
                time.sleep(0.01)


def _empty_config(runtime_dir: Path) -> Path:
    """In place of the host's own settings."""
    path = runtime_dir / "empty.toml"
    path.touch()
    return path


class Services:
    """Starts programs in a folder of its own and ends all of them at the end of `with`."""

    def __init__(
        self, folder: Path, model: Path, serve_flags: Sequence[str], pool_bytes: str | None
    ) -> None:
        self._folder = folder
        self._pool_bytes = pool_bytes
        self._model = model
        self._serve_flags = serve_flags
        self._programs: list[Program] = []
        self._num_runtime_dirs = 0

    def _runtime_dir(self) -> Path:
        """A new one for each program: none finds what another left."""
        self._num_runtime_dirs += 1
        path = self._folder / f"run{self._num_runtime_dirs}"
        path.mkdir(mode=0o700)
        return path

    def start_daemon(self, *, is_held: bool = False) -> Daemon:
        """Returns when it serves and has its memory. Raises BenchError, CachewarmError."""
        runtime_dir = self._runtime_dir()
        log = self._folder / "cachewarmd.log"
        daemon = Daemon(runtime_dir / "s", self._pool_bytes, runtime_dir, log, is_held=is_held)
        self._programs.append(daemon)
        daemon.wait_ready()
        daemon.settle()
        return daemon

    def start_engine(self, daemon: Daemon | None) -> Engine:
        """Returns when it serves. Without a daemon it starts one itself. Raises BenchError."""
        cachewarmd = "auto" if daemon is None else str(daemon.socket)
        log = self._folder / "engine.log"
        engine = Engine(self._model, cachewarmd, self._serve_flags, self._runtime_dir(), log)
        self._programs.append(engine)
        engine.wait_ready()
        return engine

    def stop(self) -> None:
        """End what is there, last started first, and what it has left behind."""
        while self._programs:
            self._programs[-1].stop()
            self._programs.pop()
        left = psutil.Process().children(recursive=True)
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None:
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(end)
            _, left = psutil.wait_procs(left, _GONE_TIMEOUT_S)
            if not left:
                return

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
