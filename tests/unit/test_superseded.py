"""Blocks and names of weights that newer ones have taken the place of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachewarmd import versions
from cachewarmd.versions import Versions
from tests.block_store import (
    CAPACITY,
    SLOT_BYTES,
    WEIGHTS,
    Harness,
    full,
    key_of,
    keys_of,
    make_harness,
)

NEW_WEIGHTS = b"n" * 32
ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


@pytest.fixture
def harness() -> Iterator[Harness]:
    """One extent: eight slots."""
    with make_harness() as made:
        yield made
        made.check()


# -- names ----------------------------------------------------------------------------------------


def test_new_weights_supersede_the_old_ones_of_the_name() -> None:
    """Each version is superseded by the next, and a rollback makes the old one current again."""
    known = Versions()
    known.serve("m", ONE)
    assert not known.superseded
    known.serve("m", TWO)
    known.serve("m", THREE)
    assert known.superseded == {ONE, TWO}
    known.serve("m", ONE)
    assert known.superseded == {TWO, THREE}
    assert known.is_current(ONE)
    assert known.of("m") == {ONE, TWO, THREE}


def test_weights_that_another_name_stands_for_are_not_superseded() -> None:
    """One name has moved on, the other still serves them."""
    known = Versions()
    known.serve("prod", ONE)
    known.serve("canary", ONE)
    known.serve("prod", TWO)
    assert not known.superseded
    known.serve("canary", THREE)
    assert known.superseded == {ONE}


def test_weights_without_a_name_supersede_nothing() -> None:
    """Nothing tells that they belong together."""
    known = Versions()
    known.serve("", ONE)
    known.serve("", TWO)
    assert not known.superseded
    assert not known.is_current(TWO)


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that invents names makes the daemon forget the one served longest ago."""
    monkeypatch.setattr(versions, "MAX_NAMES", 2)
    known = Versions()
    for name, digest in (("a", ONE), ("b", ONE), ("a", TWO), ("c", THREE)):
        known.serve(name, digest)
    assert known.of("b") == set()
    assert known.of("a") == {ONE, TWO}
    assert known.is_current(THREE)


# -- blocks ---------------------------------------------------------------------------------------


def test_superseded_blocks_go_before_short_and_older_ones(harness: Harness) -> None:
    """Even the youngest of them goes before the oldest block of the weights in service."""
    new = harness.new_stamp(weights=NEW_WEIGHTS)
    for label in range(CAPACITY - 3):
        harness.seal_free(full(label), new)
    harness.seal_free(((90, 90),), new)
    harness.seal_free(full(100))
    harness.seal_free(full(101))
    harness.store.supersede({WEIGHTS})
    for label in (50, 51):
        harness.seal_free(full(label), new)
    assert not harness.is_sealed(full(100))
    assert not harness.is_sealed(full(101))
    assert harness.is_sealed(((90, 90),))
    assert all(harness.is_sealed(full(label)) for label in range(CAPACITY - 3))
    assert harness.store.counters["evicted_superseded"] == 2
    assert "evicted_pressure" not in harness.store.counters
    harness.seal_free(full(52), new)
    assert not harness.is_sealed(((90, 90),))
    assert harness.store.counters["evicted_pressure"] == 1


def test_superseded_blocks_stay_and_hit_while_there_is_room(harness: Harness) -> None:
    """For a rollback: superseding alone takes nothing away."""
    harness.seal_free(full(1, 2))
    harness.store.supersede({WEIGHTS})
    lease, found = harness.store.lookup(harness.info, keys_of(full(1, 2)), [])
    assert [block.key for block in found] == keys_of(full(1, 2))
    assert harness.store.is_superseded(harness.info)
    harness.store.release(lease)


def test_leased_superseded_blocks_never_go(harness: Harness) -> None:
    """A draining engine still reads them; what it holds can't be evicted, nor its ancestors."""
    new = harness.new_stamp(weights=NEW_WEIGHTS)
    lease = harness.seal_held(full(1, 2))
    harness.store.supersede({WEIGHTS})
    for label in range(10, 10 + 2 * CAPACITY):
        harness.seal_free(full(label), new)
    assert harness.peek(keys_of(full(1, 2))) == 2
    harness.store.release(lease)
    harness.seal_free(full(90), new)
    assert harness.peek(keys_of(full(1, 2))) == 1


def test_rollback_restores_the_order(harness: Harness) -> None:
    """The old weights are current again: the newer version's blocks go first now."""
    new = harness.new_stamp(weights=NEW_WEIGHTS)
    for label in range(CAPACITY // 2):
        harness.seal_free(full(label))
        harness.seal_free(full(50 + label), new)
    harness.store.supersede({WEIGHTS})
    harness.store.supersede({NEW_WEIGHTS})
    assert not harness.store.is_superseded(harness.info)
    for label in range(CAPACITY // 2):
        harness.seal_free(full(20 + label))
    assert all(harness.is_sealed(full(label)) for label in range(CAPACITY // 2))
    assert not any(harness.is_sealed(full(50 + label)) for label in range(CAPACITY // 2))


def test_stamp_of_superseded_weights_is_superseded_from_its_registration(harness: Harness) -> None:
    """An engine of the old version that comes back late does not push out the new one."""
    harness.store.supersede({NEW_WEIGHTS})
    late = harness.new_stamp(weights=NEW_WEIGHTS)
    assert harness.store.is_superseded(late)
    for label in range(CAPACITY - 1):
        harness.seal_free(full(label))
    harness.seal_free(full(90), late)
    harness.seal_free(full(91))
    assert not harness.is_sealed(full(90))


def test_chain_of_superseded_blocks_goes_from_its_end(harness: Harness) -> None:
    """Prefix-closed like any other eviction."""
    new = harness.new_stamp(weights=NEW_WEIGHTS)
    harness.seal_free(full(*range(CAPACITY)))
    harness.store.supersede({WEIGHTS})
    harness.seal_free(full(90, 91, 92), new)
    assert harness.peek(keys_of(full(*range(CAPACITY)))) == CAPACITY - 3


def test_extent_of_superseded_blocks_goes_to_another_slot_size_first() -> None:
    """A new version with another layout takes the old one's room before it drops its own."""
    with make_harness(3) as harness:
        new = harness.new_stamp(SLOT_BYTES // 2, weights=NEW_WEIGHTS)
        harness.seal_free(full(0), new)
        for label in range(100, 100 + 2 * CAPACITY):
            harness.seal_free(full(label))
        for label in range(1, 2 * CAPACITY):
            harness.seal_free(full(label), new)
        # Its one extent is full now and its own blocks are the oldest of all.
        for label in range(100, 100 + 2 * CAPACITY):
            lease, _ = harness.store.lookup(harness.info, [key_of(full(label))], [])
            harness.store.release(lease)
        harness.store.supersede({WEIGHTS})
        for label in range(2 * CAPACITY, 4 * CAPACITY):
            harness.seal_free(full(label), new)
        assert all(harness.is_sealed(full(label)) for label in range(4 * CAPACITY))
        assert harness.store.counters["evicted_superseded"] == CAPACITY
        harness.check()
