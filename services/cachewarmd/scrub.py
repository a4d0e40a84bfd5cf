"""Hashing what is sealed, again: all of it when asked, and a little all the time.

On the daemon's loop in slices of at most some milliseconds, not in a thread of low priority: one
that holds the interpreter's lock while it waits for a CPU would stop everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cachewarmd.kv import SCRUB, VERIFY, BlockStore
from cachewarmd.log import get_logger

_log = get_logger()

# 1-2 ms, or one block where that is longer.
SLICE_BYTES = 4 << 20
_IDLE_S = 1.0


@dataclass
class Pass:
    """One walk over the blocks that were sealed when it began."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_failures: int = 0


async def verify(
    store: BlockStore, pause: Callable[[int], float], done: Pass, kind: str = VERIFY
) -> None:
    """Hash all that is sealed now, filling in `done`.

    `pause` gives the seconds to wait after so many bytes. A block that is not what was sealed goes,
    with its descendants, and its readers see it in the generation.
    """
    slice_bytes = 0
    for block in store.blocks:
        if not block.is_sealed:
            continue
        done.num_blocks += 1
        done.num_bytes += block.stamp.block_bytes
        slice_bytes += block.stamp.block_bytes
        if not store.scrub(block, kind):
            done.num_failures += 1
            _log.error("integrity_failure", kind=kind, key=block.key.hex()[:16], slot=block.slot)
        if slice_bytes >= SLICE_BYTES:
            await asyncio.sleep(pause(slice_bytes))
            slice_bytes = 0


async def keep_scrubbing(store: BlockStore, bytes_per_s: int) -> None:
    """Pass after pass until cancelled."""
    while True:
        done = Pass()
        await verify(store, lambda num_bytes: num_bytes / bytes_per_s, done, SCRUB)
        store.counters["scrubbed_blocks"] += done.num_blocks
        store.counters["scrub_passes"] += 1
        # What was left of the last slice; and an empty pool is no reason to spin.
        await asyncio.sleep(max(_IDLE_S, SLICE_BYTES / bytes_per_s))
