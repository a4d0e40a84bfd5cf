"""A worker's connection to the daemon: made, kept, and made again when it is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cachewarmd.client import Client, SharedPool
from cachewarmd.errors import CachewarmError
from cachewarmd.keys import root_key
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb

_log = get_logger()

_REGISTER_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 2.0


@dataclass(frozen=True, eq=False)
class Link:
    """One connection with what belongs to it; a new connection is a new Link."""

    client: Client
    pool: SharedPool
    stamp_id: int
    salt: bytes  # what this daemon gives engines of our user
    stamp: bytes
    epoch: int
    client_id: int
    wants_token_ids: bool = False  # beside the keys of lookups

    def root(self, domain: tuple[str, str | None] = ("", None)) -> bytes:
        """Key before the first block of (tenant, cache salt)."""
        return root_key(self.salt, self.stamp, *domain)


class DaemonLink:
    """`current` is the live Link or None. A thread keeps trying; it only ever hands over a Link.

    `private_pool` = (memfd, bytes) is what the daemon copies published blocks from; `wake` is
    called, on another thread, when a connection ended and when there is a new one.
    """

    def __init__(
        self, socket: Path, private_pool: tuple[int, int], wake: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._private_pool = private_pool
        self._wake = wake
        self._registration = pb.Register()
        self._link: Link | None = None
        self._pool: SharedPool | None = None
        self._stopping = threading.Event()
        self._retry_now = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="daemon-link", daemon=True)

    def connect(self) -> Client:
        """A connection that can attach weights already. Raises CachewarmError."""
        return Client.connect(
            self._socket,
            pb.ROLE_ENGINE,
            "worker",
            private_pool=self._private_pool,
            on_event=self._on_event,
        )

    def start(self, registration: pb.Register, client: Client | None) -> None:
        """Register the stamp on `client`, if there is one, and keep a Link from now on."""
        self._registration = registration
        if client is not None:
            self._link = self._register(client)
        self._thread.start()

    @property
    def current(self) -> Link | None:
        """The live connection, if there is one."""
        link = self._link
        return link if link is not None and not link.client.is_lost else None

    def close(self) -> None:
        """Leave; leases on the connection end with it."""
        self._stopping.set()
        self._retry_now.set()
        if self._link is not None:
            self._link.client.close()

    def _on_event(self, envelope: pb.Envelope) -> None:
        if envelope.WhichOneof("body") is None:  # the connection ended
            self._retry_now.set()
            self._wake()

    def _register(self, client: Client) -> Link | None:
        request = pb.Envelope(register=self._registration)
        try:
            reply, _ = client.call(request, _REGISTER_TIMEOUT_S)
        except CachewarmError as exc:
            _log.warning("daemon_refused_register", reason=str(exc))
            client.close()
            return None
        assert client.pool is not None, "a connection with a private pool gets the shared one"
        if self._pool is not None and self._pool.pool_id == client.pool.pool_id:
            # The daemon was another, the memory is the same: what is mapped is paged in already.
            client.pool = self._pool
        self._pool = client.pool
        hello, told = client.hello, reply.register_reply
        return Link(
            client,
            client.pool,
            told.stamp_id,
            hello.salt,
            self._registration.stamp,
            hello.epoch,
            hello.client_id,
            told.wants_token_ids,
        )

    def _keep(self) -> None:
        """Reconnect with jittered back-off until stopped."""
        delay = _RETRY_FIRST_S
        while not self._stopping.is_set():
            if self.current is not None:
                delay = _RETRY_FIRST_S
                self._retry_now.wait()
                self._retry_now.clear()
                continue
            try:
                self._link = self._register(self.connect())
            except CachewarmError:
                self._link = None
            if self._link is not None:
                _log.info("daemon_connected", epoch=self._link.epoch)
                self._wake()
            else:
                self._stopping.wait(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, _RETRY_MAX_S)
