"""What of the pool one client keeps from eviction by its leases, and how much it may."""

from __future__ import annotations

from collections.abc import Callable

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

    def __contains__(self, block: Block) -> bool:
        return block in self._counts

    def hold(self, block: Block) -> None:
        """One more lease of this chain."""
        counts, node = self._counts, block
        while True:
            count = counts.get(node, 0)
            counts[node] = count + 1
            if count:
                return
            self.num_bytes += node.stamp.slot_bytes
            if node.parent is None:
                return
            node = node.parent

    def let_go(self, block: Block) -> None:
        """One less."""
        counts, node = self._counts, block
        while True:
            counts[node] -= 1
            if counts[node]:
                return
            del counts[node]
            self.num_bytes -= node.stamp.slot_bytes
            if node.parent is None:
                return
            node = node.parent
