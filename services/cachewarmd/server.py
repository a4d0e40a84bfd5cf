"""The daemon: accepts clients, checks who may do what, keeps leases until a client is gone.

One event loop is the only writer of index, leases and records. What takes long (allocating pages)
runs in a thread and comes back to the loop; weights are read by a process of their own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from cachewarmd import layout, notify, protocol, recovery, scrub, verification
from cachewarmd.calls import HANDLERS
from cachewarmd.config import Config
from cachewarmd.connection import Connection
from cachewarmd.engine_calls import Handler
from cachewarmd.errors import (
    CachewarmError,
    LimitError,
    NoSpaceError,
    NotPermittedError,
    ProtocolError,
    VersionMismatchError,
)
from cachewarmd.fdstore import FdStore
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.listener import Listening
from cachewarmd.log import get_logger
from cachewarmd.state import Client, State
from cachewarmd.v1 import control_pb2 as pb

_log = get_logger()

MAX_CONNECTIONS = 256
OWNER_CONNECTIONS = 16  # of these, kept for the owner: to look, to kick, to stop
FILES_CHECK_S = 10.0
# Leases of a peer that closed its socket but lives on: it may still be reading these blocks.
QUARANTINE_S = 60.0
IDLE_CHECK_S = 5.0
_HELLO_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.1
_RESTORE_PAUSE_S = 0.001
_EXTEND_S = 20.0  # asked of the service manager again and again while a snapshot is written

_ENGINE_VERBS = {
    "attach_weights", "register", "peek", "lookup", "publish", "release", "reattach", "provide",
    "warm_item_update", "get_prompts", "put_prompts",
}  # fmt: skip
_UNANSWERED = {"warm_item_update", "put_prompts"}
_ADMIN_VERBS = {
    "cancel_job", "evict", "kick", "shutdown", "snapshot_save", "snapshot_load", "verify",
    "learned", "unpin", "purge",
}  # fmt: skip
_EITHER_VERBS = {"warmup"}  # an engine warms what it is about to serve
_FD_VERBS = {
    "hello": (0, 1), "attach_weights": (1, 1), "warmup": (1, 2), "is_warm": (0, 1),
    "snapshot_save": (1, 1), "snapshot_load": (1, 1),
}  # fmt: skip


class Server:
    """Everything the daemon owns. Build it, `await run(...)`."""

    def __init__(self, config: Config, epoch: int, kept: FdStore) -> None:
        """Raises NoSpaceError, InvalidRequestError (pool size)."""
        self._state = State(config, epoch, kept)
        self._engine_gid: int | None = None
        self._next_client = 1
        self._background: set[asyncio.Task[Any]] = set()
        self._is_looked_at = asyncio.Event()  # what an earlier daemon sealed

    # -- life -----------------------------------------------------------------------------------

    async def run(
        self, listening: Listening, notifier: notify.Notifier, ready: Callable[[], None]
    ) -> None:
        """Serve until `stop`; `listening` stays the caller's."""
        loop = asyncio.get_running_loop()
        listener, self._engine_gid = listening.sock, listening.engine_gid
        loop.add_reader(listener.fileno(), self._accept, listener)
        self._spawn(self._fill_pool())
        self._spawn(self._check_when_idle())
        if self._state.config.exit_when_unused is not None:
            self._spawn(self._exit_when_unused(self._state.config.exit_when_unused))
        self._spawn(notify.keep_telling(notifier, self.status_line))
        self._spawn(self._state.quarantine.watch(QUARANTINE_S))
        self._spawn(self._state.end_pins())
        self._spawn(self._look_at_content())
        self._spawn(self._watch_files())
        self._spawn(self._restore_prompts())
        recovery.serving(self._state.pool)
        ready()
        self._state.pool.in_background = lambda work: loop.run_in_executor(None, work)
        self._state.pool.populate_next()
        self._state.packers.prepare()
        try:
            await self._state.stop.wait()
            notifier.stopping()
            await self._save_at_stop(notifier)
        finally:
            loop.remove_reader(listener.fileno())
            tasks = list(self._background)
            for client in list(self._state.clients):
                client.connection.close()
                tasks += client.tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._state.packers.close()
            await self._state.weights.close()
        recovery.end_clean(self._state.pool)

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._state.stop.set()

    def status_line(self) -> str:
        """What `systemctl status` shows."""
        state, mib = self._state, layout.EXTENT_BYTES >> 20
        engines = sum(client.role == pb.ROLE_ENGINE for client in state.clients)
        return (
            f"epoch {state.epoch}, pool {len(state.pool.extents) * mib} of "
            f"{state.pool.num_extents * mib} MiB, clients {len(state.clients)}, engines {engines}"
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _fill_pool(self) -> None:
        """Memory first, then what a snapshot has for it.

        But before both what lookups wait for: memory that is allocated or locked keeps page faults
        of this process waiting.
        """
        await self._is_looked_at.wait()
        await self._commit_pool()
        config = self._state.config
        if config.snapshot_at_boot and config.snapshot_path is not None:
            await self._state.snapshots.load_from(config.snapshot_path)

    async def _save_at_stop(self, notifier: notify.Notifier) -> None:
        """Everything still runs: the watchdog is fed, and what is published now may be in it."""
        config = self._state.config
        if not config.snapshot_on_stop or config.snapshot_path is None:
            return
        last_told = -_EXTEND_S

        def progress(_done: int, _total: int) -> None:
            nonlocal last_told
            if time.monotonic() - last_told > _EXTEND_S / 4:
                last_told = time.monotonic()
                notifier.extend_timeout(_EXTEND_S)

        await self._state.snapshots.save_to(config.snapshot_path, progress)

    async def _commit_pool(self) -> None:
        """Allocate the pool's pages extent by extent while serving."""
        rate = self._state.config.prefault_bytes_per_second
        pause_s = EXTENT_BYTES / rate if rate else 0.0
        try:
            await asyncio.to_thread(self._state.lock_committed)
            while await asyncio.sleep(pause_s, True) and await asyncio.to_thread(
                self._state.commit_extent
            ):
                await asyncio.to_thread(self._state.lock_committed)
        except NoSpaceError as exc:
            missing = self._state.give_up_extents()
            _log.warning("pool_smaller_than_asked", reason=str(exc), extents_missing=missing)
        huge = self._state.pool.huge
        _log.info("pool_allocated", huge_bytes=huge.num_bytes, small_pages_because=huge.refusal)

    async def _look_at_content(self) -> None:
        """Hash what an earlier daemon sealed; then scrub."""
        await verification.verify_all(self._state.kv)
        self._is_looked_at.set()
        if self._state.config.scrub_bytes_per_second:
            await scrub.keep_scrubbing(self._state.kv, self._state.config.scrub_bytes_per_second)

    async def _restore_prompts(self) -> None:
        """Find what an earlier daemon kept, a segment at a time."""
        is_left = True
        while is_left:
            await asyncio.sleep(_RESTORE_PAUSE_S)
            is_left = self._state.prompts.restore_some()

    async def _watch_files(self) -> None:
        """Notice that loaded weights are no longer those of their files."""
        while True:
            await asyncio.sleep(FILES_CHECK_S)
            changed = await self._state.weights.look_for_changes()
            if changed and self._state.config.on_change == "clear":
                num_blocks = self._state.retire(changed)
                _log.warning("blocks_of_changed_weights_cleared", blocks=num_blocks)

    async def _check_when_idle(self) -> None:
        """Look for a broken invariant whenever something was done and nobody asks any more."""
        checked = seen = 0
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            seen, before = self._state.counters["frames"], seen
            if seen == before and seen != checked:
                checked = seen
                self._state.counters["invariant_checks"] += 1
                try:
                    self._state.kv.check_invariants()
                except AssertionError as exc:
                    self._state.counters["broken_invariants"] += 1
                    _log.error("broken_invariant", what=str(exc))

    async def _exit_when_unused(self, limit: float) -> None:
        last_used = time.monotonic()
        while time.monotonic() - last_used < limit:
            if any(client.role == pb.ROLE_ENGINE for client in self._state.clients):
                last_used = time.monotonic()
            await asyncio.sleep(min(1.0, limit / 4))
        _log.info("stopping_unused", seconds=limit)
        self.stop()

    # -- connections ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:  # EMFILE and the like: the backlog waits
            self._state.counters["accept_failed"] += 1
            _log.warning("accept_failed", reason=str(exc))
            # The listener stays readable: without a pause this would spin.
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.call_later(_ACCEPT_PAUSE_S, self._resume_accept, listener)
            return
        sock.setblocking(False)
        client: Client
        connection = Connection(
            sock,
            lambda envelope, fds: self._on_frame(client, envelope, fds),
            lambda: self._on_end(client),
        )
        client = Client(self._next_client, connection, self._state.counters)
        self._next_client += 1
        self._state.clients.add(client)
        if not self._is_owner(client) and self._engine_gid not in connection.peer_groups():
            client.end_with(0, NotPermittedError(f"uid {connection.uid} may not connect"))
        elif len(self._state.clients) > (most := self._max_connections(client)):
            client.end_with(0, LimitError(f"{most} connections are open"))
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_HELLO_TIMEOUT_S, self._end_if_silent, client)

    def _is_owner(self, client: Client) -> bool:
        """Others, let in by the socket's group, can't have the admin role."""
        return client.connection.uid in (os.getuid(), 0)

    def _max_connections(self, client: Client) -> int:
        return MAX_CONNECTIONS - (0 if self._is_owner(client) else OWNER_CONNECTIONS)

    def _resume_accept(self, listener: socket.socket) -> None:
        if not self._state.stop.is_set():
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _end_if_silent(self, client: Client) -> None:
        if client.role == pb.ROLE_UNSPECIFIED:
            client.connection.close()

    def _on_frame(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
        """One request. Errors of the caller go back to it; a bug is logged and told as INTERNAL."""
        verb = envelope.WhichOneof("body") or "nothing"
        self._state.counters["frames"] += 1
        keep_fds = False
        try:
            handler = self._admit(client, envelope, verb, len(fds))
            keep_fds = bool(handler(self._state, client, envelope, fds))
        except (ProtocolError, VersionMismatchError) as exc:
            client.end_with(envelope.id, exc)
        except (CachewarmError, OSError) as exc:
            client.reply_error(envelope.id, exc)
        except Exception as exc:
            client.reply_bug(envelope.id, verb, exc)
        finally:
            if not keep_fds:
                protocol.close_all(fds)

    def _admit(self, client: Client, envelope: pb.Envelope, verb: str, num_fds: int) -> Handler:
        handler = HANDLERS.get(verb)
        if handler is None:
            raise ProtocolError(f"{verb} is not a request")
        if (client.role == pb.ROLE_UNSPECIFIED) != (verb == "hello"):
            raise ProtocolError("hello must be the first frame, and only that")
        if not envelope.id and verb not in _UNANSWERED:
            raise ProtocolError(f"{verb} needs an id above 0")
        low, high = _FD_VERBS.get(verb, (0, 0))
        if not low <= num_fds <= high:
            raise ProtocolError(f"{verb} takes {low} to {high} file descriptors, got {num_fds}")
        is_admin = client.role == pb.ROLE_ADMIN
        if (verb in _ADMIN_VERBS and not is_admin) or (
            (verb in _ENGINE_VERBS and client.role != pb.ROLE_ENGINE)
            or (verb in _EITHER_VERBS and client.role == pb.ROLE_OBSERVER)
        ):
            raise NotPermittedError(f"{verb} is not for role {pb.Role.Name(client.role)}")
        if verb == "hello" and envelope.hello.role == pb.ROLE_ADMIN and not self._is_owner(client):
            raise NotPermittedError(
                f"role {pb.Role.Name(pb.ROLE_ADMIN)} is not for uid {client.connection.uid}: "
                f"only for 0 and {os.getuid()}"
            )
        return handler

    def _on_end(self, client: Client) -> None:
        for task in client.tasks:
            task.cancel()
        if client.provider is not None:
            self._state.warmer.remove_provider(client.provider)
        if client.pool_fd >= 0:
            os.close(client.pool_fd)
            client.pool_fd = -1
        if client.role == pb.ROLE_ENGINE:
            _log.info("engine_left", client=client.name, pid=client.pid, leases=len(client.leases))
        if client.leases and not self._state.stop.is_set():
            self._spawn(self._reclaim(client))
            return
        client.connection.forget_peer()
        self._state.clients.discard(client)
        # At a stop the rows stay: what they name is quarantined by the next daemon.
        if client.rows is not None and not client.leases:
            client.rows.close()

    async def _reclaim(self, client: Client) -> None:
        """Revoke a lost client's leases once it is dead; until then it may still read."""
        try:
            if not await client.connection.wait_peer_dead(QUARANTINE_S):
                _log.warning("leases_revoked_of_live_process", pid=client.pid)
        finally:
            client.connection.forget_peer()
            if not self._state.stop.is_set():
                self._state.release_all(client)
            self._state.clients.discard(client)
