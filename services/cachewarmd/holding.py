"""What of the pool one client keeps from eviction by its leases, and how much it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cachewarmd.block import Block


class Holding:
    """Distinct blocks on the chains that one client has leased; chains that begin alike count once.

    `limit` tells the bytes that it may hold now, None = all there are. It is asked before a lease
    grows; what is held already stays held.
    """

    def __init__(self, limit: Callable[[], int | None] = lambda: None) -> None:
        self.limit = limit
        self.num_bytes = 0
        # By block: leases that name it, and children of it that are held themselves.
        self._counts: dict[Block, int] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self._counts)

    def __contains__(self, block: Block) -> bool:
        return block in self._counts

    def hold(self, block: Block) -> None:
        """One more lease of this chain. Costs a step for each block that was not held before."""
        counts, before = self._counts, len(self._counts)
        node: Block | None = block
        while node is not None:
            if node in counts:
                counts[node] += 1
                break
            counts[node] = 1
            node = node.parent
        self.num_bytes += (len(counts) - before) * block.stamp.slot_bytes

    def let_go(self, block: Block) -> None:
        """One less."""
        counts, before = self._counts, len(self._counts)
        node: Block | None = block
        while node is not None:
            if counts[node] > 1:
                counts[node] -= 1
                break
            del counts[node]
            node = node.parent
        self.num_bytes -= (before - len(counts)) * block.stamp.slot_bytes

    def cut(self, chain: list[Block], limit: int) -> list[Block]:
        """As much of a chain, from its head on, as it may hold under that limit."""
        if not chain:
            return chain
        slot_bytes = chain[0].stamp.slot_bytes
        room = (limit - self.num_bytes) // slot_bytes
        if len(chain) <= room:
            return chain
        for number, block in enumerate(chain):
            if block in self._counts:
                continue
            room -= 1
            if room < 0:
                return chain[:number]
        return chain
