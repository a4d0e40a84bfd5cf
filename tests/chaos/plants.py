"""Bugs that a chaos run must find, each with what opens its window: else the run proves nothing.

A plant is code that is run in the daemon before it starts, flags for the clients, and a way to
provoke it. `{folder}` is the run's own directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.run import Chaos


_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Plant:
    """One bug. `provoke` is repeated until something is wrong."""

    prelude: str
    provoke: Callable[[Chaos], None]
    client_flags: Sequence[str] = ()


def _kill_and_evict(chaos: Chaos) -> None:
    """While clients pause before they say what they hold, all goes that nobody seems to hold."""
    chaos.wait(lambda: chaos.seen("hits") + chaos.seen("published") > chaos.used, "some load")
    chaos.used = chaos.seen("hits") + chaos.seen("published")
    told = chaos.seen("reattached") + chaos.seen("lost")
    chaos.kill_daemon()
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end and not chaos.look():
        if chaos.seen("reattached") + chaos.seen("lost") > told:
            return
        chaos.evict()
        time.sleep(0.05)


def _wait(chaos: Chaos) -> None:
    time.sleep(0.2)


def _kill_at_the_window(chaos: Chaos) -> None:
    """The fail point between the state word and the bytes kills, once for each token."""
    (chaos.daemon.socket.parent / "token").touch()
    time.sleep(0.5)


# The record says what the bytes will be, and is sealed; then they are copied.
_SEAL_FIRST = """
import os, xxhash, cachewarmd.pool as pool, cachewarmd.failpoints as failpoints
failpoints._armed["plant"] = failpoints._Action("kill", 0.0, "{folder}/token")
fill, seal, digest = pool.Pool.fill, pool.Pool.seal, pool.Pool._digest
def late_fill(self, slot, fd, offset, size):
    self.records[slot]["state"] = 1
    self.late = (fd, offset, size)
    return True
def early_seal(self, slot, *args, **more):
    fd, offset, size = self.late
    self._digest = lambda *_: xxhash.xxh3_128_digest(os.pread(fd, size, offset))
    try:
        generation = seal(self, slot, *args, **more)
    finally:
        del self._digest
    failpoints.hit("plant")
    fill(self, slot, fd, offset, size)
    self.records[slot]["state"] = 2
    return generation
pool.Pool.fill, pool.Pool.seal = late_fill, early_seal
"""

# Nobody remembers what was leased before a restart. Clients take a while to come back.
_NO_QUARANTINE = """
import cachewarmd.kv as kv
kv.BlockStore.quarantine = lambda self, slots: []
"""

# What was leased is free at once after a restart, by intent; clients that don't look read on.
_NO_TIME = """
import cachewarmd.server as server
server.QUARANTINE_S = 0.0
"""

# A leaf may go although a lease names it.
_NO_CHAIN_LEASES = """
import cachewarmd.block as block
block.Block.is_evictable = property(lambda self: self.is_sealed and not self.children)
"""

PLANTS = {
    "seal before copy": Plant(_SEAL_FIRST, _kill_at_the_window),
    "no quarantine": Plant(_NO_QUARANTINE, _kill_and_evict, ["--pause", "1"]),
    "no generation check": Plant(_NO_TIME, _kill_and_evict, ["--pause", "1", "--no-check"]),
    "eviction ignores leases": Plant(_NO_CHAIN_LEASES, _wait),
}
