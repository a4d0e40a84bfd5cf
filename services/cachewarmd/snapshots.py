"""When snapshots are taken and restored, one at a time; what became of it is counted and logged."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from cachewarmd import snapshot, state_dir
from cachewarmd.errors import CachewarmError, InvalidRequestError, LimitError
from cachewarmd.kv import BlockStore
from cachewarmd.log import get_logger
from cachewarmd.pool import Pool
from cachewarmd.snapshot import Outcome, Progress

_log = get_logger()


@contextlib.contextmanager
def _blocks_that_stay() -> Iterator[None]:
    """Without garbage collections: each walks over all blocks, tens of ms while nobody is served.

    What is there at the end is taken out of later ones.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Snapshots:
    """Of one daemon. `remember` is called when a restored file brings new stamps."""

    def __init__(
        self,
        pool: Pool,
        store: BlockStore,
        folder: Path | None,
        max_bytes: int,
        remember: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self._pool = pool
        self._store = store
        self._state_dir = folder
        self._max_bytes = max_bytes
        self._remember = remember
        self._counters = counters
        self._is_busy = False

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Counts and logs how it ends."""
        if self._is_busy:
            raise LimitError("another snapshot is being written or restored")
        self._is_busy = True
        try:
            yield
        except (CachewarmError, OSError) as exc:
            self._counters[f"snapshot_{what}_failed"] += 1
            _log.warning(f"snapshot_{what}_failed", reason=str(exc))
            raise
        finally:
            self._is_busy = False

    async def save(self, folder: int, name: str, progress: Progress) -> Outcome:
        """Write the pool's hot chains. Raises as `snapshot.save`, and LimitError."""
        given_up = threading.Event()
        with self._alone("save"):
            snapshot.check_name(name)
            if self._state_dir is None:
                raise InvalidRequestError(
                    "state-dir is not set: nothing could use a snapshot later"
                )
            try:
                await snapshot.in_thread(state_dir.keep_salt, self._state_dir, self._pool.salt)
                outcome = await snapshot.in_thread(
                    snapshot.save,
                    self._pool,
                    self._store.blocks,
                    folder,
                    name,
                    self._max_bytes,
                    progress,
                    given_up.is_set,
                    frozenset(self._store.pinned),
                )
            except asyncio.CancelledError:
                given_up.set()
                raise
        self._tell("saved", outcome)
        return outcome

    async def load(self, fd: int, progress: Progress) -> Outcome:
        """Restore a file. Raises as `snapshot.load`, and LimitError."""
        with self._alone("load"), _blocks_that_stay():
            outcome = await snapshot.load(fd, self._pool, self._store, self._remember, progress)
        self._tell("restored", outcome)
        return outcome

    def _tell(self, what: str, outcome: Outcome) -> None:
        self._counters[f"snapshot_{what}"] += outcome.num_blocks
        for reason, count in outcome.refused.items():
            self._counters[f"snapshot_refused_{reason}"] += count
        log = _log.warning if +outcome.refused else _log.info
        log(
            f"snapshot_{what}",
            blocks=outcome.num_blocks,
            bytes=outcome.num_bytes,
            known=outcome.num_known,
            refused=dict(+outcome.refused),
        )

    async def save_to(self, path: Path, progress: Progress) -> None:
        """As configured, at a clean stop; what goes wrong is logged and no more.

        An empty pool replaces nothing.
        """
        if not self._store.blocks:
            return
        with contextlib.suppress(CachewarmError, OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                await self.save(folder, path.name, progress)
            finally:
                os.close(folder)

    async def load_from(self, path: Path) -> None:
        """As configured, at boot; what goes wrong is logged and no more."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as exc:
            _log.info("no_snapshot", path=str(path), reason=exc.strerror)
            return
        try:
            with contextlib.suppress(CachewarmError, OSError):
                await self.load(fd, lambda *_: None)
        finally:
            os.close(fd)
