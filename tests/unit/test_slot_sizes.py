"""Slots of several sizes in one pool: who gets which extent, and that nobody starves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from cachewarmd import kv, layout
from cachewarmd.block import StampInfo
from cachewarmd.layout import EXTENT_BYTES
from tests.block_store import (
    CAPACITY,
    SLOT_BYTES,
    B,
    Chain,
    Harness,
    full,
    key_of,
    keys_of,
    make_harness,
)

SMALL_BYTES = SLOT_BYTES // 2
SMALL_CAPACITY = EXTENT_BYTES // SMALL_BYTES


@pytest.fixture
def harness() -> Iterator[Harness]:
    """Two extents, so that two slot sizes fit."""
    with make_harness(2) as made:
        yield made
        made.check()


@pytest.fixture
def three() -> Iterator[Harness]:
    """Three extents."""
    with make_harness(3) as made:
        yield made
        made.check()


def num_sealed(harness: Harness, labels: range) -> int:
    return sum(harness.is_sealed(full(label)) for label in labels)


def use(harness: Harness, path: Chain, info: StampInfo | None = None) -> None:
    """Look it up and give the lease back."""
    lease, found = harness.store.lookup(info or harness.info, keys_of(path), [])
    assert len(found) == len(path)
    harness.store.release(lease)


# -- the guaranteed extent ------------------------------------------------------------------------


def test_size_that_comes_late_gets_the_extent_with_the_fewest_leases(harness: Harness) -> None:
    """With all that hangs on it; the extent with a lease stays."""
    labels = range(2 * CAPACITY)
    for label in labels:
        harness.seal_free(full(label))
    kept, _ = harness.store.lookup(harness.info, keys_of(full(0)), [])
    kept_extent = harness.pool.extent_of(harness.block(key_of(full(0))).slot)
    small = harness.new_stamp(SMALL_BYTES)
    harness.seal_free(full(99), small)
    assert harness.pool.extent_of(harness.block(key_of(full(99))).slot) is not kept_extent
    assert harness.is_sealed(full(0))
    assert num_sealed(harness, labels) == CAPACITY
    assert harness.store.counters["evicted_other_size"] == CAPACITY
    harness.store.release(kept)


def test_no_size_in_use_is_robbed_of_its_last_extent() -> None:
    """With one extent, taken by one size, another size is refused."""
    with make_harness() as harness:
        harness.seal_free(full(1))
        lease = harness.lease(harness.new_stamp(SMALL_BYTES))
        assert harness.publish(lease, full(2)) == ([], kv.NO_SPACE)
        assert harness.is_sealed(full(1))


def test_size_that_nobody_uses_any_more_loses_even_its_last_extent() -> None:
    """Else every slot size of the past would keep 64 MiB for ever."""
    in_use = {SLOT_BYTES, SMALL_BYTES}
    with make_harness(sizes_in_use=lambda: in_use) as harness:
        harness.seal_free(full(1))
        small = harness.new_stamp(SMALL_BYTES)
        assert harness.publish(harness.lease(small), full(2)) == ([], kv.NO_SPACE)
        in_use.remove(SLOT_BYTES)
        harness.seal_free(full(2), small)
        assert not harness.is_sealed(full(1))
        harness.check()


def test_free_extent_is_kept_for_a_size_that_has_none(harness: Harness) -> None:
    """A registered size finds its extent free however busy the other one was, and leased."""
    small = harness.new_stamp(SMALL_BYTES)
    held = [harness.seal_held(full(label)) for label in range(CAPACITY)]
    assert harness.publish(harness.lease(), full(90)) == ([], kv.NO_SPACE)
    harness.seal_free(full(91), small)
    # Each has its own now, and keeps it while the other one churns.
    for label in range(100, 100 + 2 * SMALL_CAPACITY):
        harness.seal_free(full(label), small)
    assert num_sealed(harness, range(CAPACITY)) == CAPACITY
    for lease in held:
        harness.store.release(lease)


def test_only_size_in_use_may_fill_the_whole_pool(harness: Harness) -> None:
    """Nothing is kept back for sizes that nobody uses."""
    for label in range(2 * CAPACITY):
        harness.seal_free(full(label))
    assert num_sealed(harness, range(2 * CAPACITY)) == 2 * CAPACITY


def test_empty_extent_serves_any_size_again() -> None:
    """The last block that leaves gives the extent back."""
    with make_harness() as harness:
        harness.seal_free(full(1))
        harness.store.evict(lambda _: True)
        harness.seal_free(full(2), harness.new_stamp(SMALL_BYTES))
        harness.check()


# -- draining -------------------------------------------------------------------------------------


def fill_and_hold(harness: Harness) -> dict[int, int]:
    """Every slot of the pool, each under a lease; leases by label."""
    return {label: harness.seal_held(full(label)) for label in range(2 * CAPACITY)}


def test_extent_with_leases_is_waited_for(harness: Harness) -> None:
    """Refused while anything in it is leased, given as soon as nothing is; new leases can't win."""
    leases = fill_and_hold(harness)
    small = harness.new_stamp(SMALL_BYTES)
    assert harness.publish(harness.lease(small), full(99)) == ([], kv.NO_SPACE)
    draining = harness.pool.draining
    assert draining is not None
    inside = [
        label for label in leases
        if harness.pool.extent_of(harness.block(key_of(full(label))).slot) is draining
    ]  # fmt: skip
    for label in inside[:-1]:
        harness.store.release(leases[label])
    # What waits is neither leased again nor published into, so its end is in sight.
    assert harness.store.lookup(harness.info, keys_of(full(inside[-1])), [])[1] == []
    assert harness.peek(keys_of(full(inside[-1]))) == 0
    assert harness.publish(harness.lease(), full(inside[-1])) == ([], kv.NO_SPACE)
    assert harness.publish(harness.lease(), full(95)) == ([], kv.NO_SPACE)
    assert harness.publish(harness.lease(small), full(99)) == ([], kv.NO_SPACE)
    assert harness.is_sealed(full(inside[-1]))
    harness.check()
    harness.store.release(leases[inside[-1]])
    harness.seal_free(full(99), small)
    assert harness.pool.draining is None
    assert num_sealed(harness, range(2 * CAPACITY)) == CAPACITY


