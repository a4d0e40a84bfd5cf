"""Which prefixes requests begin with, and how often: a bounded count of key chains.

A tree whose edges are runs of keys that were always seen together. A key names all that comes
before it, so whether a chain goes along a whole edge is one comparison, and where it leaves it is
a binary search: a lookup of thousands of keys costs microseconds.

Counts halve with every half-life. When the tree is full the leaf that was seen longest ago goes,
unless it was seen often: then it gets another turn with half its count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

MAX_BYTES = 8 << 20
HALF_LIFE_S = 24 * 3600.0
NODE_BYTES = 512  # what a node takes beside its keys and ids
_MAX_TURNS = 8  # leaves that get another turn before one has to go all the same
_OFTEN = 2.0


@dataclass(eq=False, slots=True)
class Node:
    """A run of blocks after its parent's; `ids` are their tokens, where those are kept."""

    parent: Node | None
    keys: bytes
    ids: bytes
    count: float
    seen_at: float
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return NODE_BYTES + len(self.keys) + len(self.ids)


class Traffic:
    """Counts of prefixes; `now` grows. A group (stamp, tenant …) is a tree of its own."""

    def __init__(
        self, max_bytes: int = MAX_BYTES, half_life_s: float = HALF_LIFE_S, key_bytes: int = 32
    ) -> None:
        self.num_bytes = 0
        self.key_bytes = key_bytes
        self._max_bytes = max_bytes
        self._half_life_s = half_life_s
        self._roots: dict[Hashable, Node] = {}
        self._leaves: OrderedDict[Node, Hashable] = OrderedDict()  # seen longest ago first

    def saw(self, group: Hashable, keys: bytes, now: float, ids: bytes = b"") -> None:
        """A request came with this chain; `ids` are the tokens of all its blocks, or nothing.

        A chain that would take more than a quarter of the room is counted up to there.
        """
        width = self.key_bytes
        id_width = len(ids) * width // len(keys) if keys else 0
        num_keys = min(len(keys), self._max_bytes // 4 * width // (width + id_width)) // width
        root = node = self._roots.get(group) or self._new_root(group)
        at = 0
        while at < num_keys:
            child = node.children.get(keys[at * width : (at + 1) * width])
            if child is None:
                run = keys[at * width : num_keys * width]
                child = Node(node, run, ids[at * id_width : num_keys * id_width], 1.0, now)
                self._add(group, child)
                break
            same = self._num_same(child, keys, at, num_keys)
            if same * width < len(child.keys):
                child = self._split(group, child, same)
            child.count = self.count(child, now) + 1.0
            child.seen_at = now
            if child in self._leaves:
                self._leaves.move_to_end(child)
            at += same
            node = child
        if not root.children:
            del self._roots[group]
            self.num_bytes -= root.num_bytes
        self._trim(now)

    def count(self, node: Node, now: float) -> float:
        """How often it was seen, the longer ago the less."""
        return float(node.count * 0.5 ** ((now - node.seen_at) / self._half_life_s))

    def roots(self) -> Iterator[tuple[Hashable, Node]]:
        """The trees by group."""
        yield from self._roots.items()

    @property
    def num_nodes(self) -> int:
        total, todo = 0, list(self._roots.values())
        while todo:
            children = todo.pop().children.values()
            total += len(children)
            todo += children
        return total

    def _new_root(self, group: Hashable) -> Node:
        root = self._roots[group] = Node(None, b"", b"", 0.0, 0.0)
        self.num_bytes += root.num_bytes
        return root

    def _num_same(self, child: Node, keys: bytes, at: int, num_keys: int) -> int:
        """So many keys of the edge are the chain's from `at` on; the first is."""
        width = self.key_bytes
        low, high = 1, min(len(child.keys) // width, num_keys - at)
        step = high  # most chains go along all of the edge
        while low < high:
            a, b = (step - 1) * width, (at + step - 1) * width
            if child.keys[a : a + width] == keys[b : b + width]:
                low = step
            else:
                high = step - 1
            step = (low + high + 1) // 2
        return low

    def _split(self, group: Hashable, node: Node, num_keys: int) -> Node:
        """Cut an edge in two; the upper one, which has the old one as its only child."""
        width = self.key_bytes
        border = num_keys * width
        id_border = len(node.ids) * border // len(node.keys)
        assert node.parent is not None, "a root has no keys, so it is never split"
        upper = Node(
            node.parent, node.keys[:border], node.ids[:id_border], node.count, node.seen_at
        )
        node.parent.children[upper.keys[:width]] = upper
        node.parent, node.keys, node.ids = upper, node.keys[border:], node.ids[id_border:]
        upper.children[node.keys[:width]] = node
        self.num_bytes += NODE_BYTES
        return upper

    def _add(self, group: Hashable, leaf: Node) -> None:
        assert leaf.parent is not None, "a root is no leaf"
        leaf.parent.children[leaf.keys[: self.key_bytes]] = leaf
        self._leaves.pop(leaf.parent, None)
        self._leaves[leaf] = group
        self.num_bytes += leaf.num_bytes

    def _trim(self, now: float) -> None:
        turns = 0
        while self.num_bytes > self._max_bytes and self._leaves:
            leaf, group = self._leaves.popitem(last=False)
            count = self.count(leaf, now)
            if count >= _OFTEN and turns < _MAX_TURNS:
                turns += 1
                leaf.count, leaf.seen_at = count / 2, now
                self._leaves[leaf] = group
                continue
            turns = 0
            self._drop(leaf, group)

    def _drop(self, leaf: Node, group: Hashable) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is no leaf"
        del parent.children[leaf.keys[: self.key_bytes]]
        self.num_bytes -= leaf.num_bytes
        if parent.children:
            return
        if parent.parent is not None:
            self._leaves[parent] = group
        else:
            del self._roots[group]
            self.num_bytes -= parent.num_bytes
