"""Counts of prefixes: what a naive counter says, within bounds, fading with time."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from cachewarmd.learn import choose
from cachewarmd.traffic import NODE_BYTES, Node, Traffic

WIDTH = 2


def chain(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(WIDTH, "big") for number in numbers)


def counts(traffic: Traffic, now: float = 0.0) -> dict[bytes, float]:
    """By prefix, of every block that is in the tree."""
    found = {}
    todo = [(root, b"") for _, root in traffic.roots()]
    while todo:
        node, before = todo.pop()
        for child in node.children.values():
            for end in range(WIDTH, len(child.keys) + 1, WIDTH):
                found[before + child.keys[:end]] = traffic.count(child, now)
            todo.append((child, before + child.keys))
    return found


def random_chains(seed: int, count: int) -> list[bytes]:
    """Chains over a small tree of prefix keys, as hashing them gives: a key fixes its ancestors."""
    rng = random.Random(seed)
    numbers: dict[tuple[int, ...], int] = {}
    made = []
    for _ in range(count):
        path = tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 7)))
        made.append(
            chain(*(numbers.setdefault(path[: i + 1], len(numbers)) for i in range(len(path))))
        )
    return made


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_is_counted_as_a_naive_counter_does(seed: int) -> None:
    """Splitting edges at branches and at ends of chains loses and invents nothing."""
    traffic, naive = Traffic(key_bytes=WIDTH), Counter[bytes]()
    for keys in random_chains(seed, 300):
        traffic.saw("g", keys, 0.0)
        naive.update(keys[:end] for end in range(WIDTH, len(keys) + 1, WIDTH))
    assert counts(traffic) == naive


def test_token_ids_stay_beside_their_keys_when_edges_are_split() -> None:
    """A chosen prefix has the ids of exactly its blocks."""
    traffic = Traffic(key_bytes=WIDTH)
    traffic.saw("g", chain(1, 2, 3, 4), 0.0, b"aaaabbbbccccdddd")
    traffic.saw("g", chain(1, 2, 5), 0.0, b"aaaabbbbeeee")
    (prefix,) = choose(traffic, 0.0, 10)
    assert (prefix.keys, prefix.ids) == (chain(1, 2), b"aaaabbbb")
    assert (prefix.num_blocks, prefix.count, prefix.saving) == (2, 2.0, 4.0)


def test_groups_never_mix() -> None:
    """The same keys under another stamp or tenant are counted on their own."""
    traffic = Traffic(key_bytes=WIDTH)
    traffic.saw("one", chain(1), 0.0)
    traffic.saw("two", chain(1), 0.0)
    assert choose(traffic, 0.0, 10) == []
    traffic.saw("two", chain(1), 0.0)
    assert [prefix.group for prefix in choose(traffic, 0.0, 10)] == ["two"]


def test_a_count_halves_with_every_half_life() -> None:
    """What was hot long ago is not in a plan any more."""
    traffic = Traffic(half_life_s=10.0, key_bytes=WIDTH)
    for _ in range(8):
        traffic.saw("g", chain(1), 0.0)
    assert counts(traffic, 20.0) == {chain(1): 2.0}
    assert choose(traffic, 24.0, 10), "1.5 is about 2"
    assert not choose(traffic, 25.0, 10)


def test_memory_is_bounded_and_a_flood_does_not_wash_away_what_is_often_seen() -> None:
    """One-off chains push each other out; a prefix that comes again and again stays."""
    limit = 64 * NODE_BYTES
    traffic = Traffic(limit, key_bytes=32)
    rng = random.Random(1)
    hot = rng.randbytes(32 * 20)
    for number in range(5000):
        traffic.saw("g", rng.randbytes(32 * rng.randint(1, 10)), float(number))
        if number % 20 == 0:
            traffic.saw("g", hot + rng.randbytes(32), float(number))
        assert traffic.num_bytes <= limit
    assert traffic.num_bytes == sum(map(_size, _nodes(traffic)))
    best = choose(traffic, 5000.0, 1)
    assert [prefix.keys for prefix in best] == [hot]


def test_what_was_often_seen_outlives_a_flood_that_it_has_no_part_in() -> None:
    """When its turn comes it goes on with half its count; what was seen once goes."""
    traffic = Traffic(64 * NODE_BYTES)
    for number in range(9):
        traffic.saw("g", bytes(32), float(number // 8))
        if number == 7:
            traffic.saw("g", b"once".ljust(32), 0.0)
    rng = random.Random(2)
    for _ in range(150):
        traffic.saw("g", rng.randbytes(32), 1.0)
    assert [prefix.keys for prefix in choose(traffic, 1.0, 10)] == [bytes(32)]
    kept = {node.keys for node in _nodes(traffic)}
    assert bytes(32) in kept
    assert b"once".ljust(32) not in kept


def test_a_flood_of_groups_is_bounded_too() -> None:
    """A root goes with its last leaf."""
    traffic = Traffic(64 * NODE_BYTES)
    for number in range(1000):
        traffic.saw(number, bytes(32), 0.0)
        assert traffic.num_bytes <= 64 * NODE_BYTES
    assert len(list(traffic.roots())) <= 64


def test_a_lookup_without_full_blocks_leaves_nothing() -> None:
    """There is nothing to warm in less than a block."""
    traffic = Traffic()
    traffic.saw("g", b"", 0.0)
    assert (traffic.num_bytes, list(traffic.roots())) == (0, [])


def _nodes(traffic: Traffic) -> list[Node]:
    todo = [root for _, root in traffic.roots()]
    for node in todo:
        todo.extend(node.children.values())
    return todo


def _size(node: Node) -> int:
    return node.num_bytes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("top", [1, 2, 3])
def test_the_best_prefixes_are_those_of_brute_force(seed: int, top: int) -> None:
    """No other choice of so many ends saves more, each block counted once."""
    traffic, naive = Traffic(key_bytes=WIDTH), Counter[bytes]()
    for keys in random_chains(seed, 40):
        traffic.saw("g", keys, 0.0)
        naive.update(keys[:end] for end in range(WIDTH, len(keys) + 1, WIDTH))
    often = [prefix for prefix, count in naive.items() if count >= 2]

    def saving(ends: tuple[bytes, ...]) -> int:
        covered = {end[:size] for end in ends for size in range(WIDTH, len(end) + 1, WIDTH)}
        return sum(naive[prefix] for prefix in covered)

    ends = [p for p in often if not any(q != p and q.startswith(p) for q in often)]
    best = max(map(saving, itertools.combinations(ends, min(top, len(ends)))))
    chosen = choose(traffic, 0.0, top)
    assert sum(prefix.saving for prefix in chosen) == best
    assert saving(tuple(prefix.keys for prefix in chosen)) == best


def test_what_has_no_room_is_left_out_with_what_hangs_on_it() -> None:
    """A plan for a small pool has no branch without its stem, and never more blocks than asked."""
    traffic = Traffic(key_bytes=WIDTH)
    for _ in range(3):
        traffic.saw("g", chain(*range(1, 9)), 0.0)
        traffic.saw("g", chain(1, 2, 3, 20), 0.0)
        traffic.saw("g", chain(30, 31), 0.0)
    small = choose(traffic, 0.0, 10, max_blocks=3)
    assert [prefix.keys for prefix in small] == [chain(30, 31)]
    assert sum(prefix.num_blocks for prefix in choose(traffic, 0.0, 10, max_blocks=8)) == 8
