"""`cachewarmd --holder`: keeps the daemon's memfds and listening socket, and starts it again.

What systemd's fd store is to a unit, by the same protocol: the daemon stores descriptors with
FDSTORE=1 on NOTIFY_SOCKET and gets them back through LISTEN_FDS. Nothing else happens here, and
nothing of the daemon is imported, so that there is little that could end this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

FIRST_FD = 3  # SD_LISTEN_FDS_START
ROOM = 64  # as FileDescriptorStoreMax= of our unit
_CREDENTIALS = struct.Struct("3i")
_FDS_BYTES = 4 * 256
_BACK_OFF_S, _BACK_OFF_MAX_S = 0.1, 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_BAD_SETTINGS = 2  # another try can't help


def hold() -> int:
    """Run this program without --holder until it ends in order; returns its exit status."""
    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--holder")]
    return _Holder(command).run()


class _Holder:
    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._fds = _passed_to_us()
        self._outer = os.environ.pop("NOTIFY_SOCKET", "")
        self._child = 0
        self._is_ready = False  # this life of the daemon has served
        self._is_stopping = False
        # A name of the kernel's choice, and without a file: nothing is left behind by a SIGKILL.
        # Anybody may write to it; who writes is told by the kernel, and only our child counts.
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.bind("")
        self._notify.setblocking(False)

    def run(self) -> int:
        for number in _SIGNALS:
            signal.signal(number, self._stop)
        was_ready, delay = False, _BACK_OFF_S
        while True:
            self._is_ready = False
            status = self._one_life()
            was_ready = was_ready or self._is_ready
            exited = os.WIFEXITED(status)
            code = os.WEXITSTATUS(status) if exited else 128 + os.WTERMSIG(status)
            is_hopeless = exited and (not was_ready or code == _EXIT_BAD_SETTINGS)
            if code == 0 or self._has_to_stop() or is_hopeless:
                return code
            _say(f"the daemon ended ({code}), starting it again")
            if self._is_ready:
                delay = _BACK_OFF_S
                continue
            end = time.monotonic() + delay
            while time.monotonic() < end:
                time.sleep(_BACK_OFF_S)
                if self._has_to_stop():
                    return code
            delay = min(2 * delay, _BACK_OFF_MAX_S)

    def _has_to_stop(self) -> bool:
        return self._is_stopping

    def _stop(self, *_: object) -> None:
        self._is_stopping = True
        if self._child:
            os.kill(self._child, signal.SIGTERM)

    def _one_life(self) -> int:
        """From start to end; returns the wait status."""
        # A signal waits until it is clear whose it is.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # There is no thread here, and the child execs at once: it needs its own pid before.
        self._child = os.fork()
        if not self._child:
            self._become_daemon()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if self._is_stopping:  # one that came just before
            os.kill(self._child, signal.SIGTERM)
        pidfd = os.pidfd_open(self._child)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._notify, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            # Also what a dead one said last; only then may another be started.
            self._take_messages()
            if pidfd in ready:
                break
        os.close(pidfd)
        child, self._child = self._child, 0
        return os.waitpid(child, 0)[1]

    def _become_daemon(self) -> None:
        """In the forked child: does not return."""
        try:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            names, notify = list(self._fds), "@" + self._notify.getsockname()[1:].decode()
            # First away from the numbers that they shall have.
            least = FIRST_FD + len(names)
            high = [fcntl.fcntl(self._fds[n], fcntl.F_DUPFD_CLOEXEC, least) for n in names]
            for place, fd in enumerate(high, FIRST_FD):
                os.dup2(fd, place, inheritable=True)
            own = str(os.getpid())
            environ = dict(os.environ, NOTIFY_SOCKET=notify, FDSTORE=str(ROOM))
            if "WATCHDOG_USEC" in environ:
                environ["WATCHDOG_PID"] = own
            environ.update(LISTEN_PID=own, LISTEN_FDS=str(len(names)))
            environ["LISTEN_FDNAMES"] = ":".join(names)
            os.execve(self._command[0], self._command, environ)
        except OSError as exc:
            _say(f"the daemon can't be started: {exc}")
        finally:
            os._exit(127)

    # -- what the daemon says -------------------------------------------------------------------

    def _take_messages(self) -> None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FDS_BYTES)
        while True:
            try:
                data, ancillary, _, _ = self._notify.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            sender, fds = 0, []
            for level, kind, payload in ancillary:
                if level != socket.SOL_SOCKET:
                    continue
                if kind == socket.SCM_CREDENTIALS:
                    sender = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
                elif kind == socket.SCM_RIGHTS:
                    fds = list(struct.unpack(f"{len(payload) // 4}i", payload))
            if sender == self._child:
                fds = self._take(data, fds)
            for fd in fds:
                os.close(fd)

    def _take(self, data: bytes, fds: list[int]) -> list[int]:
        """One message; returns the descriptors that are not kept."""
        lines = data.decode(errors="replace").split("\n")
        name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
        if "FDSTOREREMOVE=1" in lines:
            self._drop(name)
        elif "FDSTORE=1" in lines:
            if len(fds) == 1 and name and (name in self._fds or len(self._fds) < ROOM):
                self._drop(name)
                self._fds[name] = fds.pop()
            else:
                _say(f"descriptor {name!r} was not kept")
        else:
            self._is_ready = self._is_ready or "READY=1" in lines
            self._tell_outer(data)
        return fds

    def _drop(self, name: str) -> None:
        if name in self._fds:
            os.close(self._fds.pop(name))

    def _tell_outer(self, data: bytes) -> None:
        """To the service manager that started us, if one did."""
        if not self._outer:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with sock, contextlib.suppress(OSError):
            sock.sendto(data, self._outer.replace("@", "\0", 1))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it may be gone
        os.write(2, f"cachewarmd: {text}\n".encode())


def _passed_to_us() -> dict[str, int]:
    """Descriptors that a service manager passed to this process, by name."""
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
    pid, count, fd_names, _ = (os.environ.pop(name, "") for name in names)
    if pid != str(os.getpid()):
        return {}
    fds = dict(zip(fd_names.split(":"), range(FIRST_FD, FIRST_FD + int(count)), strict=True))
    for fd in fds.values():
        os.set_inheritable(fd, False)
    return fds