def test_draining_ends_when_another_extent_becomes_free(harness: Harness) -> None:
    """Whoever waited has that one, and the half-empty one is in service again."""
    leases = fill_and_hold(harness)
    small = harness.new_stamp(SMALL_BYTES)
    assert harness.publish(harness.lease(small), full(99)) == ([], kv.NO_SPACE)
    draining = harness.pool.draining
    for label, lease in leases.items():
        if harness.pool.extent_of(harness.block(key_of(full(label))).slot) is not draining:
            harness.store.release(lease)
    assert harness.store.evict(lambda _: True)[0] == CAPACITY
    assert harness.pool.draining is None
    harness.seal_free(full(99), small)
    assert num_sealed(harness, range(2 * CAPACITY)) == CAPACITY
    use(harness, full(next(label for label in leases if harness.is_sealed(full(label)))))


def test_draining_ends_when_the_pool_grows() -> None:
    """Pages are allocated in the background: a new extent is as good as an emptied one."""
    with make_harness(2, num_later=1) as harness:
        leases = fill_and_hold(harness)
        small = harness.new_stamp(SMALL_BYTES)
        assert harness.publish(harness.lease(small), full(99)) == ([], kv.NO_SPACE)
        assert harness.pool.draining is not None
        assert harness.pool.commit_next()
        harness.seal_free(full(99), small)
        assert harness.pool.draining is None
        for label in leases:
            use(harness, full(label))
        harness.check()


def test_draining_ends_with_the_one_it_is_for() -> None:
    """An engine that gave up must not leave the others with less room."""
    in_use = {SLOT_BYTES}
    with make_harness(2, lambda: in_use) as harness:
        leases = fill_and_hold(harness)
        in_use.add(SMALL_BYTES)
        small = harness.new_stamp(SMALL_BYTES)
        assert harness.publish(harness.lease(small), full(99)) == ([], kv.NO_SPACE)
        kept = next(
            label for label in leases
            if harness.pool.extent_of(harness.block(key_of(full(label))).slot)
            is harness.pool.draining
        )  # fmt: skip
        for label, lease in leases.items():
            if label != kept:
                harness.store.release(lease)
        in_use.remove(SMALL_BYTES)
        labels = range(100, 100 + 2 * CAPACITY - 1)
        for label in labels:
            harness.seal_free(full(label))
        assert num_sealed(harness, labels) == len(labels)
        assert harness.is_sealed(full(kept))
        harness.check()


# -- sharing what is beyond the guaranteed ones ---------------------------------------------------


def test_busy_size_gets_the_extents_that_the_other_left_cold(three: Harness) -> None:
    """A size that hoards what it no longer uses gives way, extent by extent, down to one."""
    small = three.new_stamp(SMALL_BYTES)
    three.seal_free(full(0), small)
    cold = range(100, 100 + 2 * CAPACITY)
    for label in cold:
        three.seal_free(full(label))
    warm = range(SMALL_CAPACITY + SMALL_CAPACITY)
    for _ in range(4):
        for label in warm:
            three.seal_free(full(label), small)
    assert num_sealed(three, warm) == len(warm)
    assert num_sealed(three, cold) == CAPACITY
    assert three.store.counters["evicted_other_size"] == CAPACITY


