"""Everything the daemon owns, and its clients. The event loop is the only writer of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cachewarmd import (
    fdstore,
    layout,
    memory_lock,
    numa,
    recovery,
    segment,
    state_dir,
    weight_catalog,
)
from cachewarmd.block import StampInfo, stamps_from_json
from cachewarmd.budget import Budget
from cachewarmd.catalog import Catalog
from cachewarmd.config import Config
from cachewarmd.connection import Connection
from cachewarmd.errors import (
    CachewarmError,
    InternalError,
    InvalidRequestError,
    LimitError,
    MisplacedError,
    NoSpaceError,
    NotFoundError,
)
from cachewarmd.failpoints import hit
from cachewarmd.fdstore import FdStore
from cachewarmd.holding import Holding
from cachewarmd.job import Provider
from cachewarmd.kv import BlockStore
from cachewarmd.lease import LeaseRows, LeaseTable
from cachewarmd.log import get_logger
from cachewarmd.packers import Packers
from cachewarmd.pins import Pins
from cachewarmd.pool import Memfds, Pool
from cachewarmd.prompts import Prompts
from cachewarmd.quarantine import Quarantine
from cachewarmd.snapshots import Snapshots
from cachewarmd.survey import Surveys
from cachewarmd.traffic import Traffic
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.warmup import Warmer
from cachewarmd.weight_store import WeightStore

_log = get_logger()

MAX_TASKS = 64  # long calls of one client that run at a time

PINS_CHECK_S = 0.5


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
    rows: LeaseRows | None = None  # an engine's: its leases as a later daemon finds them
    holding: Holding = field(default_factory=Holding)
    stamps: dict[int, StampInfo] = field(default_factory=dict)
    weights: set[bytes] = field(default_factory=set)  # digests of what it attached
    provider: Provider | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_worker(self) -> bool:
        return self.pool_fd >= 0

    @property
    def may_follow_links(self) -> bool:
        """Only a peer with our own rights: it gains nothing by them."""
        return self.connection.uid == os.getuid()

    @property
    def may_run(self) -> bool:
        """Is there room for one more long call?"""
        return len(self.tasks) < MAX_TASKS

    def check_tasks(self) -> None:
        """Raises LimitError."""
        if not self.may_run:
            raise LimitError(f"{MAX_TASKS} long calls are under way, no more are allowed")

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

    def __init__(self, config: Config, epoch: int, kept: FdStore) -> None:
        self.config = config
        self.started = time.monotonic()
        self.stop = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.clients: set[Client] = set()
        self._budget = Budget(config.cgroup_root)
        self._kept = kept
        self._was_refused = False  # there was a pool, which may still take up memory
        self._catalog = self._open_catalog()
        before = self._catalog.content
        adopted = self._adoptable(before)
        self.placement = numa.Placement(config.numa, config.numa_nodes)
        self.pool, is_clean = self._open_pool(epoch, adopted)
        self.numa_refusal = self.placement.apply(self.pool.memory)
        if self.numa_refusal:
            _log.warning("pool_not_placed", reason=self.numa_refusal)
        self.epoch = int(self.pool.header["epoch"][0])
        self.may_lock = self._may_lock()
        if adopted is None:
            self.commit_extent()
            self._check_strict()
        self.readonly_fds = (
            segment.reopen_readonly(self.pool.memfds.records),
            segment.reopen_readonly(self.pool.memfds.pool),
        )
        self.kv = BlockStore(self.pool, self._sizes_in_use, config.l2_policy)
        self.packers = Packers()
        if adopted is not None:
            self._restore_blocks(before, is_clean)
        table = LeaseTable(self.pool.shared)
        self.quarantine = Quarantine(table, self.kv)
        self.pins = Pins(self.kv, self.pool.pool_bytes * config.pin_bytes // 100)
        if adopted is not None:
            self._restore_pins(before.get("pins", []))
        self.lease_table = table
        self.surveys = Surveys(self.placement, self.numa_refusal, self._regions)
        self.weights = WeightStore(
            self._budget,
            lambda digest: self.num_users(digest) > 0,
            self.kv.supersede,
            self.packers.read,
            self.remember,
            self._place_weights,
        )
        weight_catalog.restore(self.weights, before.get("weights", {}), kept)
        self.kv.supersede(self.weights.versions.superseded)
        self.warmer = Warmer(self.weights, kept)
        self.warmer.restore()
        self.traffic = Traffic() if config.learn != "off" else None
        self.snapshots = Snapshots(
            self.pool,
            self.kv,
            config.state_dir,
            config.snapshot_max_bytes,
            self.remember,
            self.counters,
        )
        self.prompts = self._open_prompts()
        self.remember()
        for name in self._kept.forget_rest():
            _log.warning("descriptor_of_nothing_closed", name=name)

    # -- what outlives this daemon --------------------------------------------------------------

    def _open_catalog(self) -> Catalog:
        fd = self._kept.take(fdstore.CATALOG)
        if fd is not None:
            try:
                return Catalog(fd)
            except ValueError as exc:
                _log.warning("catalog_not_adopted", reason=str(exc))
                os.close(fd)
        catalog = Catalog()
        self._kept.keep(fdstore.CATALOG, catalog.fd)
        return catalog

    def _open_prompts(self) -> Prompts:
        fd = self._kept.take(fdstore.PROMPTS)
        if fd is not None:
            try:
                return Prompts(self.config.prompt_bytes, self._may_take, fd)
            except ValueError as exc:
                _log.warning("prompts_not_adopted", reason=str(exc))
                os.close(fd)
                self._kept.forget(fdstore.PROMPTS)
        return self._new_prompts()

    def _new_prompts(self) -> Prompts:
        prompts = Prompts(self.config.prompt_bytes, self._may_take)
        if prompts.fd >= 0:
            self._kept.keep(fdstore.PROMPTS, prompts.fd)
        return prompts

    def _may_take(self, num_bytes: int) -> bool:
        return self._budget.available_bytes() >= num_bytes

    def drop_prompts(self) -> None:
        """Forget all ids of prompts, and give their memory back."""
        before, self.prompts = self.prompts, self._new_prompts()
        before.close()

    def _adoptable(self, catalog: dict[str, Any]) -> Memfds | None:
        """The pool of the daemon before, if it can be used: all of it or nothing."""
        fds = [self._kept.take(name) for name in (fdstore.RECORDS, fdstore.POOL)]
        records, pool = fds
        if records is None or pool is None:
            reason = "" if fds == [None, None] else "one of its two memfds is missing"
        else:
            memfds = Memfds(records, pool)
            reason = recovery.refusal(memfds, self.config.pool_bytes)
            told = bytes(np.frombuffer(os.pread(records, 256, 0), layout.HEADER)["pool_id"][0])
            if not reason and told.hex() != catalog.get("pool_id"):
                reason = "the catalog is not of this pool"
            if not reason:
                reason = self._stamps_refusal(catalog)
            if not reason:
                return memfds
        if reason:
            self._was_refused = True
            _log.warning("pool_not_adopted", reason=reason)
        for fd in fds:
            if fd is not None:
                # Untouched: whoever still reads it does so until he lets go of it.
                os.close(fd)
        for name in (fdstore.RECORDS, fdstore.POOL):
            self._kept.forget(name)
        return None

    @staticmethod
    def _stamps_refusal(catalog: dict[str, Any]) -> str:
        try:
            stamps_from_json(catalog.get("stamps"))
        except ValueError as exc:
            return str(exc)
        return ""

    def _open_pool(self, epoch: int, adopted: Memfds | None) -> tuple[Pool, bool]:
        if adopted is not None:
            size = os.fstat(adopted.pool).st_size
            header = np.frombuffer(os.pread(adopted.records, 256, 0), layout.HEADER)
            pool = Pool(size, max(epoch, int(header["epoch"][0]) + 1), b"", adopted)
            is_clean = recovery.begin(pool)
            missing = pool.num_extents - int(pool.header["num_committed"][0])
            self._budget.promise(missing * layout.EXTENT_BYTES, "pool-bytes")
            return pool, is_clean
        pool_bytes = self.config.pool_bytes
        if pool_bytes is None:
            pool_bytes = self._budget.available_bytes() // 4
        if self._was_refused:
            pool_bytes = min(pool_bytes, max(layout.EXTENT_BYTES, self._budget.available_bytes()))
        pool = Pool(pool_bytes, epoch, self._salt())
        self._budget.promise(pool.pool_bytes, "pool-bytes")
        self._kept.keep(fdstore.RECORDS, pool.memfds.records)
        self._kept.keep(fdstore.POOL, pool.memfds.pool)
        return pool, False

    def _salt(self) -> bytes:
        """For a new pool: the one that snapshots were taken under, if there is one."""
        kept = None
        if self.config.state_dir is not None:
            try:
                kept = state_dir.read_salt(self.config.state_dir)
            except (InvalidRequestError, OSError) as exc:
                _log.warning("salt_not_used", reason=str(exc))
        return kept or secrets.token_bytes(state_dir.SALT_BYTES)

    def _may_lock(self) -> bool:
        """Is the pool to be locked? Raises NoSpaceError where it must be and can't."""
        wanted = self.config.lock
        if wanted == "off":
            return False
        why = memory_lock.refusal(self.pool.pool_bytes)
        if why and (wanted == "require" or self.config.strict):
            raise NoSpaceError(why)
        if why:
            _log.warning("pool_not_locked", reason=why)
        return not why

    def _check_strict(self) -> None:
        """What would be a warning, of a new pool. Raises NoSpaceError."""
        if not self.config.strict:
            return
        if self.pool.huge.num_bytes < layout.EXTENT_BYTES:
            why = self.pool.huge.refusal
            raise NoSpaceError(f"the pool gets no huge pages: {why}")
        self._check_placement()
        if self._kept.num_refused:
            raise NoSpaceError("the pool can't be kept for the next daemon: the fd store is full")

    def _check_placement(self) -> None:
        if self.numa_refusal:
            raise MisplacedError(self.numa_refusal)
        self.placement.check(self.pool.committed, "the pool")

    @contextlib.contextmanager
    def _place_weights(self, fd: int, size: int) -> Iterator[None]:
        """Around the allocation. Raises MisplacedError under `strict`."""
        memory = segment.map_memory(fd, size, writable=True)
        if why := self.placement.apply(memory):
            if self.config.strict:
                raise MisplacedError(why)
            _log.warning("weights_not_placed", reason=why)
        yield
        if self.config.strict:
            self.placement.check(memory, "the weights")

    def _regions(self) -> list[tuple[str, npt.NDArray[np.uint8]]]:
        """Shared memory by name: the pool, and weights by their digest."""
        found = [("pool", self.pool.committed)]
        for one in self.weights.segments:
            fd = segment.reopen_readonly(one.fd)
            try:
                found.append((one.weights_sha256.hex(), segment.map_memory(fd, one.size)))
            finally:
                os.close(fd)
        return found

    def lock_committed(self) -> None:
        """Lock what the pool has by now; the first refusal ends it, with a warning."""
        if self.may_lock and (why := self.pool.lock_committed()):
            self.may_lock = False
            _log.warning("pool_not_locked", reason=why)

    @property
    def num_fds_kept(self) -> int:
        """Descriptors that the next daemon will get; 0 where nobody keeps any."""
        return len(self._kept.names)

    @property
    def num_fds_not_kept(self) -> int:
        """Descriptors that the next daemon will miss."""
        return self._kept.num_refused

    def _restore_blocks(self, catalog: dict[str, Any], is_clean: bool) -> None:
        for info in stamps_from_json(catalog["stamps"]):
            self.kv.restore_stamp(info)
        found = recovery.restore(self.pool, self.kv, is_verified=is_clean)
        self.counters["recovered"] += found.num_blocks
        self.counters["refused_records"] += found.num_doubtful
        _log.info(
            "pool_adopted",
            epoch=self.epoch,
            blocks=found.num_blocks,
            doubtful=found.num_doubtful,
            verified=is_clean,
            seconds=round(time.monotonic() - self.started, 3),
        )

    def _restore_pins(self, told: Any) -> None:
        try:
            num_lost = self.pins.restore(told)
        except ValueError as exc:
            _log.warning("pins_not_restored", reason=str(exc))
            return
        if num_lost:
            _log.warning("pins_lost", pins=num_lost)

    def remember(self) -> None:
        """Stamps, weights or pins changed: a later daemon shall know. Losing warmth is no error."""
        content = {
            "pool_id": self.pool.pool_id.hex(),
            "stamps": [info.to_json() for info in self.kv.stamps],
            "weights": weight_catalog.to_json(self.weights),
            "pins": self.pins.to_json(),
        }
        weight_catalog.store_new(self.weights, self._kept)
        try:
            self._catalog.write(content)
        except (NoSpaceError, OSError) as exc:
            self.counters["catalog_not_written"] += 1
            _log.error("catalog_not_written", reason=str(exc))
        weight_catalog.forget_old(self.weights, self._kept)

    def _sizes_in_use(self) -> set[int]:
        return {info.slot_bytes for client in self.clients for info in client.stamps.values()}

    def max_held_bytes(self, client: Client) -> int | None:
        """What one client's leases may keep from eviction; None = all, while no other needs any."""
        others = (other for other in self.clients if other is not client)
        if not any(other.is_worker or other.leases for other in others):
            return None
        committed = len(self.pool.extents) * layout.EXTENT_BYTES
        return committed * self.config.max_client_slots // 100

    def num_users(self, weights_sha256: bytes) -> int:
        """Connections that use these weights."""
        return sum(client.uses(weights_sha256) for client in self.clients)

    def weights_of(self, name: str) -> set[bytes] | None:
        """All weights that a model's name stood for; None = no name, so any.

        Raises NotFoundError.
        """
        if not name:
            return None
        models = self.weights.find(name, None)
        digests = {m.segment.weights_sha256 for m in models if m.segment is not None}
        digests |= self.weights.versions.of(name)
        if not digests:
            raise NotFoundError(f"model {name!r} is not known")
        return digests

    def serve_weights(self, client: Client, model_name: str, weights_sha256: bytes) -> None:
        """A client has attached these weights: the model's name stands for them now."""
        client.weights.add(weights_sha256)
        self.kv.revive(weights_sha256)
        self.weights.serve(model_name, weights_sha256)

    def retire(self, weights: Set[bytes]) -> int:
        """Blocks of these weights are found no more, pinned or not: how many went?"""
        if self.pins.end(lambda pin: pin.stamp.weights_sha256 in weights):
            self.remember()
        return self.kv.retire(weights)

    async def end_pins(self) -> None:
        """Those whose time is over, or whose blocks are gone, again and again."""
        while True:
            await asyncio.sleep(PINS_CHECK_S)
            if self.pins.end_over():
                self.remember()

    def release_all(self, client: Client) -> None:
        """A client that has gone holds nothing any more. Idempotent."""
        hit("reclaim.before")
        for lease in client.leases:
            self.kv.release(lease)
        client.leases.clear()
        if client.rows is not None:
            client.rows.close()
            client.rows = None
        hit("reclaim.after")

    def commit_extent(self) -> bool:
        """Allocate the pool's next extent; False when all are. Raises NoSpaceError."""
        did = self.pool.commit_next(is_patient=self.config.strict)
        if did:
            self._budget.settle(layout.EXTENT_BYTES)
        return did

    def give_up_extents(self) -> int:
        """The pool stays as large as it is; how many extents are missing?"""
        missing = self.pool.num_extents - len(self.pool.extents)
        self._budget.settle(missing * layout.EXTENT_BYTES)
        return missing
