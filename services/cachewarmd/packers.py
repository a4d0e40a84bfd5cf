"""The daemon's side of the processes that read and pack weights (see `packer`).

One process for each load. One is started ahead, so that the first engine does not wait for a
Python to start. Threads that load call `read`; the daemon's loop the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from cachewarmd.errors import InternalError, ShuttingDownError, error_of
from cachewarmd.packer import REQUEST
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import FileIdentity
from cachewarmd.weights import Progress

CODE = "import sys; from cachewarmd.packer import main; main(int(sys.argv[1]))"


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=4095)]


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """A line from a packer. It reads files of others, so it is not believed to be well-formed."""

    fits: bool = False
    progress: tuple[str, _Count, _Count] | None = None
    error: _Small | None = None
    message: str = ""
    errno: _Small | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    identities: list[FileIdentity] = []


class _Process:
    """One packer, from its start to its end."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P keeps stray files of the current directory out.
                [sys.executable, "-P", "-c", CODE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # numpy would else start a thread for each core, for nothing.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C in the daemon's terminal is for the daemon.
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """From any thread; whoever reads from it sees the end."""
        self._process.kill()

    def end(self) -> str:
        """Leave no process and no descriptor behind; returns how it ended."""
        self._sock.close()
        status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def read(
        self,
        dir_fd: int,
        plan: pb.PackPlan | None,
        progress: Progress,
        obtain: Callable[[], int],
        follow: bool,
    ) -> tuple[bytes, list[FileIdentity]]:
        """As `weights.read_files`.

        Raises EOFError when the process ends before it is done, or says what makes no sense.
        """
        serialized = b"" if plan is None else plan.SerializeToString()
        try:
            head = REQUEST.pack(len(serialized), plan is not None, follow)
            socket.send_fds(self._sock, [head], [dir_fd])
            self._sock.sendall(serialized)
            with self._sock.makefile("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # killed while it wrote
                    if (said := _parse(line)) is None:
                        self.kill()  # whoever waits for its end must not wait for long
                        break
                    if (result := self._take(said, progress, obtain)) is not None:
                        return result
        except ConnectionError:
            pass
        raise EOFError

    def _take(
        self, said: _Said, progress: Progress, obtain: Callable[[], int]
    ) -> tuple[bytes, list[FileIdentity]] | None:
        if said.progress is not None:
            progress(*said.progress)
        elif said.fits:
            socket.send_fds(self._sock, [b"m"], [obtain()])
        elif said.error is not None:
            raise error_of(said.error, said.message)
        elif said.errno is not None:
            raise OSError(said.errno, os.strerror(said.errno))
        elif said.sha256 is not None:
            return bytes.fromhex(said.sha256), said.identities
        return None


def _parse(line: bytes) -> _Said | None:
    """None: it makes no sense."""
    try:
        return msgspec.json.decode(line, type=_Said)
    except (msgspec.MsgspecError, RecursionError):
        return None


class Packers:
    """All packers of the daemon; `close` ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._spare: _Process | None = None
        self._busy: set[_Process] = set()

    def prepare(self) -> None:
        """Start one ahead, if that can be done now."""
        with self._lock, contextlib.suppress(OSError):  # a load would tell
            if self._spare is None and not self._is_closed:
                self._spare = _Process()

    def read(
        self,
        dir_fd: int,
        plan: pb.PackPlan | None,
        progress: Progress,
        obtain: Callable[[], int],
        *,
        follow: bool,
    ) -> tuple[bytes, list[FileIdentity]]:
        """As `weights.read_files`, in a process; it is gone at the end, and its maps with it.

        Raises InternalError too, when the process dies, and ShuttingDownError.
        """
        process = self._take()
        done = False
        try:
            result = process.read(dir_fd, plan, progress, obtain, follow)
            done = True
            return result
        except EOFError:
            how = process.end()
            if self._is_closed:
                raise ShuttingDownError("the daemon is stopping") from None
            raise InternalError(f"the process that reads the weights {how}; try again") from None
        finally:
            if not done:
                process.kill()
            process.end()
            with self._lock:
                self._busy.discard(process)

    def _take(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError("the daemon is stopping")
            process, self._spare = self._spare, None
            if process is not None and not process.is_running:
                process.end()
                process = None
            if process is None:
                process = _Process()
            self._busy.add(process)
            return process

    def close(self) -> None:
        """End all of them now; loads that are under way fail with ShuttingDownError. Idempotent."""
        with self._lock:
            self._is_closed = True
            for process in self._busy:
                process.kill()
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
            spare.end()
