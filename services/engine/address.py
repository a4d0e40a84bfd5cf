"""Where the front listens: a TCP address or a Unix socket taken by nobody else, and HTTP's."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachewarmd import options
from engine.errors import StartError

_PROBE_TIMEOUT_S = 1.0
_HTTP_BACKLOG = 128
_MAX_UNIX_PATH = 107  # bytes; the kernel's limit


class GrpcAddress:
    """`listen` ("unix:PATH") wins over host and port; port 0 = any free one.

    bind() -> publish() when the server has started. grpcio has no way to take over a listening
    socket, and its stop deletes the path it bound: so a Unix listener binds a private name that is
    renamed over the public one.
    """

    def __init__(self, host: str, port: int, listen: str) -> None:
        self._host = host
        self._port = port
        self._path = Path(listen.removeprefix("unix:")) if listen else None

    @property
    def target(self) -> str:
        """What clients dial."""
        return f"unix:{self._path}" if self._path is not None else f"{self._shown}:{self._port}"

    @property
    def _shown(self) -> str:
        return f"[{self._host}]" if ":" in self._host else self._host

    @property
    def _private_path(self) -> str:
        return f"{self._path}.{os.getpid()}"

    def worker_socket(self, runtime_dir: Path) -> Path:
        """Where this front's workers dial in, unless it is told another place."""
        if self._path is not None:
            return Path(f"{self._path}.workers")
        return runtime_dir / f"engine-{self._port}.sock"

    def probe(self) -> None:
        """Raises StartError when another server listens there already."""
        if self._path is not None:
            self._probe_path(self._path)
        else:
            self._probe_port()

    @contextlib.contextmanager
    def bind(self, server: Any) -> Iterator[None]:
        """Take the address for a grpc.aio server. Raises StartError naming it."""
        if self._path is None:
            self._bind_port(server)
            yield
            return
        self._bind_path(server, self._path)
        inode = None
        try:
            inode = os.stat(self._private_path).st_ino
            yield
        finally:
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == inode:  # nobody else's by now
                    self._path.unlink()
            with contextlib.suppress(OSError):
                os.unlink(self._private_path)

    def publish(self) -> None:
        """Clients may come."""
        if self._path is not None:
            os.rename(self._private_path, self._path)

    def _bind_port(self, server: Any) -> None:
        self._probe_port()
        try:
            self._port = server.add_insecure_port(f"{self._shown}:{self._port}")
        except RuntimeError as exc:
            raise StartError(f"{self.target} is in use or can't be bound: {exc}") from exc

    def _probe_port(self) -> None:
        """Does something listen there already, under any form of the address?

        A wildcard address binds silently over a loopback one, so asking the kernel is not enough.
        """
        if not self._port:
            return
        wildcards = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
        place = (wildcards.get(self._host, self._host), self._port)
        with contextlib.suppress(OSError):
            socket.create_connection(place, timeout=_PROBE_TIMEOUT_S).close()
            raise StartError(f"{self.target} is in use: another server listens there")

    def _bind_path(self, server: Any, path: Path) -> None:
        if len(os.fsencode(self._private_path)) > _MAX_UNIX_PATH:
            raise StartError(f"{path}: at most {_MAX_UNIX_PATH - 12} bytes are allowed")
        try:
            options.ensure_private_dir(path.parent)
            if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
                raise StartError(f"{path}: is there and no socket")
            before = os.umask(0o177)
            try:
                self._probe_path(path)
                server.add_insecure_port(f"unix:{self._private_path}")
            finally:
                os.umask(before)
        except (OSError, RuntimeError, options.OptionError) as exc:
            raise StartError(f"{path}: can't be bound: {exc}") from exc

    @staticmethod
    def _probe_path(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(_PROBE_TIMEOUT_S)
            probe.connect(str(path))
            raise StartError(f"{path} is in use: another server listens there")


def bind_http(host: str, port: int) -> socket.socket:
    """Listen there (port 0 = any free one): connections queue until HTTP is served.

    Raises StartError naming it.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ][0]
        return socket.create_server((host, port), family=family, backlog=_HTTP_BACKLOG)
    except OSError as exc:
        raise StartError(
            f"HTTP address {host}:{port} can't be bound: {exc.strerror or exc}; "
            "another --http-port, 0 for any free one, or off"
        ) from exc
