"""Pins: what they keep, for how long, within which budget, and how they end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from cachewarmd.errors import InvalidRequestError, LimitError
from cachewarmd.pins import MAX_TTL_S, Pins
from tests.block_store import CAPACITY, SLOT_BYTES, WEIGHTS, Harness, full, key_of, make_harness


@pytest.fixture
def harness() -> Iterator[Harness]:
    with make_harness() as made:
        yield made


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_pins(harness: Harness, num_blocks: int = 4) -> tuple[Pins, Clock]:
    clock = Clock()
    return Pins(harness.store, num_blocks * SLOT_BYTES, clock), clock


def flood(harness: Harness) -> None:
    """One-off blocks, twice as many as the pool has."""
    for number in range(2 * CAPACITY):
        lease = harness.lease()
        harness.publish(lease, full(1000 + number))
        harness.store.release(lease)


def test_a_flood_takes_everything_but_what_is_pinned(harness: Harness) -> None:
    """Also ancestors of a pinned block stay; once it is unpinned all of it may go."""
    pins, _ = make_pins(harness)
    harness.seal_free(full(1, 2))
    harness.seal_free(full(3))
    pin, num_bytes = pins.add(harness.block(key_of(full(1, 2))))
    assert num_bytes == pins.num_bytes == 2 * SLOT_BYTES
    flood(harness)
    assert harness.is_sealed(full(1)) and harness.is_sealed(full(1, 2))
    assert not harness.is_sealed(full(3))
    assert pins.end(lambda known: known is pin) == 1
    assert (len(pins), pins.num_bytes) == (0, 0)
    flood(harness)
    assert not harness.is_sealed(full(1))
    harness.check()


def test_common_blocks_count_once_and_the_budget_is_named(harness: Harness) -> None:
    """Two chains that begin alike; a third has no room."""
    pins, _ = make_pins(harness, 3)
    harness.seal_free(full(1, 2))
    harness.seal_free(full(1, 3))
    harness.seal_free(full(1, 4))
    pins.add(harness.block(key_of(full(1, 2))))
    assert pins.add(harness.block(key_of(full(1, 3))))[1] == SLOT_BYTES
    with pytest.raises(LimitError) as refused:
        pins.add(harness.block(key_of(full(1, 4))))
    for number in (SLOT_BYTES, pins.num_bytes, pins.max_bytes):
        assert str(number) in str(refused.value)
    assert len(pins) == 2


def test_a_pin_ends_with_its_time_and_may_be_renewed(harness: Harness) -> None:
    """The same chain and label is the same pin, with the new time."""
    pins, clock = make_pins(harness)
    harness.seal_free(full(1))
    pin, _ = pins.add(harness.block(key_of(full(1))), 10.0, "a")
    clock.now += 9
    assert pins.add(harness.block(key_of(full(1))), 10.0, "a") == (pin, 0)
    clock.now += 9
    assert pins.end_over() == 0
    clock.now += 2
    assert pins.end_over() == 1
    assert pins.num_bytes == 0


def test_what_can_not_be_a_pin_is_refused(harness: Harness) -> None:
    """Labels are short, times are finite or none."""
    pins, _ = make_pins(harness)
    harness.seal_free(full(1))
    block = harness.block(key_of(full(1)))
    for ttl_s, label in ((0.0, ""), (-1.0, ""), (MAX_TTL_S + 1, ""), (1.0, "x" * 65)):
        with pytest.raises(InvalidRequestError):
            pins.add(block, ttl_s, label)
    assert pins.add(block, math.inf)[0].pin_id == 1


def test_a_pin_of_poisoned_blocks_ends(harness: Harness) -> None:
    """Nothing is left of it, and its budget is free again."""
    pins, _ = make_pins(harness)
    harness.seal_free(full(1, 2))
    pins.add(harness.block(key_of(full(1, 2))))
    harness.store.poison(harness.block(key_of(full(1))), "scrub")
    assert pins.num_bytes == 0
    assert pins.end_over() == 1
    harness.check()


def test_retired_weights_lose_what_was_pinned_of_them(harness: Harness) -> None:
    """A pin that ends after its weights were retired leaves nothing behind."""
    pins, _ = make_pins(harness)
    harness.seal_free(full(1, 2))
    pins.add(harness.block(key_of(full(1, 2))))
    harness.store.retire({WEIGHTS})
    assert harness.is_sealed(full(1, 2))
    pins.end(lambda pin: pin.stamp.weights_sha256 == WEIGHTS)
    assert not harness.is_sealed(full(1))
    harness.check()


def test_pins_come_back_with_number_label_and_time(harness: Harness) -> None:
    """What is over, gone or beyond the budget by then is told as lost."""
    pins, clock = make_pins(harness, 4)
    for number in range(5):
        harness.seal_free(full(number))
    for number, ttl_s in enumerate((math.inf, 50.0, 5.0, math.inf)):
        pins.add(harness.block(key_of(full(number))), ttl_s, f"l{number}")
    told = pins.to_json()
    pins.end(lambda _: True)
    harness.store.evict(lambda _: True)
    for number in (0, 1, 2):
        harness.seal_free(full(number))
    clock.now += 10
    later = Pins(harness.store, 4 * SLOT_BYTES, clock)
    assert later.restore(told) == 2
    found = [(pin.pin_id, pin.label, later.seconds_left(pin)) for pin in later]
    assert found == [(1, "l0", math.inf), (2, "l1", 40.0)]
    assert later.add(harness.block(key_of(full(2))))[0].pin_id == 5


@pytest.mark.parametrize("told", [None, {}, [1], [{"pin_id": 1}], [{"key": "zz"}]])
def test_malformed_pins_are_an_error(harness: Harness, told: object) -> None:
    """Never a crash, nor half of them."""
    pins, _ = make_pins(harness)
    with pytest.raises(ValueError, match="malformed"):
        pins.restore(told)