def test_size_that_is_used_keeps_its_extents(three: Harness) -> None:
    """What was used later than the other size's oldest block is not taken for it."""
    small = three.new_stamp(SMALL_BYTES)
    three.seal_free(full(0), small)
    used = range(100, 100 + 2 * CAPACITY)
    for label in used:
        three.seal_free(full(label))
    for label in range(1000, 1000 + 10 * SMALL_CAPACITY):
        three.seal_free(full(label), small)
        use(three, full(used[label % CAPACITY]))
        use(three, full(used[CAPACITY + label % CAPACITY]))
    assert num_sealed(three, used) == len(used)
    assert "evicted_other_size" not in three.store.counters


def test_size_with_nothing_to_evict_takes_what_nobody_holds(three: Harness) -> None:
    """A running request is worth more than the other size's cache, however warm that is."""
    small = three.new_stamp(SMALL_BYTES)
    held = [three.seal_held(full(label), small) for label in range(SMALL_CAPACITY)]
    for label in range(100, 100 + 2 * CAPACITY):
        three.seal_free(full(label))
    three.seal_free(full(90), small)
    assert num_sealed(three, range(100, 100 + 2 * CAPACITY)) == CAPACITY
    for lease in held:
        three.store.release(lease)


def test_extent_in_which_anything_is_held_is_not_taken(three: Harness) -> None:
    """A lease on the end of a chain keeps the extents of all its blocks, however old they are."""
    small = three.new_stamp(SMALL_BYTES)
    three.seal_free(full(0), small)
    chain = full(*range(100, 100 + 2 * CAPACITY))
    lease = three.seal_held(chain)
    for label in range(4 * SMALL_CAPACITY):
        three.seal_free(full(label), small)
    assert three.peek(keys_of(chain)) == len(chain)
    three.store.release(lease)


