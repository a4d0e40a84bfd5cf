"""Everything the daemon owns, and its clients. The event loop is the only writer of all of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from cachewarmd import layout, segment
from cachewarmd.block import StampInfo
from cachewarmd.budget import Budget
from cachewarmd.config import Config
from cachewarmd.connection import Connection
from cachewarmd.errors import CachewarmError, InternalError
from cachewarmd.kv import BlockStore
from cachewarmd.log import get_logger
from cachewarmd.packers import Packers
from cachewarmd.pool import Pool
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.warmup import Provider, Warmer
from cachewarmd.weight_store import WeightStore

_log = get_logger()


@dataclass(eq=False)
class Client:
    """A connection and what it holds; role and name come with its Hello."""

    client_id: int
    connection: Connection
    counters: Counter[str]
    role: pb.Role = pb.ROLE_UNSPECIFIED
    name: str = ""
    pid: int = 0
    pool_fd: int = -1
    pool_bytes: int = 0
    leases: set[int] = field(default_factory=set)
    stamps: dict[int, StampInfo] = field(default_factory=dict)
    weights: set[bytes] = field(default_factory=set)  # digests of what it attached
    provider: Provider | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_worker(self) -> bool:
        return self.pool_fd >= 0

    def uses(self, weights_sha256: bytes) -> bool:
        """Has it these weights, as far as it told on this connection?"""
        provided = self.provider is not None and self.provider.weights_sha256 == weights_sha256
        stamped = any(info.weights_sha256 == weights_sha256 for info in self.stamps.values())
        return provided or stamped or weights_sha256 in self.weights

    def reply(self, request_id: int, fds: tuple[int, ...] = (), **body: Any) -> None:
        """Answer a request; the caller keeps its descriptors."""
        self.connection.send(pb.Envelope(id=request_id, **body), fds)

    def reply_error(self, request_id: int, exc: Exception, *, is_last: bool = False) -> None:
        """Tell an error; anything but a CachewarmError is told without details."""
        self.counters["errors"] += 1
        if isinstance(exc, CachewarmError):
            code, message = exc.code, str(exc)
        else:
            code, message = InternalError.code, getattr(exc, "strerror", None) or "I/O error"
            _log.warning("os_error", reason=str(exc))
        error = pb.ErrorReply(code=code, message=message)
        # To a client, an error with id 0 is the end of the connection: it is not one here.
        if request_id or is_last:
            self.reply(request_id, error=error)

    def reply_bug(self, request_id: int, verb: str, exc: Exception) -> None:
        """Log our own mistake, tell it as INTERNAL."""
        _log.error("bug", verb=verb, exc_info=exc)
        self.reply_error(request_id, InternalError(f"{verb} failed; see the daemon's log"))

    def end_with(self, request_id: int, exc: CachewarmError) -> None:
        """Last words, then the end of the connection."""
        self.reply_error(request_id, exc, is_last=True)
        self.connection.close()

    def run(self, request_id: int, verb: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a long call; it ends with the client."""

        async def guarded() -> None:
            try:
                await work
            except (CachewarmError, OSError) as exc:
                self.reply_error(request_id, exc)
            except Exception as exc:
                self.reply_bug(request_id, verb, exc)

        task = asyncio.create_task(guarded())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class State:
    """Pool, blocks, weights, jobs, clients. Raises NoSpaceError, InvalidRequestError."""

    def __init__(self, config: Config, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.salt = secrets.token_bytes(32)
        self.started = time.monotonic()
        self.stop = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.clients: set[Client] = set()
        self._budget = Budget(config.cgroup_root)
        pool_bytes = config.pool_bytes
        if pool_bytes is None:
            pool_bytes = self._budget.available_bytes() // 4
        self.pool = Pool(pool_bytes, epoch, self.salt)
        self._budget.promise(self.pool.pool_bytes, "pool-bytes")
        self.commit_extent()
        self.readonly_fds = (
            segment.reopen_readonly(self.pool.records_fd),
            segment.reopen_readonly(self.pool.pool_fd),
        )
        self.kv = BlockStore(self.pool, self._sizes_in_use)
        self.packers = Packers()
        self.weights = WeightStore(
            self._budget,
            lambda digest: self.num_users(digest) > 0,
            self.kv.supersede,
            self.packers.read,
        )
        self.warmer = Warmer(self.weights)

    def _sizes_in_use(self) -> set[int]:
        return {info.slot_bytes for client in self.clients for info in client.stamps.values()}

    def num_users(self, weights_sha256: bytes) -> int:
        """Connections that use these weights."""
        return sum(client.uses(weights_sha256) for client in self.clients)

    def serve_weights(self, client: Client, model_name: str, weights_sha256: bytes) -> None:
        """A client has attached these weights: the model's name stands for them now."""
        client.weights.add(weights_sha256)
        self.weights.serve(model_name, weights_sha256)

    def commit_extent(self) -> bool:
        """Allocate the pool's next extent; False when all are. Raises NoSpaceError."""
        did = self.pool.commit_next()
        if did:
            self._budget.settle(layout.EXTENT_BYTES)
        return did

    def give_up_extents(self) -> int:
        """The pool stays as large as it is; how many extents are missing?"""
        missing = self.pool.num_extents - len(self.pool.extents)
        self._budget.settle(missing * layout.EXTENT_BYTES)
        return missing
