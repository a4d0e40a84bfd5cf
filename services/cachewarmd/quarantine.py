"""Blocks that clients of an earlier daemon may still read.

They keep their leases until the client names what it holds (Reattach), is dead, or QUARANTINE_S are
over. What it reads after that it must check by generation, as it does from the end of its
connection on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from cachewarmd.failpoints import hit
from cachewarmd.kv import BlockStore
from cachewarmd.lease import Identity, LeaseRows, LeaseTable, start_time
from cachewarmd.log import get_logger

_log = get_logger()


@dataclass(eq=False)
class _Orphan:
    rows: LeaseRows
    identity: Identity
    leases: list[int]


class Quarantine:
    """Of all clients that an earlier daemon left behind."""

    def __init__(self, table: LeaseTable, store: BlockStore) -> None:
        """Finds and holds what is leased; before anything can be evicted."""
        self._store = store
        self._orphans: dict[tuple[int, int], _Orphan] = {}
        for rows in table.left_behind():
            hit("quarantine.hold")
            identity = rows.identity
            orphan = _Orphan(rows, identity, store.quarantine(rows.slots()))
            self._orphans[identity.epoch, identity.client_id] = orphan

    @property
    def num_leases(self) -> int:
        return sum(len(orphan.leases) for orphan in self._orphans.values())

    def end(self, epoch: int, client_id: int, pid: int) -> None:
        """This client, of that process, has told what it still holds."""
        orphan = self._orphans.get((epoch, client_id))
        if orphan is not None and orphan.identity.pid == pid:
            self._free(orphan)

    async def watch(self, limit_s: float) -> None:
        """Free what nobody can hold any more, until nothing is left or `limit_s` are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as waits:
                for orphan in list(self._orphans.values()):
                    waits.create_task(self._until_dead(orphan))
        for orphan in list(self._orphans.values()):
            _log.warning("leases_revoked_of_live_process", pid=orphan.identity.pid)
            self._free(orphan)

    async def _until_dead(self, orphan: _Orphan) -> None:
        identity = orphan.identity
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            self._free(orphan)
            return
        except OSError:  # pid 0: a process of another namespace
            await asyncio.Event().wait()
        try:
            # The number may be another process's by now; where /proc hides it we wait for that.
            started = start_time(identity.pid)
            if identity.start_time and started not in (0, identity.start_time):
                self._free(orphan)
                return
            dead = asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, dead.set)
            await dead.wait()
            self._free(orphan)
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _free(self, orphan: _Orphan) -> None:
        if self._orphans.pop((orphan.identity.epoch, orphan.identity.client_id), None) is None:
            return
        hit("quarantine.free")
        for lease in orphan.leases:
            self._store.release(lease)
        orphan.rows.close()
