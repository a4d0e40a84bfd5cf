"""Hashing what another daemon sealed, in a thread: the loop serves meanwhile.

A block that is sealed before and after was not touched in between (nothing sealed is ever written,
and a slot that is used again has another block), so what the thread found out holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cachewarmd.block import Block
from cachewarmd.kv import BlockStore

# 3 ms of one core, up to 10 when the pages are not in our page table yet.
_BATCH_BYTES = 64 << 20


async def verify_all(store: BlockStore) -> None:
    """Returns when nothing is left that nobody has looked at."""
    while batch := store.next_unverified(_BATCH_BYTES):
        await verify(store, batch)


async def verify(store: BlockStore, blocks: Sequence[Block]) -> None:
    """Look at these; they are verified or gone afterwards, unless they were evicted meanwhile."""
    found = await asyncio.to_thread(lambda: [store.is_intact(block) for block in blocks])
    for block, is_intact in zip(blocks, found, strict=True):
        if block.is_sealed and not block.is_verified:
            store.settle(block, is_intact=is_intact)
