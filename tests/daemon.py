"""The real cachewarmd as a child process, for tests.

    with Daemon(short_dir / "s") as daemon, daemon.client(pb.ROLE_ADMIN) as client:
        ...

`start` (or `with`) returns when the daemon serves; `stop` (or the end of `with`) leaves no process
behind, whatever state it is in. Socket paths must stay short: use the fixture `short_dir`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import pytest

from cachewarmd import segment
from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2 as pb

SERVICES = Path(__file__).resolve().parents[1] / "services"
NOBODY = 65534
# Generous: the machine may be slow and shared. Nothing waits this long when all is well.
PATIENCE_S = 30.0


def environment() -> dict[str, str]:
    """Of a child process that shall find our packages and none of the caller's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CACHEWARMD_", "CACHEWARM_ENGINE_"))
    }
    paths = [str(SERVICES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


class StartFailedError(Exception):
    """The daemon ended instead of serving."""

    def __init__(self, returncode: int, stderr: str) -> None:
        super().__init__(f"cachewarmd exited with {returncode}: {stderr}")
        self.returncode = returncode
        self.stderr = stderr


class Daemon:
    """One cachewarmd; `extra` are more flags, `prelude` is Python run before it, to patch limits.

    `uid` starts it as another user (root only).
    """

    def __init__(
        self,
        socket: Path,
        pool_bytes: str = "256MiB",
        extra: Sequence[str] = (),
        *,
        prelude: str = "",
        uid: int | None = None,
    ) -> None:
        self.socket = socket
        self._flags = ["--socket", str(socket), "--pool-bytes", pool_bytes, *extra]
        self._prelude = prelude if uid is None else f"{become(uid)}\n{prelude}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file: IO[bytes] | None = None
        self._log = ""

    def start(self) -> Daemon:
        """Returns when it serves. Raises StartFailedError when it ends instead."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """Only the first half of `start`."""
        code = f"{self._prelude}\nfrom cachewarmd.__main__ import main; raise SystemExit(main())"
        self._log_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `wait`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *self._flags],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
        )

    def wait_ready(self) -> Daemon:
        """The second half of `start`."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not wait_readable(self._process.stdout.fileno()):
            self.stop()
            raise AssertionError(f"no ready line within {PATIENCE_S} s: {self.log()}")
        line = self._process.stdout.readline()
        if not line:
            raise StartFailedError(self.wait(), self.log())
        assert json.loads(line)["event"] == "ready"
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def serving_pid(self) -> int:
        """Of the daemon that answers; under a holder that is another one than `pid`."""
        return self.status().pid

    def kill_under_holder(self) -> int:
        """SIGKILL for the daemon, not for its holder; returns its pid once it is gone."""
        pid = self.serving_pid()
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            assert wait_readable(pidfd), "it is killed, but not dead"
        finally:
            os.close(pidfd)
        return pid

    def log(self) -> str:
        """What it wrote to stderr so far."""
        if self._log_file is not None:
            # Not `read`: the daemon writes where this same open file stands, and we would move it.
            size = os.fstat(self._log_file.fileno()).st_size
            self._log = os.pread(self._log_file.fileno(), size, 0).decode(errors="replace")
        return self._log

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        assert self._process is not None
        status = self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.log()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
        return status

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def sigstop(self) -> None:
        self.signal(signal.SIGSTOP)

    def sigcont(self) -> None:
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM and wait; SIGKILL when that takes too long. Idempotent."""
        if self._process is None:
            return
        if self.is_running():
            self.sigcont()
            self.signal(signal.SIGTERM)
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            family = [] if self._process is None else children_of(self.pid)
            self.kill()
            for pid in family:  # a holder's daemon would live on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise

    def __enter__(self) -> Daemon:
        return self if self.is_running() else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def client(
        self,
        role: pb.Role = pb.ROLE_OBSERVER,
        *,
        private_pool: tuple[int, int] | None = None,
        on_event: Callable[[pb.Envelope], None] | None = None,
    ) -> Client:
        """A new connection; close it, or use it in a `with`."""
        return Client.connect(
            self.socket,
            role,
            "test",
            private_pool=private_pool,
            on_event=on_event,
            timeout=PATIENCE_S,
        )

    def status(self) -> pb.StatusReply:
        """Asked on a connection of its own."""
        with self.client() as client:
            return client.call(pb.Envelope(status=pb.Status()), PATIENCE_S)[0].status_reply


def children_of(pid: int) -> list[int]:
    """Processes that this one has started and that run now."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in tasks.read_text().split()] if tasks.exists() else []


def become(uid: int) -> str:
    """Code that turns a root process into another user's, once our modules are imported.

    Not from the start: that user may be unable to read the interpreter or the source tree.
    """
    imports = "import os, structlog, cachewarmd.program"
    return f"{imports}\nos.setgroups([]); os.setgid({uid}); os.setuid({uid})"


def wait_readable(fd: int, limit_s: float = PATIENCE_S) -> bool:
    """Does the descriptor become readable (or end) within the limit?"""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * limit_s))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns as soon as the condition holds; fails the test when it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def private_pool(num_bytes: int, seals: int = segment.F_SEAL_SHRINK) -> Iterator[int]:
    """A memfd such as a worker brings; yields its descriptor."""
    fd = os.memfd_create("test-private-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, segment.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def fake_cgroup(root: Path, limit: int | None, used: int = 0, inactive_file: int = 0) -> None:
    """A cgroup2 tree for `--cgroup-root` with this process's own group, limited (None: not)."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line for line in lines if line.startswith("0::")), "0::/")
    folder = root / own.removeprefix("0::").lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nfile 7\n")


def open_fds() -> int:
    """How many descriptors this process has open, without what is garbage already."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def pmd_mapped_bytes(address: int) -> int:
    """Bytes of the mapping there that are mapped by huge pages, as the kernel counts."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return 1024 * int(next(line for line in lines if line.startswith("ShmemPmdMapped:")).split()[1])


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory whose name leaves room for a socket path of at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cw-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    """A running daemon with the smallest pool."""
    with Daemon(short_dir / "s", "64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[Daemon]:
    """One for all tests of a module that leave it as it is, apart from their keys and models."""
    folder = Path(tempfile.mkdtemp(prefix="cw-", dir="/tmp"))
    try:
        with Daemon(folder / "s", "64MiB") as running:
            yield running
    finally:
        shutil.rmtree(folder)
