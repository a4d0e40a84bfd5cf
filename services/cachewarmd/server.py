"""The daemon: connections in, calls on pool, weights and jobs out.

One event loop is the only writer of index, leases and records. What takes long (reading weights,
allocating pages) runs in a thread and comes back to the loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from cachewarmd import __version__, layout, protocol, segment
from cachewarmd.budget import Budget
from cachewarmd.config import Config
from cachewarmd.connection import Connection
from cachewarmd.errors import (
    CachewarmError,
    InternalError,
    InvalidRequestError,
    LimitError,
    NoSpaceError,
    NotFoundError,
    NotPermittedError,
    ProtocolError,
    VersionMismatchError,
)
from cachewarmd.kv import Block, BlockStore, NewBlock, Source, StampInfo
from cachewarmd.pool import Pool
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.warmup import Provider, Warmer
from cachewarmd.weight_store import WeightStore

_log = structlog.get_logger()

MAX_CONNECTIONS = 256
MAX_LEASES_PER_CLIENT = 4096
MAX_KEYS = 65_536
MAX_TEXT = 1024  # characters of names and descriptions that clients give
# Leases of a peer that closed its socket but lives on: it may still be reading these blocks.
QUARANTINE_S = 60.0
_HELLO_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.1

_ENGINE_VERBS = {
    "attach_weights", "register", "peek", "lookup", "publish", "release", "provide",
    "warm_item_update",
}  # fmt: skip
_ADMIN_VERBS = {"warmup", "cancel_job", "evict", "shutdown"}
_FD_VERBS = {"hello": (0, 1), "attach_weights": (1, 1), "warmup": (1, 1), "is_warm": (0, 1)}


@dataclass(eq=False)
class Client:
    """A connection after its Hello."""

    client_id: int
    connection: Connection
    role: pb.Role = pb.ROLE_UNSPECIFIED
    name: str = ""
    pid: int = 0
    pool_fd: int = -1
    pool_bytes: int = 0
    leases: set[int] = field(default_factory=set)
    stamps: dict[int, StampInfo] = field(default_factory=dict)
    provider: Provider | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_worker(self) -> bool:
        return self.pool_fd >= 0


class Server:
    """Everything the daemon owns. Build it, `await run(...)`."""

    def __init__(self, config: Config, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._salt = secrets.token_bytes(32)
        self._budget = Budget(config.cgroup_root)
        pool_bytes = config.pool_bytes
        if pool_bytes is None:
            pool_bytes = self._budget.available_bytes() // 4
        self._pool = Pool(pool_bytes, epoch, self._salt)
        self._budget.promise(self._pool.pool_bytes, "pool-bytes")
        self._commit_extent()
        self._readonly_fds = (
            segment.reopen_readonly(self._pool.records_fd),
            segment.reopen_readonly(self._pool.pool_fd),
        )
        self._kv = BlockStore(self._pool)
        self._weights = WeightStore(self._budget)
        self._warmer = Warmer(self._weights)
        self._clients: set[Client] = set()
        self._next_client = 1
        self._counters: Counter[str] = Counter()
        self._started = time.monotonic()
        self._last_used = self._started
        self._stop = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    # -- life -----------------------------------------------------------------------------------

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Serve until `stop`; the listener stays the caller's."""
        loop = asyncio.get_running_loop()
        loop.add_reader(listener.fileno(), self._accept, listener)
        self._spawn(self._commit_pool())
        if self._config.exit_when_unused is not None:
            self._spawn(self._exit_when_unused(self._config.exit_when_unused))
        ready()
        try:
            await self._stop.wait()
        finally:
            loop.remove_reader(listener.fileno())
            for client in list(self._clients):
                client.connection.close()
            for task in list(self._background):
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._weights.close()

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._stop.set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _commit_pool(self) -> None:
        """Allocate the pool's pages extent by extent while serving."""
        try:
            while await asyncio.to_thread(self._commit_extent):
                pass
        except NoSpaceError as exc:
            missing = self._pool.num_extents - len(self._pool.extents)
            self._budget.settle(missing * layout.EXTENT_BYTES)
            _log.warning("pool_smaller_than_asked", reason=str(exc), extents_missing=missing)

    def _commit_extent(self) -> bool:
        did = self._pool.commit_next()
        if did:
            self._budget.settle(layout.EXTENT_BYTES)
        return did

    async def _exit_when_unused(self, limit: float) -> None:
        while time.monotonic() - self._last_used < limit:
            if any(client.role == pb.ROLE_ENGINE for client in self._clients):
                self._last_used = time.monotonic()
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
            self._counters["accept_failed"] += 1
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
        client = Client(self._next_client, connection)
        self._next_client += 1
        self._clients.add(client)
        if connection.uid not in (os.getuid(), 0):
            self._end_with(client, 0, NotPermittedError(f"uid {connection.uid} may not connect"))
        elif len(self._clients) > MAX_CONNECTIONS:
            self._end_with(client, 0, LimitError(f"{MAX_CONNECTIONS} connections are open"))
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_HELLO_TIMEOUT_S, self._end_if_silent, client)

    def _resume_accept(self, listener: socket.socket) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _end_if_silent(self, client: Client) -> None:
        if client.role == pb.ROLE_UNSPECIFIED:
            client.connection.close()

    def _on_frame(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
        """One request. Errors of the caller go back to it; a bug is logged and told as INTERNAL."""
        verb = envelope.WhichOneof("body") or "nothing"
        self._counters["frames"] += 1
        keep_fds = False
        try:
            handler = self._admit(client, envelope, verb, len(fds))
            keep_fds = bool(handler(self, client, envelope, fds))
        except (ProtocolError, VersionMismatchError) as exc:
            self._end_with(client, envelope.id, exc)
        except (CachewarmError, OSError) as exc:
            self._reply_error(client, envelope.id, exc)
        except Exception as exc:
            self._reply_bug(client, envelope.id, verb, exc)
        finally:
            if not keep_fds:
                protocol.close_all(fds)

    def _admit(self, client: Client, envelope: pb.Envelope, verb: str, num_fds: int) -> Handler:
        handler = _HANDLERS.get(verb)
        if handler is None:
            raise ProtocolError(f"{verb} is not a request")
        if (client.role == pb.ROLE_UNSPECIFIED) != (verb == "hello"):
            raise ProtocolError("hello must be the first frame, and only that")
        if not envelope.id and verb != "warm_item_update":
            raise ProtocolError(f"{verb} needs an id above 0")
        low, high = _FD_VERBS.get(verb, (0, 0))
        if not low <= num_fds <= high:
            raise ProtocolError(f"{verb} takes {low} to {high} file descriptors, got {num_fds}")
        is_admin = client.role == pb.ROLE_ADMIN
        if (verb in _ADMIN_VERBS and not is_admin) or (
            verb in _ENGINE_VERBS and client.role != pb.ROLE_ENGINE
        ):
            raise NotPermittedError(f"{verb} is not for role {pb.Role.Name(client.role)}")
        return handler

    def _on_end(self, client: Client) -> None:
        for task in client.tasks:
            task.cancel()
        if client.provider is not None:
            self._warmer.remove_provider(client.provider)
        if client.pool_fd >= 0:
            os.close(client.pool_fd)
            client.pool_fd = -1
        if client.role == pb.ROLE_ENGINE:
            _log.info("engine_left", client=client.name, pid=client.pid, leases=len(client.leases))
        if client.leases and not self._stop.is_set():
            self._spawn(self._reclaim(client))
        else:
            client.connection.forget_peer()
            self._clients.discard(client)

    async def _reclaim(self, client: Client) -> None:
        """Revoke a lost client's leases once it is dead; until then it may still read."""
        try:
            if not await client.connection.wait_peer_dead(QUARANTINE_S):
                _log.warning("leases_revoked_of_live_process", pid=client.pid)
        finally:
            client.connection.forget_peer()
            for lease in client.leases:
                self._kv.release(lease)
            client.leases.clear()
            self._clients.discard(client)

    # -- replies --------------------------------------------------------------------------------

    def _reply(
        self, client: Client, request_id: int, fds: tuple[int, ...] = (), **body: Any
    ) -> None:
        client.connection.send(pb.Envelope(id=request_id, **body), fds)

    def _reply_error(
        self, client: Client, request_id: int, exc: Exception, *, is_last: bool = False
    ) -> None:
        self._counters["errors"] += 1
        if isinstance(exc, CachewarmError):
            code, message = exc.code, str(exc)
        else:
            code, message = InternalError.code, getattr(exc, "strerror", None) or "I/O error"
            _log.warning("os_error", reason=str(exc))
        error = pb.ErrorReply(code=code, message=message)
        # To a client, an error with id 0 is the end of the connection: it is not one here.
        if request_id or is_last:
            self._reply(client, request_id, error=error)

    def _reply_bug(self, client: Client, request_id: int, verb: str, exc: Exception) -> None:
        _log.error("bug", verb=verb, exc_info=exc)
        self._reply_error(client, request_id, InternalError(f"{verb} failed; see the daemon's log"))

    def _end_with(self, client: Client, request_id: int, exc: CachewarmError) -> None:
        self._reply_error(client, request_id, exc, is_last=True)
        client.connection.close()

    def _in_task(
        self, client: Client, request_id: int, verb: str, work: Coroutine[Any, Any, None]
    ) -> None:
        """Run a long call; it ends with the client."""

        async def guarded() -> None:
            try:
                await work
            except (CachewarmError, OSError) as exc:
                self._reply_error(client, request_id, exc)
            except Exception as exc:
                self._reply_bug(client, request_id, verb, exc)

        task = self._spawn(guarded())
        client.tasks.add(task)
        task.add_done_callback(client.tasks.discard)

    # -- data plane -----------------------------------------------------------------------------

    def _hello(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
        hello = envelope.hello
        if hello.protocol_version != protocol.PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"protocol version {hello.protocol_version}, "
                f"this daemon speaks {protocol.PROTOCOL_VERSION}"
            )
        if hello.role not in (pb.ROLE_OBSERVER, pb.ROLE_ENGINE, pb.ROLE_ADMIN):
            raise ProtocolError(f"role {hello.role} is not known")
        if fds:
            if hello.role != pb.ROLE_ENGINE:
                raise ProtocolError("only an engine brings a private pool")
            segment.check_private_pool(fds[0], hello.private_pool_bytes)
        is_engine = hello.role == pb.ROLE_ENGINE
        reply = pb.HelloReply(
            protocol_version=protocol.PROTOCOL_VERSION,
            version=__version__,
            pid=os.getpid(),
            epoch=self._epoch,
            pool_bytes=self._pool.pool_bytes,
            extent_bytes=layout.EXTENT_BYTES,
            salt=self._salt if is_engine else b"",
            client_id=client.client_id,
        )
        self._reply(client, envelope.id, self._readonly_fds if fds else (), hello_reply=reply)
        # Only now: duplicating descriptors for the reply can fail, and then `fds` are closed.
        if fds:
            client.pool_fd, client.pool_bytes = fds[0], hello.private_pool_bytes
        client.role, client.name = hello.role, hello.name[:64]
        client.pid = client.connection.pid
        if is_engine:
            _log.info("engine_came", client=client.name, pid=client.pid)
        return bool(fds)

    def _attach_weights(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
        _check_names(envelope.attach_weights)
        self._in_task(client, envelope.id, "attach_weights", self._attach(client, envelope, fds))
        return True

    async def _attach(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
        request = envelope.attach_weights
        last_told = 0.0

        def notify(phase: str, done: int, total: int) -> None:
            nonlocal last_told
            now = time.monotonic()
            if now - last_told < 0.1:
                return
            last_told = now
            progress = pb.AttachProgress(phase=phase, done_bytes=done, total_bytes=total)
            client.connection.send(pb.Envelope(id=envelope.id, more=True, attach_progress=progress))

        try:
            model, loaded, already = await self._weights.attach(
                fds[0],
                request.plan,
                request.model_name,
                request.version,
                notify,
                follow_links=self._may_follow_links(client),
            )
        finally:
            protocol.close_all(fds)
        reply = pb.AttachWeightsReply(
            weights_sha256=loaded.weights_sha256,
            version=model.shown_version,
            segment_bytes=loaded.size,
            already_warm=already,
        )
        readonly = segment.reopen_readonly(loaded.fd)
        try:
            self._reply(client, envelope.id, (readonly,), attach_weights_reply=reply)
        finally:
            os.close(readonly)

    @staticmethod
    def _may_follow_links(client: Client) -> bool:
        """Links are followed only for a peer with our own rights: it gains nothing by them."""
        return client.connection.uid == os.getuid()

    def _register(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        request = envelope.register
        info = self._kv.register(
            request.stamp,
            request.slot_bytes,
            request.block_size,
            request.description[:MAX_TEXT],
            request.weights_sha256,
        )
        client.stamps[info.stamp_id] = info
        self._reply(client, envelope.id, register_reply=pb.RegisterReply(stamp_id=info.stamp_id))

    def _peek(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        num_blocks = self._kv.peek(envelope.peek.keys)
        self._reply(client, envelope.id, peek_reply=pb.PeekReply(num_blocks=num_blocks))

    def _lookup(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        request = envelope.lookup
        stamp = client.stamps.get(request.stamp_id)
        if stamp is None:
            raise InvalidRequestError(f"stamp_id {request.stamp_id} was not registered")
        if len(request.keys) + len(request.tail_keys) > MAX_KEYS:
            raise LimitError(f"at most {MAX_KEYS} keys are allowed in a lookup")
        if len(client.leases) >= MAX_LEASES_PER_CLIENT:
            raise LimitError(f"{MAX_LEASES_PER_CLIENT} leases are held, no more are allowed")
        lease, blocks = self._kv.lookup(stamp, request.keys, request.tail_keys)
        client.leases.add(lease)
        reply = pb.LookupReply(lease=lease, blocks=map(_wire_block, blocks))
        self._reply(client, envelope.id, lookup_reply=reply)

    def _publish(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        request = envelope.publish
        if not client.is_worker:
            raise NotPermittedError("publish needs a private pool, passed with hello")
        self._check_lease(client, request.lease)
        chain = [
            NewBlock(b.parent_key, b.key, b.num_tokens, b.private_offset) for b in request.chain
        ]
        source = Source(client.pool_fd, client.pool_bytes, client.connection.is_open)
        started = time.monotonic()
        blocks, refused = self._kv.publish(request.lease, chain, source, is_root=request.is_root)
        self._counters["publish_us"] += int(1e6 * (time.monotonic() - started))
        reply = pb.PublishReply(blocks=map(_wire_block, blocks), refused=refused)
        self._reply(client, envelope.id, publish_reply=reply)

    def _release(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        self._check_lease(client, envelope.release.lease)
        self._kv.release(envelope.release.lease)
        client.leases.discard(envelope.release.lease)
        self._reply(client, envelope.id, ok=pb.Ok())

    @staticmethod
    def _check_lease(client: Client, lease: int) -> None:
        if lease not in client.leases:
            raise NotFoundError(f"lease {lease} is not held by this client")

    def _provide(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        if client.provider is not None:
            raise InvalidRequestError("this client provides already")

        def send(item: pb.WarmItem) -> None:
            client.connection.send(pb.Envelope(warm_item=item))

        self._reply(client, envelope.id, ok=pb.Ok())
        client.provider = Provider(envelope.provide.weights_sha256, send)
        self._warmer.add_provider(client.provider)

    def _warm_item_update(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        if client.provider is None:
            raise InvalidRequestError("this client does not provide")
        self._warmer.update(client.provider, envelope.warm_item_update)

    # -- control plane --------------------------------------------------------------------------

    def _warmup(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
        _check_names(envelope.warmup)
        job = self._warmer.start(
            fds[0],
            envelope.warmup,
            follow_links=self._may_follow_links(client),
            close_fd=lambda: protocol.close_all(fds),
        )
        self._reply(client, envelope.id, warmup_reply=pb.WarmupReply(job_id=job.job_id))
        return True

    def _watch_job(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        job = self._warmer.get(envelope.watch_job.job_id)

        async def watch() -> None:
            async for progress in self._warmer.watch(job):
                more = progress.state not in ("done", "failed", "cancelled")
                client.connection.send(
                    pb.Envelope(id=envelope.id, more=more, job_progress=progress)
                )

        self._in_task(client, envelope.id, "watch_job", watch())

    def _jobs(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        jobs = [job.progress(since=job.version) for job in self._warmer.jobs]
        self._reply(client, envelope.id, jobs_reply=pb.JobsReply(jobs=jobs))

    def _cancel_job(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        self._warmer.cancel(self._warmer.get(envelope.cancel_job.job_id))
        self._reply(client, envelope.id, ok=pb.Ok())

    def _is_warm(self, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
        dir_key = None
        if fds:
            info = os.fstat(fds[0])
            dir_key = (info.st_dev, info.st_ino)
        models = self._weights.find(envelope.is_warm.model, dir_key)
        stale = [m for m in models if m.files_now() not in (None, m.identities)]
        reply = pb.IsWarmReply(is_known=bool(models), is_warm=bool(models) and not stale)
        if stale:
            reply.detail = "the weight files changed since they were loaded"
        self._reply(client, envelope.id, is_warm_reply=reply)

    def _evict(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        name = envelope.evict.model
        digests = None
        if name:
            models = self._weights.find(name, None)
            if not models:
                raise NotFoundError(f"model {name!r} is not known")
            digests = {m.segment.weights_sha256 for m in models if m.segment is not None}
        num_blocks, num_bytes, kept = self._kv.evict(
            lambda stamp: digests is None or stamp.weights_sha256 in digests
        )
        reply = pb.EvictReply(num_blocks=num_blocks, num_bytes=num_bytes, num_kept=kept)
        self._reply(client, envelope.id, evict_reply=reply)

    def _shutdown(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        engines = [c for c in self._clients if c.role == pb.ROLE_ENGINE]
        if envelope.shutdown.only_if_unused and engines:
            raise InvalidRequestError(f"{len(engines)} engine connections are open")
        self._reply(client, envelope.id, ok=pb.Ok())
        # After the reply has left.
        asyncio.get_running_loop().call_later(0.05, self.stop)

    def _status(self, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
        self._reply(client, envelope.id, status_reply=self._status_now())

    def _status_now(self) -> pb.StatusReply:
        blocks, sizes = self._kv.usage()
        committed = len(self._pool.extents)
        pool = pb.PoolStatus(
            pool_bytes=self._pool.pool_bytes,
            committed_bytes=committed * layout.EXTENT_BYTES,
            num_extents=self._pool.num_extents,
            num_extents_free=sum(1 for e in self._pool.extents if not e.slot_bytes),
            blocks=blocks,
            bytes=sizes,
            page_bytes=layout.PAGE_BYTES,
        )
        models = [
            pb.ModelStatus(
                model_name=model.name,
                version=model.shown_version,
                weights_sha256=model.segment.weights_sha256.hex(),
                layout=model.segment.layout_id,
                segment_bytes=model.segment.size,
                files_present=model.files_now() is not None,
                loaded_unix_ms=model.loaded_unix_ms,
                plan=model.plan.description,
            )
            for model in self._weights.models
            if model.segment is not None
        ]
        stamps = [
            pb.StampStatus(
                stamp=info.stamp.hex(),
                description=info.description,
                slot_bytes=info.slot_bytes,
                block_size=info.block_size,
                num_blocks=self._kv.num_blocks(info),
            )
            for info in self._kv.stamps
        ]
        clients = [
            pb.ClientStatus(
                client_id=client.client_id,
                name=client.name,
                role=pb.Role.Name(client.role).removeprefix("ROLE_").lower(),
                pid=client.pid,
                uid=client.connection.uid,
                num_leases=len(client.leases),
                is_provider=client.provider is not None,
            )
            for client in self._clients
        ]
        return pb.StatusReply(
            version=__version__,
            pid=os.getpid(),
            epoch=self._epoch,
            uptime_s=time.monotonic() - self._started,
            socket=str(self._config.socket),
            pool=pool,
            models=models,
            stamps=stamps,
            clients=clients,
            counters={**self._counters, **self._kv.counters, "leases": self._kv.num_leases},
            num_jobs_active=sum(1 for job in self._warmer.jobs if not job.is_ended),
        )


def _check_names(request: pb.AttachWeights | pb.Warmup) -> None:
    names = (request.model_name, request.version, request.plan.description)
    if max(map(len, names)) > MAX_TEXT:
        raise InvalidRequestError(f"names and descriptions: at most {MAX_TEXT} characters")


def _wire_block(block: Block) -> pb.Block:
    return pb.Block(
        slot=block.slot,
        generation=block.generation,
        offset=block.offset,
        num_tokens=block.num_tokens,
    )


# Returns True when it took the descriptors over.
Handler = Callable[[Server, Client, pb.Envelope, list[int]], bool | None]

_HANDLERS: dict[str, Handler] = {
    "hello": Server._hello,
    "attach_weights": Server._attach_weights,
    "register": Server._register,
    "peek": Server._peek,
    "lookup": Server._lookup,
    "publish": Server._publish,
    "release": Server._release,
    "provide": Server._provide,
    "warm_item_update": Server._warm_item_update,
    "warmup": Server._warmup,
    "watch_job": Server._watch_job,
    "jobs": Server._jobs,
    "cancel_job": Server._cancel_job,
    "is_warm": Server._is_warm,
    "evict": Server._evict,
    "shutdown": Server._shutdown,
    "status": Server._status,
}
