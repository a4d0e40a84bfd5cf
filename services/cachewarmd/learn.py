"""What to warm, from what traffic began with: the prefixes that save most.

A prefix ends where counts drop below a minimum. Several that begin alike are one path and its
branches: each is worth what it adds to those chosen before it, so the best N are found by taking,
again and again, the path that adds most (on a tree that is the optimum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachewarmd.traffic import Node, Traffic

MIN_COUNT = 2.0


@dataclass(frozen=True)
class Prefix:
    """One entry of a plan: a chain from its first block on, in runs that need not be joined yet."""

    group: Any
    key_runs: list[bytes]
    id_runs: list[bytes]  # empty where tokens were not kept
    num_blocks: int
    count: float  # how often its end was seen
    saving: float  # blocks × count that it adds to the entries before it

    @property
    def keys(self) -> bytes:
        return b"".join(self.key_runs)

    @property
    def ids(self) -> bytes:
        return b"".join(self.id_runs)


def choose(
    traffic: Traffic,
    now: float,
    top: int,
    min_count: float = MIN_COUNT,
    max_blocks: int | None = None,
    wanted: Callable[[Any], bool] = lambda group: True,
) -> list[Prefix]:
    """The best `top` prefixes, the best first; together at most `max_blocks` blocks.

    Only of the groups that are `wanted`.
    """
    found = [
        (saving, group, end, start)
        for group, root in traffic.roots()
        if wanted(group)
        for saving, end, start in _paths(traffic, root, now, min_count)
    ]
    found.sort(key=lambda entry: -entry[0])
    chosen: list[Prefix] = []
    room = max_blocks
    cut: set[Node] = set()  # ends of what had no room: what hangs on it has none either
    for saving, group, end, start in found:
        if len(chosen) >= top:
            break
        own = _num_blocks(traffic, _run(end, start))
        # A branch is worth nothing without the path it hangs on.
        hangs_on_cut = any(node in cut for node in _run(end, None))
        if hangs_on_cut or (room is not None and own > room):
            cut.update(_run(end, start))
            continue
        room = None if room is None else room - own
        path = _run(end, None)
        key_runs = [node.keys for node in path]
        id_runs = [node.ids for node in path]
        num_blocks = _num_blocks(traffic, path)
        count = traffic.count(end, now)
        ids = id_runs if all(id_runs) else []
        chosen.append(Prefix(group, key_runs, ids, num_blocks, count, saving))
    return chosen


def _paths(
    traffic: Traffic, root: Node, now: float, min_count: float
) -> list[tuple[float, Node, Node]]:
    """(saving, last node, the node that it hangs on) of every path, each node in one of them."""
    order = [root]
    for node in order:
        # Rounded: what was seen exactly so often counts for a little less soon after.
        often = (c for c in node.children.values() if traffic.count(c, now) + 0.5 >= min_count)
        order.extend(often)
    best: dict[Node, tuple[float, Node]] = {}  # by node: of the best path from it down
    paths = []
    for node in reversed(order):
        below = sorted(
            (best.pop(child) for child in node.children.values() if child in best),
            key=lambda entry: -entry[0],
        )
        is_root = node.parent is None
        for saving, end in below if is_root else below[1:]:
            paths.append((saving, end, node))
        if not is_root:
            saving, end = below[0] if below else (0.0, node)
            own = traffic.count(node, now) * (len(node.keys) // traffic.key_bytes)
            best[node] = (saving + own, end)
    return paths


def _run(end: Node, start: Node | None) -> list[Node]:
    """The nodes from the one after `start` (None: from the first) to `end`."""
    run = []
    node: Node | None = end
    while node is not None and node is not start and node.parent is not None:
        run.append(node)
        node = node.parent
    run.reverse()
    return run


def _num_blocks(traffic: Traffic, run: list[Node]) -> int:
    return sum(len(node.keys) for node in run) // traffic.key_bytes
