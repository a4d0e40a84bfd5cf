"""Who holds which chain, in shared memory, so that a daemon's successor knows.

A lease is one row of its client: slot + 1 of the last block of the chain. It is written before the
client hears of the lease, and cleared before the block may be freed. Rows of a client that a daemon
left behind stay until the client has told what it still holds, is dead, or its time is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachewarmd import layout
from cachewarmd.block import Block, StampInfo
from cachewarmd.errors import LimitError
from cachewarmd.failpoints import hit
from cachewarmd.holding import Holding


@dataclass(frozen=True)
class Identity:
    """A client as its successors' daemons know it. `start_time` is 0 where /proc hides it."""

    pid: int
    start_time: int
    client_id: int
    epoch: int


class LeaseRows:
    """One client's rows; give them back with `close`."""

    def __init__(self, shared: layout.RecordsMap, number: int) -> None:
        self._client = shared.clients[number : number + 1]
        self._rows = shared.leases[number]
        self._free = [int(row) for row in np.flatnonzero(self._rows == 0)[::-1]]

    @property
    def identity(self) -> Identity:
        client = self._client[0]
        return Identity(
            *(int(client[name]) for name in ("pid", "start_time", "client_id", "epoch"))
        )

    def slots(self) -> list[int]:
        """Of the leases that name a block."""
        rows: list[int] = (self._rows[self._rows > 0].astype(np.int64) - 1).tolist()
        return rows

    def slot(self, row: int) -> int | None:
        """What `set` told last."""
        return int(self._rows[row]) - 1 if self._rows[row] else None

    def take(self) -> int:
        """A row for a new lease, of no block yet. Raises LimitError."""
        if not self._free:
            raise LimitError(f"{layout.MAX_LEASES_PER_CLIENT} leases are held, no more are allowed")
        return self._free.pop()

    def set(self, row: int, slot: int | None) -> None:
        """The lease names this block now."""
        hit("lease.before")
        self._rows[row] = 0 if slot is None else slot + 1
        hit("lease.after")

    def give_back(self, row: int) -> None:
        """The lease is over."""
        self._rows[row] = 0
        self._free.append(row)

    def close(self) -> None:
        """No lease is left; somebody else may have the rows."""
        self._rows[:] = 0
        self._client["is_used"] = 0


@dataclass
class Lease:
    """On `block` and so on its chain. `row` of `rows` tells a later daemon; no rows, no row.

    `holding` counts it for its client.
    """

    stamp: StampInfo
    rows: LeaseRows | None
    row: int
    holding: Holding | None = None
    block: Block | None = None


class LeaseTable:
    """All clients' rows, in the records memfd of a pool."""

    def __init__(self, shared: layout.RecordsMap) -> None:
        self._shared = shared

    def left_behind(self) -> list[LeaseRows]:
        """Rows in use: asked once, after a start."""
        used = np.flatnonzero(self._shared.clients["is_used"])
        return [LeaseRows(self._shared, int(number)) for number in used]

    def open(self, pid: int, client_id: int) -> LeaseRows:
        """Rows for a client that came now. Raises LimitError when all are in use."""
        free = np.flatnonzero(self._shared.clients["is_used"] == 0)
        if not len(free):
            raise LimitError(f"{layout.MAX_CLIENTS} clients hold leases, no more are allowed")
        number = int(free[0])
        client = self._shared.clients[number : number + 1]
        self._shared.leases[number] = 0
        client["pid"], client["start_time"] = pid, start_time(pid)
        client["client_id"], client["epoch"] = client_id, self._shared.header["epoch"][0]
        client["is_used"] = 1
        return LeaseRows(self._shared, number)


def start_time(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 = gone, or hidden from us."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # Behind the name, which may hold anything, also brackets.
    return int(stat.rpartition(b")")[2].split()[19])
