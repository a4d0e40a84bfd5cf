"""The control socket's place: one daemon at a time, stale sockets replaced, other files spared."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

from cachewarmd import options
from cachewarmd.errors import CachewarmError

_MAX_PATH_BYTES = 107  # sun_path less its terminator
_BACKLOG = 128


class SocketInUseError(CachewarmError):
    """Another daemon owns the socket."""


class SocketPathError(CachewarmError):
    """The path can't be a socket of ours."""


def listen(path: Path) -> tuple[socket.socket, int]:
    """Bind and listen; returns the socket and the lock's fd, which must stay open.

    The lock, not the socket file, decides who owns the path: a file left by a killed daemon is
    replaced, a live daemon's is not touched. Raises SocketInUseError, SocketPathError.
    """
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise SocketPathError(
            f"socket path of {length} bytes: at most {_MAX_PATH_BYTES} are allowed: {path}"
        )
    try:
        options.ensure_private_dir(path.parent)
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except options.OptionError as exc:
        raise SocketPathError(str(exc)) from exc
    except OSError as exc:
        raise SocketPathError(f"{path.parent}: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise SocketInUseError(f"another cachewarmd serves {path}") from exc
        return _bind(path), lock_fd
    except BaseException:
        os.close(lock_fd)
        raise


def _bind(path: Path) -> socket.socket:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(mode):
            raise SocketPathError(f"{path}: exists and is not a socket; it was left untouched")
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
