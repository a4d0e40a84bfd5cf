"""Eviction policies in the store: what a scan leaves, what counts as a use, ghosts."""

from __future__ import annotations

import random

import pytest

from cachewarmd.policy import MAX_GHOSTS, POLICIES, Ghosts
from tests.block_store import CAPACITY, Chain, Harness, full, keys_of, make_harness


def use(harness: Harness, path: Chain) -> int:
    """What a request does: look up, publish the rest, release; how many blocks were found?"""
    lease, found = harness.store.lookup(harness.info, keys_of(path), [])
    harness.publish(lease, path, len(found))
    harness.store.release(lease)
    return len(found)


def scan(harness: Harness, num_blocks: int) -> None:
    for number in range(num_blocks):
        use(harness, full(1000 + number))


@pytest.mark.parametrize(("policy", "num_left"), [("lru", 0), ("lru2", 2), ("arc", 2)])
def test_a_scan_leaves_what_was_used_again(
    policy: str, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-off chains of twice the pool; with lru they drive out everything."""
    monkeypatch.setattr("cachewarmd.policy.BURST_S", -1.0)  # no use is the same as the one before
    with make_harness(policy=policy) as harness:
        for _ in range(3):
            use(harness, full(1, 2))
        scan(harness, 2 * CAPACITY)
        assert harness.peek(keys_of(full(1, 2))) == num_left
        harness.check()


def test_a_lease_that_ends_is_no_second_use() -> None:
    """Under arc a chain that one request computed goes before one that two had."""
    with make_harness(policy="arc") as harness:
        use(harness, full(1))
        use(harness, full(1))
        for number in range(2, 2 + CAPACITY):
            use(harness, full(number))
        assert harness.peek(keys_of(full(1))) == 1
        assert harness.peek(keys_of(full(2))) == 0


def test_ancestors_of_what_was_used_again_were_used_again() -> None:
    """The head of a template is not left behind when its end goes."""
    with make_harness(policy="arc") as harness:
        for _ in range(2):
            use(harness, full(1, 2, 3))
        assert {block.place[0] for block in harness.store.blocks} == {1}
        harness.check()


def test_a_burst_is_one_use_for_lru2() -> None:
    """Two lookups in the same second leave the last use but one where it was."""
    policy = POLICIES["lru2"](10)
    once = policy.added(b"a", 1, 100.0)
    assert policy.touched(b"a", once, 2, 100.5) == once
    assert policy.touched(b"a", once, 3, 102.0) == (0, (1, 3))


def test_a_block_computed_again_soon_after_it_went_is_a_ghost_hit() -> None:
    """Counted once a return; what an operator evicted is not missed."""
    with make_harness() as harness:
        use(harness, full(1))
        scan(harness, CAPACITY)
        assert harness.store.counters["ghost_hits"] == 0
        use(harness, full(1))
        assert harness.store.counters["ghost_hits"] == 1
        harness.store.evict(lambda _: True)
        use(harness, full(1))
        assert harness.store.counters["ghost_hits"] == 1


def test_ghosts_are_bounded() -> None:
    """The oldest is forgotten first."""
    ghosts = Ghosts(1 << 30)
    for number in range(MAX_GHOSTS + 1):
        ghosts.add(number)
    assert not ghosts.take(0)
    assert ghosts.take(1)
    assert not ghosts.take(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_histories_keep_all_invariants(policy: str) -> None:
    """Lookups, publishes, leases that stay a while, evictions and superseded weights."""
    rng = random.Random(7)
    with make_harness(policy=policy) as harness:
        held: list[int] = []
        for step in range(600):
            path = full(*(rng.randint(0, 2) for _ in range(rng.randint(1, 4))))
            lease, found = harness.store.lookup(harness.info, keys_of(path), [])
            harness.publish(lease, path, len(found))
            held.append(lease)
            while len(held) > rng.randint(0, 2):
                harness.store.release(held.pop(rng.randrange(len(held))))
            if rng.random() < 0.02:
                harness.store.evict(lambda _: True)
            if rng.random() < 0.05:
                harness.store.supersede({b"w" * 32} if rng.random() < 0.5 else set())
            if not step % 10:
                harness.check()
        assert harness.store.counters["evicted_pressure"] > 50
        assert harness.store.counters["ghost_hits"] > 10
