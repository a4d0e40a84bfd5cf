"""The control socket's place: one daemon at a time, stale sockets replaced, other files spared."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from cachewarmd import options
from cachewarmd.errors import CachewarmError

_BACKLOG = 128


class SocketInUseError(CachewarmError):
    """Another daemon owns the socket."""


class SocketPathError(CachewarmError):
    """The path can't be a socket of ours."""


@dataclass(frozen=True)
class Listening:
    """The control socket while it is ours; a context manager that gives it up.

    `engine_gid`: members of this group may connect as engines and observers; None = nobody else.
    """

    path: Path
    sock: socket.socket
    lock_fd: int
    is_activated: bool
    engine_gid: int | None

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        # The lock is still held, so the path is ours, unless the service manager listens on it.
        if not self.is_activated:
            self.path.unlink(missing_ok=True)
        self.sock.close()
        os.close(self.lock_fd)


def listen(path: Path, activated_fd: int | None = None, own_fd: int | None = None) -> Listening:
    """Bind and listen, or take over `activated_fd`, on which the service manager listens.

    `own_fd` is the socket of a daemon before us, whose clients wait in its backlog.

    The lock, not the socket file, decides who owns the path: a file left by a killed daemon is
    replaced, a live daemon's is not touched. Raises SocketInUseError, SocketPathError.
    """
    lock_fd = _lock(path)
    try:
        if activated_fd is None and own_fd is not None and path.is_socket():
            sock = _adopt(own_fd, path)
            return Listening(path, sock, lock_fd, is_activated=False, engine_gid=None)
        if activated_fd is None:
            if own_fd is not None:  # somebody removed its path: nobody can reach it
                os.close(own_fd)
            return Listening(path, _bind(path), lock_fd, is_activated=False, engine_gid=None)
        sock = _adopt(activated_fd, path)
        return Listening(path, sock, lock_fd, is_activated=True, engine_gid=_engine_gid(path))
    except BaseException:
        os.close(lock_fd)
        raise


def _lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        options.check_socket_path(path)
        options.ensure_private_dir(path.parent)
        lock_fd = os.open(f"{path}.lock", flags, 0o600)
    except options.OptionError as exc:
        raise SocketPathError(str(exc)) from exc
    except OSError as exc:
        raise SocketPathError(f"{path.parent}: {exc.strerror}") from exc
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock_fd)
        raise SocketInUseError(f"another cachewarmd serves {path}") from exc
    return lock_fd


def _adopt(fd: int, path: Path) -> socket.socket:
    """The passed socket, once it is what we would have made ourselves."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise SocketPathError(f"the passed descriptor {fd} is no socket: {exc.strerror}") from exc
    try:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_STREAM) or not is_listening:
            raise SocketPathError("the passed socket must be a listening Unix stream socket")
        bound = os.fsdecode(sock.getsockname())
        if os.path.realpath(bound) != os.path.realpath(path):
            raise SocketPathError(f"the passed socket listens on {bound!r}, not on {path}")
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _engine_gid(path: Path) -> int | None:
    """The group that whoever made the socket lets in."""
    try:
        info = path.stat()
    except OSError as exc:
        raise SocketPathError(f"{path}: {exc.strerror}") from exc
    return info.st_gid if info.st_mode & stat.S_IWGRP else None


def _bind(path: Path) -> socket.socket:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(mode):
            raise SocketPathError(f"{path}: exists and is not a socket; it was left untouched")
        if _somebody_listens(path):
            raise SocketInUseError(f"another process listens on {path}")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise SocketPathError(f"{path}: {exc.strerror}") from exc
    return sock


def _somebody_listens(path: Path) -> bool:
    """A service manager, say, that holds the socket for a daemon that is not running."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True
