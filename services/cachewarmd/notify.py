"""Both halves of systemd's service protocol: what we tell the manager, what it hands us.

An own module because no pure-Python package passes descriptors. See sd_notify(3) and
sd_listen_fds(3). What is not there (no manager, an unset variable) is a no-op.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence

from cachewarmd.errors import CachewarmError

FIRST_FD = 3  # SD_LISTEN_FDS_START
MAX_STATUS_CHARS = 512
STATUS_EVERY_S = 5.0
# For what is told once. What is told again and again does not wait.
_PATIENCE_S = 2.0


class NotifyError(CachewarmError):
    """A variable of the service manager, or a descriptor's name, is not what it must be."""


class Notifier:
    """Tells the service manager; a no-op without one.

    A lost or stuck manager never raises and blocks for 2 s at most: the methods return whether the
    message left, and `num_lost` counts those that did not.
    """

    def __init__(
        self, address: str | None = None, watchdog_interval_s: float | None = None
    ) -> None:
        """`address` as in NOTIFY_SOCKET; `watchdog_interval_s`: seconds, None = no watchdog."""
        if address is not None and (address[:1] not in ("/", "@") or len(address) < 2):
            raise NotifyError(
                f"NOTIFY_SOCKET: {address!r} is not allowed: an absolute path or @name"
            )
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self.watchdog_interval_s = watchdog_interval_s
        self.num_lost = 0
        self._is_stopping = False

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Takes the variables out of `environ`, so that children don't speak for us.

        Raises NotifyError.
        """
        address = environ.pop("NOTIFY_SOCKET", None)
        pid, usec = environ.pop("WATCHDOG_PID", None), environ.pop("WATCHDOG_USEC", None)
        interval = None
        if usec is not None and (pid is None or _number("WATCHDOG_PID", pid) == os.getpid()):
            # Half of what the manager waits, as sd_watchdog_enabled(3) advises.
            interval = _number("WATCHDOG_USEC", usec) / 2e6 or None
        return cls(address or None, interval if address else None)

    @property
    def is_enabled(self) -> bool:
        return self._address is not None

    def ready(self) -> bool:
        """The start is over: we serve."""
        return self._tell("READY=1")

    def stopping(self) -> bool:
        """The stop has begun. Told once, however often it is called."""
        if self._is_stopping:
            return False
        self._is_stopping = True
        return self._tell("STOPPING=1")

    def status(self, text: str) -> bool:
        """One line for `systemctl status`; line ends become spaces, what is too long is cut."""
        line = " ".join(text.split())[:MAX_STATUS_CHARS]
        return self._tell(f"STATUS={line}", patience_s=0)

    def ping(self) -> bool:
        """Alive; the manager kills us when this stays away for two `watchdog_interval_s`."""
        if self.watchdog_interval_s is None:
            return False
        return self._tell("WATCHDOG=1", patience_s=0)

    def extend_timeout(self, seconds: float) -> bool:
        """The start (or stop) going on needs up to `seconds` more from now."""
        return self._tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def store_fd(self, name: str, fd: int) -> bool:
        """Hand a duplicate to the manager, which passes it to our next incarnation.

        Raises NotifyError for a name that is not allowed.
        """
        return self._tell(f"FDSTORE=1\nFDNAME={_fd_name(name)}", (fd,))

    def remove_fd(self, name: str) -> bool:
        """The manager closes what it stored under this name. Raises NotifyError."""
        return self._tell(f"FDSTOREREMOVE=1\nFDNAME={_fd_name(name)}")

    def _tell(self, text: str, fds: Sequence[int] = (), patience_s: float = _PATIENCE_S) -> bool:
        if self._address is None:
            return False
        try:
            # A new socket each time: the manager may have rebound its own meanwhile.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(patience_s)
                sock.connect(self._address)
                socket.send_fds(sock, [text.encode(errors="backslashreplace")], list(fds))
        except OSError:
            self.num_lost += 1
            return False
        return True


async def keep_telling(notifier: Notifier, status: Callable[[], str]) -> None:
    """Ping and tell a changed status until cancelled.

    Belongs on the loop that serves: when that hangs, the pings stop. They come four times as often
    as the manager asks, so that one late turn of the loop is no restart.
    """
    pause, told = STATUS_EVERY_S, None
    if notifier.watchdog_interval_s is not None:
        pause = min(pause, notifier.watchdog_interval_s / 2)
    while notifier.is_enabled:
        notifier.ping()
        text = status()
        if text != told and notifier.status(text):
            told = text
        await asyncio.sleep(pause)


def listen_fds(environ: MutableMapping[str, str]) -> dict[str, int]:
    """Descriptors that the manager passed, by FileDescriptorName; empty when none are for us.

    They are the caller's from here on and close on exec. Takes the variables out of `environ`.
    Raises NotifyError.
    """
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
    pid, count, fd_names, _ = (environ.pop(name, None) for name in names)
    if pid is None or count is None or _number("LISTEN_PID", pid) != os.getpid():
        return {}
    num_fds = _number("LISTEN_FDS", count)
    given = fd_names.split(":") if fd_names else ["unknown"] * num_fds
    if len(given) != num_fds or len(set(given)) != num_fds:
        raise NotifyError(
            f"LISTEN_FDNAMES: {fd_names!r} is not allowed: {num_fds} different names are needed"
        )
    fds = dict(zip(given, range(FIRST_FD, FIRST_FD + num_fds), strict=True))
    for name, fd in fds.items():
        try:
            os.set_inheritable(fd, False)
        except OSError as exc:
            raise NotifyError(f"LISTEN_FDS: {name!r} is descriptor {fd}: {exc.strerror}") from exc
    return fds


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise NotifyError(f"{name}: {value!r} is not allowed: a whole number")
    return int(value)


def _fd_name(name: str) -> str:
    # What systemd accepts, see FileDescriptorName= in systemd.socket(5).
    is_printable = name.isascii() and name.isprintable()
    if not 1 <= len(name) <= 255 or not is_printable or ":" in name:
        raise NotifyError(
            f"descriptor name {name!r} is not allowed: 1 to 255 printable ASCII characters, no ':'"
        )
    return name
