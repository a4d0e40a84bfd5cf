"""What a bounded cache of prompts keeps: LRU-2, where a burst of touches counts as one."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

BURST_S = 5.0  # requests of one conversation's turn, or of one batch
# Of the capacity, for what was touched once: else what is new could never be touched again.
_NEW_SHARE = 8


@dataclass
class _Entry(Generic[V]):
    value: V
    cost: int
    last: float
    before: float | None = None  # of the touch before the last; None = touched once


class Lru2(Generic[K, V]):
    """Values up to ``capacity`` in cost. Goes first: what was touched once, the oldest first; then
    what was touched again, by its touch before the last. The clock is an argument. Not thread-safe.
    """

    def __init__(self, capacity: int, burst_s: float = BURST_S) -> None:
        self.capacity = capacity
        self.used = 0
        self._burst_s = burst_s
        self._entries: dict[K, _Entry[V]] = {}
        self._once: OrderedDict[K, None] = OrderedDict()
        self._once_cost = 0
        self._again: list[tuple[float, int, K]] = []  # a heap; a row of an older touch is void
        self._num_rows = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K, now: float) -> V | None:
        """The value, touched; None when it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry.last >= self._burst_s:
            if entry.before is None:
                del self._once[key]
                self._once_cost -= entry.cost
            entry.before, entry.last = entry.last, now
            self._push(key, entry.before)
        elif entry.before is None:
            self._once.move_to_end(key)
        return entry.value

    def put(self, key: K, value: V, cost: int, now: float) -> None:
        """Add a value, or touch the one that is there. What costs more than all is not kept."""
        if self.get(key, now) is not None or cost > self.capacity:
            return
        while self.used + cost > self.capacity:
            self._evict()
        self._entries[key] = _Entry(value, cost, now)
        self._once[key] = None
        self._once_cost += cost
        self.used += cost

    def _push(self, key: K, before: float) -> None:
        self._num_rows += 1
        heapq.heappush(self._again, (before, self._num_rows, key))
        if len(self._again) > 2 * len(self._entries) + 16:
            self._again = [row for row in self._again if self._is_valid(row)]
            heapq.heapify(self._again)

    def _is_valid(self, row: tuple[float, int, K]) -> bool:
        entry = self._entries.get(row[2])
        return entry is not None and entry.before == row[0]

    def _evict(self) -> None:
        is_crowded = self._once_cost * _NEW_SHARE <= self.capacity
        while self._again and not self._is_valid(self._again[0]):
            heapq.heappop(self._again)
        if self._once and not (is_crowded and self._again):
            key, _ = self._once.popitem(last=False)
            self._once_cost -= self._entries[key].cost
        else:
            key = heapq.heappop(self._again)[2]
        self.used -= self._entries.pop(key).cost
