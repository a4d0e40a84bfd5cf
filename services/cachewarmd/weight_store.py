"""Which weights are in memory, for which model directory: at most one load of each at a time.

Loaded weights stay, also without an engine, until the memory is needed for others. Then those go
that no client uses and no model name stands for any more: superseded ones first, then what was
only warmed, the least recently attached before the others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from cachewarmd import weights
from cachewarmd.budget import Budget
from cachewarmd.errors import (
    InternalError,
    MisplacedError,
    ModelFilesError,
    NoSpaceError,
    ShuttingDownError,
)
from cachewarmd.huge_pages import Huge, make_huge, rounded
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.versions import Versions
from cachewarmd.weight_files import FileIdentity, file_identities
from cachewarmd.weights import Segment

_log = get_logger()

DirKey = tuple[int, int]  # (dev, ino) of the model directory
Notify = Callable[[str, int, int], None]


@dataclass(eq=False)
class Model:
    """A model directory under one pack plan, and what of it is loaded."""

    dir_key: DirKey
    dir_fd: int
    plan: pb.PackPlan
    name: str
    version: str
    segment: Segment | None = None
    identities: list[FileIdentity] = field(default_factory=list)
    loaded_unix_ms: int = 0
    follow_links: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    watchers: set[Notify] = field(default_factory=set)
    num_loads: int = 0  # running or waiting for the lock
    last_attached: int = 0  # a tick of the store
    noticed: list[FileIdentity] | None = None  # files that are not what is loaded, told already

    @property
    def shown_version(self) -> str:
        """The operator's name for it, else the first 12 hex digits of the weights' digest."""
        if self.version or self.segment is None:
            return self.version
        return self.segment.weights_sha256.hex()[:12]

    def files_now(self) -> list[FileIdentity] | None:
        """Identities of the weight files now; None when some are missing."""
        return _identities(self.dir_fd, self.follow_links)


class WeightStore:
    """Owner of all weight segments.

    `is_used` tells whether a client has the weights of that digest; `on_superseded` gets the
    digests of all superseded weights whenever they are others than before; `read` reads the files,
    in a thread; `on_change` is called when a later daemon would find something else; `place`
    decides in a thread on which nodes a new memfd's pages will lie.
    """

    def __init__(
        self,
        budget: Budget,
        is_used: Callable[[bytes], bool] = lambda digest: False,
        on_superseded: Callable[[frozenset[bytes]], None] = lambda digests: None,
        read: weights.Reader = weights.read_files,
        on_change: Callable[[], None] = lambda: None,
        place: Callable[[int, int], AbstractContextManager[None]] = lambda fd, size: nullcontext(),
    ) -> None:
        self._budget = budget
        self._is_used = is_used
        self._on_superseded = on_superseded
        self._read_files = read
        self._on_change = on_change
        self._place = place
        self.versions = Versions()
        self._ticks = itertools.count(1)
        self._is_closed = False
        self._loads: set[asyncio.Task[bool]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._models: dict[tuple[DirKey, str], Model] = {}
        self._segments: dict[tuple[bytes, str], Segment] = {}

    @property
    def models(self) -> list[Model]:
        return [model for model in self._models.values() if model.segment is not None]

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def put_back(self, model: Model) -> None:
        """A model that an earlier daemon loaded, with its segment."""
        assert model.segment is not None
        loaded = model.segment
        self._models[model.dir_key, loaded.layout_id] = model
        self._segments[loaded.weights_sha256, loaded.layout_id] = loaded

    async def attach(
        self,
        dir_fd: int,
        plan: pb.PackPlan,
        name: str,
        version: str,
        notify: Notify,
        *,
        follow_links: bool,
    ) -> tuple[Model, Segment, bool]:
        """The directory's weights as the plan lays them out; True = nothing had to be read.

        Files that went missing leave the loaded version in service; changed files are read again.
        A load goes on when the caller is cancelled: what it reads serves whoever asks next.
        `dir_fd` stays the caller's.
        Raises ModelFilesError, NoSpaceError, InvalidRequestError, ShuttingDownError, and
        InternalError when the process that reads dies.
        """
        info = os.fstat(dir_fd)
        dir_key = (info.st_dev, info.st_ino)
        key = (dir_key, weights.layout_id(plan))
        model = self._models.get(key)
        if model is None:
            model = Model(dir_key, os.dup(dir_fd), plan, name, version, follow_links=follow_links)
            self._models[key] = model
        elif model.dir_fd < 0:  # of an earlier daemon; that one's directory could not be opened
            model.dir_fd = os.dup(dir_fd)
        model.name = name or model.name
        model.version = version or model.version
        model.last_attached = next(self._ticks)
        model.watchers.add(notify)
        model.num_loads += 1
        load = asyncio.create_task(self._load(key, model))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        try:
            already = await asyncio.shield(load)
        finally:
            model.watchers.discard(notify)
        assert model.segment is not None
        if name and not self.versions.of(name):
            # Of a name that is known, weights that were only warmed stand for nothing yet.
            self.serve(name, model.segment.weights_sha256)
        return model, model.segment, already

    def serve(self, name: str, weights_sha256: bytes) -> None:
        """An engine serves these weights: they are what the model's name stands for now."""
        before = self.versions.superseded
        is_known = self.versions.is_current_of(name, weights_sha256)
        self.versions.serve(name, weights_sha256)
        if not is_known:
            self._on_change()
        superseded = self.versions.superseded
        if superseded != before:
            self._on_superseded(superseded)
            _log.info(
                "weights_superseded",
                model=name,
                current=weights_sha256.hex(),
                superseded=sorted(digest.hex() for digest in superseded),
            )

    async def look_for_changes(self) -> set[bytes]:
        """Digests of loaded weights that are of no unchanged files any more, and were till now.

        Files that went missing are no change: others may be on their way.
        """
        found = []
        for model in self.models:
            if model.dir_fd < 0:
                continue
            fd = os.dup(model.dir_fd)  # the model may be dropped meanwhile
            try:
                now = await asyncio.to_thread(_identities, fd, model.follow_links)
            finally:
                os.close(fd)
            if now is None or now == model.identities or now == model.noticed:
                continue
            model.noticed = now
            found.append(model)
        digests = set()
        for model in found:
            # Read again while we looked?
            if model.segment is None or model.identities == model.noticed:
                continue
            digest = model.segment.weights_sha256
            _log.warning(
                "weights_changed_on_disk", model=model.name, loaded_weights_sha256=digest.hex()
            )
            same = (m for m in self.models if m.segment and m.segment.weights_sha256 == digest)
            if all(m.noticed is not None and m.noticed != m.identities for m in same):
                digests.add(digest)
        return digests

    async def _load(self, key: tuple[DirKey, str], model: Model) -> bool:
        try:
            async with model.lock:
                return await self._refresh(model)
        finally:
            model.num_loads -= 1
            # A load that failed leaves nothing behind, unless another waits to try it too.
            if model.segment is None and not model.num_loads:
                del self._models[key]
                os.close(model.dir_fd)

    async def close(self) -> None:
        """End the loads that are under way, soon, and wait for that."""
        self._is_closed = True
        await asyncio.gather(*self._loads, *self._tasks, return_exceptions=True)

    async def _refresh(self, model: Model) -> bool:
        loop = asyncio.get_running_loop()
        now = model.files_now()
        if model.segment is not None and now is None:
            _log.warning("weight_files_missing_serving_loaded", model=model.name)
            return True
        if model.segment is not None and now == model.identities:
            return True

        def progress(phase: str, done: int, total: int) -> None:
            if self._is_closed:
                raise ShuttingDownError("the daemon is stopping")
            loop.call_soon_threadsafe(self._tell, model, phase, done, total)

        if model.segment is not None:
            digest, identities = await asyncio.to_thread(
                self._read_files,
                model.dir_fd,
                None,
                progress,
                _no_memory,
                follow=model.follow_links,
            )
            known = self._segments.get((digest, model.segment.layout_id))
            if known is not None:
                model.segment, model.identities = known, identities
                self._forget_unused()
                self._on_change()
                return True

        started = time.monotonic()
        loaded, identities = await self._read(model, progress)
        self._adopt(model, loaded, identities)
        if loaded.huge.refusal and loaded is model.segment:
            rest = asyncio.create_task(self._make_huge(loaded))
            self._tasks.add(rest)
            rest.add_done_callback(self._tasks.discard)
        _log.info(
            "weights_loaded",
            model=model.name,
            weights_sha256=loaded.weights_sha256.hex(),
            segment_bytes=loaded.size,
            huge_bytes=loaded.huge.num_bytes,
            small_pages_because=loaded.huge.refusal,
            seconds=round(time.monotonic() - started, 3),
        )
        return False

    async def _make_huge(self, loaded: Segment) -> None:
        """Once nobody waits any more: huge pages for what did not get them in time."""
        fd = os.dup(loaded.fd)  # the segment may be dropped meanwhile
        try:
            loaded.huge = await asyncio.to_thread(
                make_huge, fd, 0, loaded.size, lambda: not self._is_closed
            )
        finally:
            os.close(fd)
        _log.info(
            "weights_on_huge_pages",
            weights_sha256=loaded.weights_sha256.hex(),
            huge_bytes=loaded.huge.num_bytes,
            small_pages_because=loaded.huge.refusal,
        )

    async def _read(
        self, model: Model, progress: weights.Progress
    ) -> tuple[Segment, list[FileIdentity]]:
        """Load in a thread; what is not needed makes room."""

        def allocate(fd: int, size: int, tell: Callable[[int], None]) -> Huge:
            with self._place(fd, size):
                return self._budget.allocate(fd, size, f"weights of {model.name}", tell)

        while True:
            try:
                # Memory is asked for before the first byte is read, so trying again is cheap.
                return await asyncio.to_thread(
                    weights.load,
                    model.dir_fd,
                    model.plan,
                    progress,
                    allocate,
                    follow=model.follow_links,
                    read=self._read_files,
                )
            except MisplacedError:
                raise  # more room does not help
            except NoSpaceError:
                if not self._drop_one_for(rounded(model.plan.segment_bytes)):
                    raise
            except InternalError as exc:
                _log.warning("weights_not_loaded", model=model.name, reason=str(exc))
                raise

    def _drop_one_for(self, size: int) -> bool:
        """Let the segment go that is needed least; False when all that may go is not enough."""
        models: dict[Segment, list[Model]] = {}
        for model in self.models:
            assert model.segment is not None
            models.setdefault(model.segment, []).append(model)
        spare = [segment for segment, of in models.items() if not self._is_needed(segment, of)]
        room = self._budget.available_bytes() + sum(segment.size for segment in spare)
        if not spare or room < size:
            return False
        superseded = self.versions.superseded

        def rank(segment: Segment) -> tuple[bool, int]:
            last_attached = max(model.last_attached for model in models[segment])
            return segment.weights_sha256 not in superseded, last_attached

        least = min(spare, key=rank)
        for key, model in list(self._models.items()):
            if model.segment is least:
                del self._models[key]
                if model.dir_fd >= 0:
                    os.close(model.dir_fd)
        self._forget_unused()
        self._on_change()
        _log.warning(
            "unused_weights_dropped",
            models=sorted({model.name for model in models[least]}),
            weights_sha256=least.weights_sha256.hex(),
            segment_bytes=least.size,
        )
        return True

    def _is_needed(self, segment: Segment, models: list[Model]) -> bool:
        """By a client, as what a model name stands for, or by somebody who waits for it now."""
        digest = segment.weights_sha256
        is_wanted = any(model.watchers or model.num_loads for model in models)
        return is_wanted or self._is_used(digest) or self.versions.is_current(digest)

    def _adopt(self, model: Model, loaded: Segment, identities: list[FileIdentity]) -> None:
        key = (loaded.weights_sha256, loaded.layout_id)
        known = self._segments.setdefault(key, loaded)
        if known is not loaded:
            os.close(loaded.fd)  # another directory with the same bytes: one copy is enough
        model.segment, model.identities = known, identities
        model.loaded_unix_ms = int(time.time() * 1000)
        self._forget_unused()
        self._on_change()

    def _forget_unused(self) -> None:
        in_use = {id(m.segment) for m in self._models.values()}
        for old_key, segment in list(self._segments.items()):
            if id(segment) not in in_use:
                # Engines that map it keep the memory; nobody new gets it.
                del self._segments[old_key]
                os.close(segment.fd)

    @staticmethod
    def _tell(model: Model, phase: str, done: int, total: int) -> None:
        for notify in list(model.watchers):
            notify(phase, done, total)

    def find(self, name: str, dir_key: DirKey | None) -> list[Model]:
        """Loaded models of that name or directory."""
        if dir_key is not None:
            return [model for model in self.models if model.dir_key == dir_key]
        return [model for model in self.models if name in (model.name, model.shown_version)]


def _no_memory() -> int:
    raise AssertionError("who only hashes asks for no memory")


def _identities(dir_fd: int, follow_links: bool) -> list[FileIdentity] | None:
    try:
        return file_identities(dir_fd, follow_links)
    except ModelFilesError:
        return None