def test_extents_are_not_looked_at_for_every_block(
    three: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pressure a walk over them is made once for an extent's worth of blocks."""
    small = three.new_stamp(SMALL_BYTES)
    three.seal_free(full(0), small)
    hot = range(100, 100 + 2 * CAPACITY)
    for label in hot:
        three.seal_free(full(label))
    walks = 0
    others = three.store._choice._others

    def count(slot_bytes: int) -> object:
        nonlocal walks
        walks += 1
        return others(slot_bytes)

    monkeypatch.setattr(three.store._choice, "_others", count)
    num_blocks = 4 * SMALL_CAPACITY
    for label in range(1000, 1000 + num_blocks):
        for other in hot:
            use(three, full(other))
        three.seal_free(full(label), small)
    assert 1 <= walks <= 1 + num_blocks // SMALL_CAPACITY


# -- random histories -----------------------------------------------------------------------------

BLOCKS = st.tuples(st.integers(0, 2), st.sampled_from([2, B, B, B])).map(
    lambda drawn: (drawn[0],) * drawn[1]
)
PATHS: st.SearchStrategy[Chain] = st.lists(BLOCKS, min_size=1, max_size=6).map(tuple)
NUM_EXTENTS = 3
CONTENT, SMALL_CONTENT = 4096, 4097  # bytes of a block in a large and in a small slot


class TwoSizes(RuleBasedStateMachine):
    """Two slot sizes on three extents, in any order of calls.

    `comes_and_goes`: the sizes are not in use all the time, so extents get drained too.
    """

    leases: Bundle[int] = Bundle("leases")
    harness: Harness
    in_use: set[int]
    comes_and_goes: bool

    def __init__(self) -> None:
        super().__init__()
        self.in_use.clear()
        self.in_use |= {SLOT_BYTES} if self.comes_and_goes else {SLOT_BYTES, SMALL_BYTES}
        store = self.harness.store
        store.evict(lambda _: True)
        store.supersede(set())
        self.infos = [
            self.harness.new_stamp(CONTENT, b"b"),
            self.harness.new_stamp(SMALL_CONTENT, weights=b"v" * 32),
        ]
        self.held: dict[int, tuple[StampInfo, Chain]] = {}

    def path_of(self, info: StampInfo, path: Chain) -> Chain:
        """The two stamps' chains differ, as their keys do in life."""
        shift = 1000 * self.infos.index(info)
        return tuple(tuple(token + shift for token in block) for block in path)

    @rule(target=leases, number=st.integers(0, 1), path=PATHS)
    def request(self, number: int, path: Chain) -> int:
        """As an engine does it: look up, publish what is missing, keep the lease."""
        info = self.infos[number]
        path = self.path_of(info, path)
        end = next((i for i, block in enumerate(path) if len(block) < B), len(path))
        lease, found = self.harness.store.lookup(info, keys_of(path[:end]), [])
        self.held[lease] = info, path[: len(found)]
        self.publish(lease, path)
        return lease

    @rule(
        target=leases,
        number=st.integers(0, 1),
        first=st.integers(0, 60),
        count=st.integers(1, 30),
        hold=st.sampled_from([True, False, False]),
    )
    def flood(self, number: int, first: int, count: int, hold: bool) -> MultipleResults[int]:
        """Many requests of one block, at a time or one after the other."""
        info = self.infos[number]
        leases = []
        for label in range(first, first + count):
            lease = self.harness.lease(info)
            self.held[lease] = info, ()
            self.publish(lease, self.path_of(info, full(100 + label)))
            if hold:
                leases.append(lease)
            else:
                self.harness.store.release(lease)
                del self.held[lease]
        return multiple(*leases)

    def publish(self, lease: int, path: Chain) -> None:
        info, _ = self.held[lease]
        sealed, refused = self.harness.publish(lease, path)
        if sealed:
            self.held[lease] = info, path[: len(sealed)]
        if refused == kv.NO_SPACE:
            if not self.comes_and_goes:
                self.check_refusal(info)
        else:
            assert refused in ("", kv.NO_PARENT)

    def check_refusal(self, info: StampInfo) -> None:
        """Only when all of this size is held, an extent's worth at least, and no other to take."""
        own = [b for b in self.harness.store._index.values() if b.stamp is info]
        assert all(block.num_holds for block in own)
        assert len(own) >= EXTENT_BYTES // info.slot_bytes
        others = [e for e in self.harness.pool.extents if e.slot_bytes not in (0, info.slot_bytes)]
        assert len(others) == 1 or all(extent.num_held for extent in others)

    @rule(lease=consumes(leases))
    def release(self, lease: int) -> None:
        self.harness.store.release(lease)
        del self.held[lease]

    @rule(number=st.integers(0, 2))
    def supersede(self, number: int) -> None:
        weights = {info.weights_sha256 for info in self.infos[number : number + 1]}
        self.harness.store.supersede(weights)

    @rule(size=st.sampled_from([SLOT_BYTES, SMALL_BYTES]))
    def come_or_go(self, size: int) -> None:
        if self.comes_and_goes:
            self.in_use ^= {size}

    @rule(number=st.integers(0, 1), is_asked=st.sampled_from([False, False, False, True]))
    def evict(self, number: int, is_asked: bool) -> None:
        if is_asked:
            self.harness.store.evict(lambda stamp: stamp is self.infos[number])

    @invariant()
    def sound(self) -> None:
        """Memory and index agree, and what is leased is there with its own bytes."""
        self.harness.check()
        for info, path in self.held.values():
            assert all(self.harness.block(key).stamp is info for key in keys_of(path))

    @invariant()
    def guaranteed(self) -> None:
        """A size that was in use all the time has an extent, or one is free for it."""
        num_extents_of = self.harness.pool.num_extents_of
        waiting = [info for info in self.infos if not num_extents_of[info.slot_bytes]]
        assert self.comes_and_goes or self.harness.pool.num_free >= len(waiting)

    def teardown(self) -> None:
        """Everything can be given back, and then each size can publish."""
        for lease in self.held:
            self.harness.store.release(lease)
        for info in self.infos:
            self.harness.seal_free(self.path_of(info, full(5000)), info)
        self.harness.store.evict(lambda _: True)
        assert self.harness.pool.num_free == NUM_EXTENTS


@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_random_histories_of_two_sizes_starve_nobody(
    comes_and_goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leased blocks never go, each size in use has its extent, and all adds up."""
    # Few large slots with little in each: copying would take most of the time.
    sizes = {CONTENT: SLOT_BYTES, SMALL_CONTENT: SMALL_BYTES}
    monkeypatch.setattr(layout, "round_slot_bytes", lambda size: sizes.get(size, size))
    in_use = {SLOT_BYTES, SMALL_BYTES}
    with make_harness(NUM_EXTENTS, lambda: in_use) as harness:

        class OnThisPool(TwoSizes):
            pass

        OnThisPool.harness, OnThisPool.in_use = harness, in_use
        OnThisPool.comes_and_goes = comes_and_goes
        run_state_machine_as_test(
            OnThisPool,
            settings=settings(
                max_examples=25,
                stateful_step_count=40,
                deadline=None,
                # Shrinking a failure takes minutes here; add Phase.shrink when there is one.
                phases=[Phase.reuse, Phase.generate],
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
