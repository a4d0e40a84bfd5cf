"""Which blocks go when a slot is needed, and which extents change their slot size: policy only.

1. blocks of superseded weights (they stay for a rollback as long as nobody needs the room)
2. short blocks
3. all others

and within each by the policy (`policy`). Only leaves that no lease keeps are candidates. An extent
is as old as a full block that was used when anything in it was used last.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Set

from cachewarmd.block import Block
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.policy import POLICIES, Ghosts, Place, Policy
from cachewarmd.pool import Extent, Pool

Age = tuple[int, int]  # class, tick of the last use
_Rank = tuple[int, tuple[int, int]]  # class, rank in the policy's list; the lowest goes first
_Entry = tuple[_Rank, int, Block]

_SUPERSEDED, _SHORT, _FULL = range(3)
_HEAP_SLACK = 256


class _Size:
    """Blocks of one slot size. `heaps` are the policy's lists; `counts` are the blocks in each."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ghosts = Ghosts(policy.capacity)
        self.counts = [0, 0]
        self.heaps: tuple[list[_Entry], ...] = ([], [])
        self.limit = _HEAP_SLACK


class EvictionOrder:
    """The evictable blocks of each slot size, in the order of a policy.

    An entry of a heap is stale when its block is gone, is no leaf, is held or has another rank by
    now; stale entries are skipped, and a block must be offered again when it qualifies.
    """

    def __init__(self, policy: str, pool_bytes: int) -> None:
        self._policy = POLICIES[policy]
        self._pool_bytes = pool_bytes
        self._by_size: dict[int, _Size] = {}
        self._superseded: frozenset[int] = frozenset()

    def add_size(self, slot_bytes: int) -> None:
        """Idempotent."""
        if slot_bytes not in self._by_size:
            policy = self._policy(max(1, self._pool_bytes // slot_bytes))
            self._by_size[slot_bytes] = _Size(policy)

    @property
    def sizes(self) -> Set[int]:
        return self._by_size.keys()

    # -- what the policy learns -----------------------------------------------------------------

    def missed(self, slot_bytes: int, key: bytes) -> bool:
        """A block comes, before anything goes for it: did it go not long ago?"""
        return self._by_size[slot_bytes].ghosts.take(key)

    def added(self, block: Block, tick: int, now: float) -> None:
        size = self._by_size[block.stamp.slot_bytes]
        block.place = size.policy.added(block.key, tick, now)
        size.counts[block.place[0]] += 1

    def restored(self, block: Block, number: int = 0) -> None:
        """It is here, and nothing is known of it but its `last_used` and its list."""
        size = self._by_size[block.stamp.slot_bytes]
        block.place = size.policy.restored(number, block.last_used)
        size.counts[block.place[0]] += 1

    def used(self, block: Block, tick: int, now: float) -> None:
        """A chain was found. Ancestors go to the other list with it, once; else it costs a step."""
        size = self._by_size[block.stamp.slot_bytes]
        node: Block | None = block
        while node is not None:
            before = node.place[0]
            self._put(size, node, size.policy.touched(node.key, node.place, tick, now))
            if before == node.place[0]:
                return
            node = node.parent

    def refreshed(self, block: Block, tick: int) -> None:
        """Leased or released; not a use by itself."""
        size = self._by_size[block.stamp.slot_bytes]
        block.place = size.policy.refreshed(block.place, tick)

    def gone(self, block: Block, *, for_room: bool) -> None:
        """Its parent is worth at least as much as it was."""
        size = self._by_size[block.stamp.slot_bytes]
        size.counts[block.place[0]] -= 1
        if for_room:
            size.policy.evicted(block.key, block.place)
            size.ghosts.add(block.key)
        else:
            size.policy.forgotten(block.key)
        if block.parent is not None and block.parent.place < block.place:
            self._put(size, block.parent, block.place)

    @staticmethod
    def _put(size: _Size, block: Block, place: Place) -> None:
        if block.place[0] != place[0]:
            size.counts[block.place[0]] -= 1
            size.counts[place[0]] += 1
        block.place = place

    # -- the order ------------------------------------------------------------------------------

    def _class(self, block: Block) -> int:
        if block.stamp.stamp_id in self._superseded:
            return _SUPERSEDED
        return _SHORT if block.is_short else _FULL

    def age(self, block: Block) -> Age:
        """To compare with an extent's."""
        return self._class(block), block.last_used

    def age_of_extent(self, extent: Extent) -> Age:
        is_superseded = extent.stamp_ids.keys() <= self._superseded
        return _SUPERSEDED if is_superseded else _FULL, extent.last_used

    def is_superseded(self, stamp_id: int) -> bool:
        return stamp_id in self._superseded

    def supersede(self, stamp_ids: Set[int]) -> Set[int]:
        """Exactly these are superseded now; the ids that changed, whose blocks must be offered."""
        changed = self._superseded ^ stamp_ids
        self._superseded = frozenset(stamp_ids)
        return changed

    def _where(self, block: Block) -> tuple[int, _Rank]:
        """Which heap, and the rank there. The policy's lists are of full blocks that are wanted."""
        number = self._class(block)
        return block.place[0] if number == _FULL else 0, (number, block.place[1])

    def offer(self, block: Block) -> None:
        """Put a block in order, if it is evictable."""
        if not block.is_evictable:
            return
        size = self._by_size[block.stamp.slot_bytes]
        which, rank = self._where(block)
        heapq.heappush(size.heaps[which], (rank, block.slot, block))
        if sum(map(len, size.heaps)) > size.limit:
            # Without pressure nothing is popped, and every lease leaves a stale entry.
            for number, heap in enumerate(size.heaps):
                heap[:] = {e[2]: e for e in heap if self._is_current(number, e)}.values()
                heapq.heapify(heap)
            size.limit = 2 * sum(map(len, size.heaps)) + _HEAP_SLACK

    def first(self, slot_bytes: int) -> Block | None:
        """The next of this size to go; None when nothing may."""
        size = self._by_size[slot_bytes]
        for number, heap in enumerate(size.heaps):
            while heap and not self._is_current(number, heap[0]):
                heapq.heappop(heap)
        if size.heaps[0] and size.heaps[0][0][0][0] < _FULL:
            return size.heaps[0][0][2]
        for number in size.policy.lists(size.counts):
            if size.heaps[number]:
                return size.heaps[number][0][2]
        return None

    def _is_current(self, number: int, entry: _Entry) -> bool:
        rank, _, block = entry
        return block.is_evictable and self._where(block) == (number, rank)

    # -- for the invariant check ----------------------------------------------------------------

    def offered(self) -> set[Block]:
        """All blocks that `first` can find."""
        return {
            entry[2]
            for size in self._by_size.values()
            for number, heap in enumerate(size.heaps)
            for entry in heap
            if self._is_current(number, entry)
        }

    def counts(self) -> dict[int, list[int]]:
        """By slot size: how many blocks each list of the policy has."""
        return {slot_bytes: size.counts for slot_bytes, size in self._by_size.items()}


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
            age = self._order.age_of_extent
            self._pool.drain(min(others, key=lambda extent: (extent.num_held, age(extent))))
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
        age = self._order.age_of_extent
        unheld = (extent for extent in self._others(slot_bytes) if not extent.num_held)
        oldest = min(unheld, key=age, default=None)
        if oldest is None or (victim is not None and age(oldest) > self._order.age(victim)):
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
