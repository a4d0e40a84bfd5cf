"""What a client holds by its leases, and weights whose blocks nobody shall find any more."""

from __future__ import annotations

import random

import pytest

from cachewarmd.holding import Holding
from cachewarmd.kv import CLIENT_LIMIT, RETIRED
from tests.block_store import CAPACITY, SLOT_BYTES, WEIGHTS, Chain, Harness, full, keys_of
from tests.block_store import make_harness as harness


def lookup(store: Harness, path: Chain, holding: Holding) -> tuple[int, int]:
    """(lease, number of blocks found)."""
    lease, blocks = store.store.lookup(store.info, keys_of(path), [], None, holding)
    return lease, len(blocks)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_counted_is_what_the_leases_keep(seed: int) -> None:
    """Whatever leases come and go, under limits, retirement and poison; checked at every step."""
    chance = random.Random(seed)
    limits: list[int | None] = [None, 3 * SLOT_BYTES]
    holdings = [Holding(lambda n=n: limits[n]) for n in range(2)]
    with harness() as made:
        store, leases = made.store, []
        for _ in range(300):
            holding = chance.choice(holdings)
            path = full(*(chance.randrange(2) for _ in range(chance.randint(1, 4))))
            match chance.randrange(6):
                case 0 | 1:
                    leases.append(lookup(made, path, holding)[0])
                case 2:
                    lease = lookup(made, (), holding)[0]
                    assert made.publish(lease, path)[1] in ("", "NO_SPACE", CLIENT_LIMIT, RETIRED)
                    leases.append(lease)
                case 3 if leases:
                    store.release(leases.pop(chance.randrange(len(leases))))
                case 4 if store._index and chance.random() < 0.2:
                    store.poison(chance.choice(list(store._index.values())), "scrub")
                case 5 if chance.random() < 0.2:
                    store.retire({WEIGHTS})
                    made.check()
                    store.revive(WEIGHTS)
            made.check()
            assert holdings[1].num_bytes <= 3 * SLOT_BYTES
        for lease in leases:
            store.release(lease)
        assert [holding.num_bytes for holding in holdings] == [0, 0]


def test_a_lookup_gives_what_there_is_room_for_and_counts_nothing_twice() -> None:
    """A chain's head is held once, by however many leases; the limit may move at any time."""
    limit = [4 * SLOT_BYTES]
    holding = Holding(lambda: limit[0])
    with harness() as made:
        made.seal_free(full(1, 2, 3))
        made.seal_free(full(1, 2, 4, 5))
        first, found = lookup(made, full(1, 2, 3), holding)
        assert (found, holding.num_bytes) == (3, 3 * SLOT_BYTES)
        second, found = lookup(made, full(1, 2, 4, 5), holding)
        assert (found, holding.num_bytes) == (3, 4 * SLOT_BYTES)
        assert made.publish(second, full(1, 2, 4, 6), 3) == ([], CLIENT_LIMIT)
        limit[0] = 0
        assert lookup(made, full(1, 2, 3), holding)[1] == 3, "that is held already"
        assert lookup(made, full(1, 2, 4, 5), holding)[1] == 3
        made.store.release(first)
        made.check()


def test_retired_blocks_go_when_the_last_lease_of_them_does() -> None:
    """From the end of the chain up to where another lease keeps it; others' weights stay."""
    with harness() as made:
        other = made.new_stamp(weights=b"x" * 32)
        short, long = made.seal_held(full(1)), made.seal_held(full(1, 2, 3))
        made.seal_free(full(1, 4))
        made.seal_free(full(9), other)
        assert made.store.retire({WEIGHTS}) == 1
        assert made.peek(keys_of(full(1, 2))) == 0
        assert made.publish(made.lease(), full(7)) == ([], RETIRED)
        made.store.release(long)
        assert [made.is_sealed(full(1)), made.is_sealed(full(1, 2))] == [True, False]
        made.store.release(short)
        assert made.store.counters["evicted_retired"] == 4
        assert (made.is_sealed(full(9)), len(made.store._index)) == (True, 1)
        made.check()
        made.store.revive(WEIGHTS)
        assert made.publish(made.lease(), full(*range(CAPACITY - 1)))[1] == ""
        made.check()
