"""Which blocks go when a slot is needed, and which extents change their slot size: policy only.

1. blocks of superseded weights (they stay for a rollback as long as nobody needs the room)
2. short blocks
3. all others

and within each the least recently used first. Only leaves that no lease keeps are candidates. An
extent ranks like a full block that was used when anything in it was used last.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Set

from cachewarmd.block import Block
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.pool import Extent, Pool

Rank = tuple[int, int]  # class, tick of the last use; the lowest goes first

_SUPERSEDED, _SHORT, _FULL = range(3)
_HEAP_SLACK = 256


class EvictionOrder:
    """The evictable blocks of each slot size, in order.

    One heap a size. An entry is stale when its block is gone, is no leaf, is held or has another
    rank by now; stale entries are skipped, and a block must be offered again when it qualifies.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[Rank, int, Block]]] = {}
        self._limits: dict[int, int] = {}
        self._superseded: frozenset[int] = frozenset()

    def add_size(self, slot_bytes: int) -> None:
        """Idempotent."""
        self._heaps.setdefault(slot_bytes, [])
        self._limits.setdefault(slot_bytes, _HEAP_SLACK)

    @property
    def sizes(self) -> Set[int]:
        return self._heaps.keys()

    def rank(self, block: Block) -> Rank:
        if block.stamp.stamp_id in self._superseded:
            return _SUPERSEDED, block.last_used
        return _SHORT if block.is_short else _FULL, block.last_used

    def rank_of_extent(self, extent: Extent) -> Rank:
        is_superseded = extent.stamp_ids.keys() <= self._superseded
        return _SUPERSEDED if is_superseded else _FULL, extent.last_used

    def is_superseded(self, stamp_id: int) -> bool:
        return stamp_id in self._superseded

    def supersede(self, stamp_ids: Set[int]) -> Set[int]:
        """Exactly these are superseded now; the ids that changed, whose blocks must be offered."""
        changed = self._superseded ^ stamp_ids
        self._superseded = frozenset(stamp_ids)
        return changed

    def offer(self, block: Block) -> None:
        """Put a block in order, if it is evictable."""
        if not block.is_evictable:
            return
        size = block.stamp.slot_bytes
        heap = self._heaps[size]
        heapq.heappush(heap, (self.rank(block), block.slot, block))
        if len(heap) > self._limits[size]:
            # Without pressure nothing is popped, and every lease leaves a stale entry.
            heap[:] = {entry[2]: entry for entry in heap if self._is_current(entry)}.values()
            heapq.heapify(heap)
            self._limits[size] = 2 * len(heap) + _HEAP_SLACK

    def first(self, slot_bytes: int) -> Block | None:
        """The next of this size to go; None when nothing may."""
        heap = self._heaps[slot_bytes]
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _is_current(self, entry: tuple[Rank, int, Block]) -> bool:
        rank, _, block = entry
        return block.is_evictable and self.rank(block) == rank

    def offered(self) -> set[Block]:
        """All blocks that `first` can find, for the invariant check."""
        entries = (entry for heap in self._heaps.values() for entry in heap)
        return {entry[2] for entry in entries if self._is_current(entry)}


class ExtentChoice:
    """How slot sizes share the extents: each size in use has one for sure, age decides the rest.

    Everything here walks over the extents at most, never over blocks.
    """

    def __init__(
        self, pool: Pool, order: EvictionOrder, sizes_in_use: Callable[[], Set[int]]
    ) -> None:
        self._pool = pool
        self._order = order
        self._sizes_in_use = sizes_in_use
        self._claimant = 0  # the slot size that an extent is drained for
        # By slot size: blocks to evict before other sizes' extents are looked at again.
        self._until_look: Counter[int] = Counter()

    def may_open(self, slot_bytes: int) -> bool:
        """Is a free extent left for this size when each one in use that has none gets its own?"""
        num_extents_of, num_free = self._pool.num_extents_of, self._pool.num_free
        if not num_free or not num_extents_of[slot_bytes]:
            return True
        return num_free > sum(1 for size in self._sizes_in_use() if not num_extents_of[size])

    def claimed(self, slot_bytes: int, but: Set[Extent] = frozenset()) -> Extent | None:
        """For a size that has none: the extent of another with the fewest slots held.

        It is drained from now on. What is held in it is waited for: none of it is leased again and
        nothing new goes in, so it is free once the leases of today have ended.
        """
        if self._pool.draining is None:
            others = [extent for extent in self._others(slot_bytes) if extent not in but]
            if not others:
                return None
            rank = self._order.rank_of_extent
            self._pool.drain(min(others, key=lambda extent: (extent.num_held, rank(extent))))
            self._claimant = slot_bytes
        return self._pool.draining

    def older(self, slot_bytes: int, victim: Block | None) -> Extent | None:
        """One more for a size that has some: all in it is to go before `victim`, its own next.

        Without a victim any extent does in which nothing is held. After a look in vain this size
        first evicts as many blocks as an extent has.
        """
        self._end_idle_drain()
        if victim is not None and self._until_look[slot_bytes]:
            self._until_look[slot_bytes] -= 1
            return None
        rank = self._order.rank_of_extent
        unheld = (extent for extent in self._others(slot_bytes) if not extent.num_held)
        oldest = min(unheld, key=rank, default=None)
        if oldest is None or (victim is not None and rank(oldest) > self._order.rank(victim)):
            self._until_look[slot_bytes] = EXTENT_BYTES // slot_bytes
            return None
        return oldest

    def look_again(self) -> None:
        """The order has changed."""
        self._until_look.clear()

    def _end_idle_drain(self) -> None:
        if self._pool.draining is not None and self._claimant not in self._sizes_in_use():
            self._pool.stop_draining()

    def _others(self, slot_bytes: int) -> list[Extent]:
        """Extents that this size may take: of other sizes, and not the last of one in use."""
        pool, in_use = self._pool, self._sizes_in_use()
        return [
            extent
            for extent in pool.extents
            if extent.slot_bytes not in (0, slot_bytes)
            and extent is not pool.draining
            and (pool.num_extents_of[extent.slot_bytes] > 1 or extent.slot_bytes not in in_use)
        ]
