"""Eviction policies for the simulator: which resident leaf goes first.

Each block has a list and a rank in it; the policy says from which list the next one is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

BURST_S = 1.0
Place = tuple[int, tuple[int, int]]  # (list, rank): the lowest rank of a list goes first


class Policy(ABC):
    """Of one pool of `capacity` blocks. `tick` counts requests, `now` is in seconds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def added(self, key: int, tick: int, now: float) -> Place:
        """A block came in."""

    @abstractmethod
    def touched(self, key: int, place: Place, tick: int, now: float) -> Place:
        """A resident block was used."""

    @abstractmethod
    def evicted(self, key: int, place: Place) -> None:
        """A block went."""

    def lists(self, sizes: list[int]) -> tuple[int, ...]:
        """From which list to take the next, and where to look if nothing there may go."""
        return (0,)


class Lru(Policy):
    """The one used longest ago."""

    def added(self, key: int, tick: int, now: float) -> Place:
        return 0, (tick, 0)

    def touched(self, key: int, place: Place, tick: int, now: float) -> Place:
        return 0, (tick, 0)

    def evicted(self, key: int, place: Place) -> None:
        return


class Lru2(Policy):
    """The one whose last use but one is longest ago; uses within BURST_S are one.

    That of blocks that went is remembered, for as many as the pool has.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._before: OrderedDict[int, int] = OrderedDict()
        self._used_at: dict[int, float] = {}

    def added(self, key: int, tick: int, now: float) -> Place:
        self._used_at[key] = now
        return 0, (self._before.pop(key, 0), tick)

    def touched(self, key: int, place: Place, tick: int, now: float) -> Place:
        is_burst = now - self._used_at[key] <= BURST_S
        self._used_at[key] = now
        return place if is_burst else (0, (place[1][1], tick))

    def evicted(self, key: int, place: Place) -> None:
        del self._used_at[key]
        self._before[key] = place[1][1]
        if len(self._before) > self.capacity:
            self._before.popitem(last=False)


class Arc(Policy):
    """Once used and used again in two lists; what is missed after it went moves their border."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._target = 0.0  # of the first list's size

    def added(self, key: int, tick: int, now: float) -> Place:
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

    def touched(self, key: int, place: Place, tick: int, now: float) -> Place:
        return 1, (tick, 0)

    def evicted(self, key: int, place: Place) -> None:
        once, again = self._ghosts
        self._ghosts[place[0]][key] = None
        if len(once) + len(again) > self.capacity:
            (once if len(once) > len(again) else again).popitem(last=False)

    def lists(self, sizes: list[int]) -> tuple[int, ...]:
        return (0, 1) if sizes[0] > self._target or not sizes[1] else (1, 0)


POLICIES: dict[str, type[Policy]] = {"lru": Lru, "lru2": Lru2, "arc": Arc}
