"""Eviction policies, over keys alone: which of the blocks that may go is the first.

Each block has a list and a rank in it; the policy says from which list the next one is taken. What
may go at all is the caller's part: the daemon's (`eviction`), or the simulator's. Ticks order uses,
`now` is in seconds; nothing here reads a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

BURST_S = 1.0
MAX_GHOSTS = 1 << 17
Key = bytes | int
Place = tuple[int, tuple[int, int]]  # (list, rank): the lowest rank of a list goes first


class Policy(ABC):
    """Of one pool of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.max_ghosts = min(capacity, MAX_GHOSTS)

    @abstractmethod
    def added(self, key: Key, tick: int, now: float) -> Place:
        """A block came in."""

    @abstractmethod
    def touched(self, key: Key, place: Place, tick: int, now: float) -> Place:
        """A resident block was used."""

    def refreshed(self, place: Place, tick: int) -> Place:
        """It was needed till now, which is no new use."""
        return place[0], (tick, 0)

    def restored(self, number: int, tick: int) -> Place:
        """One that an earlier policy had in that list."""
        return number, (tick, 0)

    def evicted(self, key: Key, place: Place) -> None:
        """A block went for want of room."""
        self.forgotten(key)

    def forgotten(self, key: Key) -> None:  # noqa: B027 - most keep nothing of a block
        """A block is gone, and nobody wants it back."""

    def lists(self, sizes: list[int]) -> tuple[int, ...]:
        """From which list to take the next, and where to look if nothing there may go."""
        return (0,)


class Lru(Policy):
    """The one used longest ago."""

    def restored(self, number: int, tick: int) -> Place:
        return 0, (tick, 0)

    def added(self, key: Key, tick: int, now: float) -> Place:
        return 0, (tick, 0)

    def touched(self, key: Key, place: Place, tick: int, now: float) -> Place:
        return 0, (tick, 0)


class Lru2(Policy):
    """The one whose last use but one is longest ago; uses within BURST_S are one.

    That of blocks that went is remembered, for as many as the pool has.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._before: OrderedDict[Key, int] = OrderedDict()
        self._used_at: dict[Key, float] = {}

    def added(self, key: Key, tick: int, now: float) -> Place:
        self._used_at[key] = now
        return 0, (self._before.pop(key, 0), tick)

    def touched(self, key: Key, place: Place, tick: int, now: float) -> Place:
        is_burst = now - self._used_at.get(key, -BURST_S) <= BURST_S
        self._used_at[key] = now
        return place if is_burst else (0, (place[1][1], tick))

    def refreshed(self, place: Place, tick: int) -> Place:
        return place

    def restored(self, number: int, tick: int) -> Place:
        # Whether it was used again is not noted; as if the last use but one were the last.
        return 0, (tick, tick)

    def evicted(self, key: Key, place: Place) -> None:
        self.forgotten(key)
        self._before[key] = place[1][1]
        if len(self._before) > self.max_ghosts:
            self._before.popitem(last=False)

    def forgotten(self, key: Key) -> None:
        self._used_at.pop(key, None)


class Arc(Policy):
    """Once used and used again in two lists; what is missed after it went moves their border."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: tuple[OrderedDict[Key, None], ...] = (OrderedDict(), OrderedDict())
        self._target = 0.0  # of the first list's size

    def added(self, key: Key, tick: int, now: float) -> Place:
        once, again = self._ghosts
        if key in once:
            self._target = min(self.capacity, self._target + max(1.0, len(again) / len(once)))
            del once[key]
        elif key in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
            del again[key]
        else:
            return 0, (tick, 0)
        return 1, (tick, 0)

    def touched(self, key: Key, place: Place, tick: int, now: float) -> Place:
        return 1, (tick, 0)

    def evicted(self, key: Key, place: Place) -> None:
        once, again = self._ghosts
        self._ghosts[place[0]][key] = None
        if len(once) + len(again) > self.max_ghosts:
            (once if len(once) > len(again) else again).popitem(last=False)

    def lists(self, sizes: list[int]) -> tuple[int, ...]:
        return (0, 1) if sizes[0] > self._target or not sizes[1] else (1, 0)


class Ghosts:
    """Keys of blocks that went last, as many as the pool has: a pool twice the size had them."""

    def __init__(self, capacity: int) -> None:
        self._max = min(capacity, MAX_GHOSTS)
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """It went."""
        self._keys[key] = None
        if len(self._keys) > self._max:
            self._keys.popitem(last=False)

    def take(self, key: Key) -> bool:
        """It is needed again: was it one of these?"""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True


POLICIES: dict[str, type[Policy]] = {"lru": Lru, "lru2": Lru2, "arc": Arc}
