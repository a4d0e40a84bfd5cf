"""Descriptors that outlive the daemon: kept by the service manager, or by our holder.

Both take them by FDSTORE=1 and pass them to the next daemon by LISTEN_FDS, under the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cachewarmd.failpoints import hit
from cachewarmd.log import get_logger
from cachewarmd.notify import Notifier

RECORDS, POOL, CATALOG = "cachewarm-records", "cachewarm-pool", "cachewarm-catalog"
WEIGHTS = "cachewarm-weights-"  # and what names the segment
JOBS = "cachewarm-job-"  # and its number
LISTENER = "cachewarm-listener"  # the control socket, where no socket unit owns it
DEFAULT_ROOM = 64  # FileDescriptorStoreMax= of our unit

_log = get_logger()


class FdStore:
    """What is stored, by name. `passed` are the descriptors that an earlier daemon stored."""

    def __init__(
        self, notifier: Notifier, passed: Mapping[str, int], room: int = DEFAULT_ROOM
    ) -> None:
        self._notifier = notifier
        self._passed = dict(passed)
        self._stored = set(passed)
        self._room = room
        self.num_refused = 0  # not stored, so that the next daemon will miss them

    @property
    def is_enabled(self) -> bool:
        """Does anybody keep anything for us?"""
        return self._notifier.is_enabled

    @property
    def names(self) -> frozenset[str]:
        """Of what is stored now."""
        return frozenset(self._stored)

    def take(self, name: str) -> int | None:
        """What an earlier daemon stored, now the caller's. It stays stored."""
        return self._passed.pop(name, None)

    def keep(self, name: str, fd: int) -> bool:
        """Store a duplicate, in place of what was stored under this name; False = not stored."""
        if not self._notifier.is_enabled:
            return False
        self.forget(name)
        if len(self._stored) >= self._room:
            self.num_refused += 1
            _log.error("fd_store_is_full", name=name, room=self._room)
            return False
        hit("store.before")
        if not self._notifier.store_fd(name, fd):
            self.num_refused += 1
            _log.error("fd_not_stored", name=name)
            return False
        hit("store.after")
        self._stored.add(name)
        return True

    def forget(self, name: str) -> None:
        """The next daemon does not get it. Idempotent."""
        if name in self._stored:
            self._notifier.remove_fd(name)
            self._stored.discard(name)

    def forget_unknown(self) -> list[str]:
        """What another version stored is of no use to us: as `forget_rest`."""
        known = {RECORDS, POOL, CATALOG, LISTENER}
        return self._forget(
            [n for n in self._passed if n not in known and not n.startswith((WEIGHTS, JOBS))]
        )

    def forget_rest(self) -> list[str]:
        """Nobody took these: they are closed and not stored any more. Returns their names."""
        return self._forget(list(self._passed))

    def _forget(self, names: list[str]) -> list[str]:
        for name in names:
            os.close(self._passed.pop(name))
            self.forget(name)
        return names
