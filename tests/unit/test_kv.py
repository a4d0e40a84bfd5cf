"""The block store on a real pool: chains, leases, eviction, and the memory that readers see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from cachewarmd import kv, layout
from cachewarmd.errors import InvalidRequestError, LimitError, NotFoundError
from cachewarmd.kv import NewBlock, Source
from cachewarmd.layout import EXTENT_BYTES, BlockState
from cachewarmd.pins import Pins
from tests.block_store import (
    CAPACITY,
    ROOT,
    SLOT_BYTES,
    WEIGHTS,
    B,
    Chain,
    Harness,
    full,
    key_of,
    keys_of,
    make_harness,
)


@pytest.fixture
def harness() -> Iterator[Harness]:
    """One extent: eight slots. Invariants are checked when the test has ended."""
    with make_harness() as made:
        yield made
        made.check()


# -- publish and lookup ---------------------------------------------------------------------------


def test_published_chain_is_found_and_leased(harness: Harness) -> None:
    """A lookup gives the longest sealed prefix, in order, with what was copied."""
    harness.seal_free(full(1, 2))
    lease, found = harness.store.lookup(harness.info, keys_of(full(1, 2, 3)), [])
    assert [block.key for block in found] == keys_of(full(1, 2))
    assert [block.num_tokens for block in found] == [B, B]
    assert harness.block(key_of(full(1, 2))).num_holds == 1
    harness.store.release(lease)
    assert harness.block(key_of(full(1, 2))).num_holds == 0


def test_record_describes_the_block(harness: Harness) -> None:
    """Readers of the shared memory see state, key, parent, place and size."""
    harness.seal_free(full(1, 2))
    block = harness.block(key_of(full(1, 2)))
    record = harness.pool.records[block.slot]
    assert record["state"] == BlockState.SEALED
    assert bytes(record["key"]) == block.key
    assert bytes(record["parent_key"]) == key_of(full(1))
    assert (record["num_tokens"], record["num_bytes"]) == (B, SLOT_BYTES)
    assert record["offset"] == block.offset
    assert harness.pool.is_content_intact(block.slot)


def test_changed_content_is_noticed(harness: Harness) -> None:
    """The digest in the record is of the bytes in the pool."""
    harness.seal_free(full(1))
    block = harness.block(key_of(full(1)))
    harness.pool.memory[block.offset + 4096] ^= 1
    assert not harness.pool.is_content_intact(block.slot)


def test_miss_gives_a_lease_to_publish_under(harness: Harness) -> None:
    """A lookup that finds nothing still answers with a lease."""
    lease, found = harness.store.lookup(harness.info, keys_of(full(1)), [])
    assert found == []
    assert harness.publish(lease, full(1))[1] == ""


def test_tail_is_tried_only_when_all_full_keys_hit(harness: Harness) -> None:
    """A short block behind a missing full block is no part of the prefix."""
    harness.seal_free((*full(1), (7, 7)))
    tail = [key_of((*full(1), (7, 7)))]
    _, found = harness.store.lookup(harness.info, keys_of(full(1)), tail)
    assert [block.num_tokens for block in found] == [B, 2]
    _, found = harness.store.lookup(harness.info, keys_of(full(1, 2)), tail)
    assert [block.num_tokens for block in found] == [B]


def test_longest_tail_wins(harness: Harness) -> None:
    """Of several short blocks the first named, the longest, is taken."""
    harness.seal_free((*full(1), (7,)))
    harness.seal_free((*full(1), (7, 7)))
    tails = [key_of((*full(1), (7,) * count)) for count in (3, 2, 1)]
    _, found = harness.store.lookup(harness.info, keys_of(full(1)), tails)
    assert found[-1].num_tokens == 2


def test_existing_key_gives_the_existing_block_without_copying(harness: Harness) -> None:
    """A second publisher's bytes are not even read."""
    harness.seal_free(full(1))
    before = harness.block(key_of(full(1)))
    os.pwrite(harness.fd, b"other bytes", 0)
    chain = [NewBlock(ROOT, key_of(full(1)), B, 0)]
    sealed, refused = harness.store.publish(
        harness.lease(), chain, Source(-1, SLOT_BYTES, lambda: False), is_root=True
    )
    assert (sealed, refused) == ([before], "")


def test_key_that_stands_for_something_else_is_refused(harness: Harness) -> None:
    """Another stamp or another length under a sealed key is never answered with that block."""
    harness.seal_free(full(1))
    element = harness.element(full(1))
    lease = harness.lease(harness.new_stamp())
    source = harness.source()
    assert harness.store.publish(lease, [element], source, is_root=True) == ([], kv.MISMATCH)
    shorter = replace(element, num_tokens=B - 1)
    lease = harness.lease()
    assert harness.store.publish(lease, [shorter], source, is_root=True) == ([], kv.MISMATCH)


def test_child_without_a_sealed_parent_is_refused(harness: Harness) -> None:
    """A break in the chain seals nothing behind it."""
    lease = harness.lease()
    assert harness.publish(lease, full(1, 2), start=1) == ([], kv.NO_PARENT)
    assert not harness.is_sealed(full(1, 2))


def test_child_of_a_short_block_is_refused(harness: Harness) -> None:
    """To go on behind a short block, a longer one is published in its place."""
    lease = harness.lease()
    harness.publish(lease, ((1, 1),))
    assert harness.publish(lease, ((1, 1), (2,) * B), start=1) == ([], kv.NO_PARENT)


def test_child_of_another_stamp_is_refused(harness: Harness) -> None:
    """Chains never cross stamps."""
    harness.seal_free(full(1))
    lease = harness.lease(harness.new_stamp())
    assert harness.publish(lease, full(1, 2), start=1) == ([], kv.NO_PARENT)
    assert harness.store.lookup(harness.new_stamp(), keys_of(full(1)), [])[1] == []


def test_short_read_seals_nothing(harness: Harness) -> None:
    """A private pool that ends early leaves the slot free."""
    os.ftruncate(harness.fd, 2 * SLOT_BYTES)
    harness.source_bytes = 3 * SLOT_BYTES
    element = replace(harness.element(full(1)), private_offset=2 * SLOT_BYTES - 4096)
    got = harness.store.publish(harness.lease(), [element], harness.source(), is_root=True)
    assert got == ([], kv.SHORT_READ)
    harness.check()


def test_unreadable_source_seals_nothing(harness: Harness) -> None:
    """A descriptor that can't be read is the publisher's trouble, and costs no slot."""
    element = harness.element(full(1))
    write_only = os.open(f"/proc/self/fd/{harness.fd}", os.O_WRONLY)
    try:
        source = Source(write_only, SLOT_BYTES, lambda: True)
        got = harness.store.publish(harness.lease(), [element], source, is_root=True)
    finally:
        os.close(write_only)
    assert got == ([], kv.SHORT_READ)
    harness.check()


def test_bytes_copied_from_a_gone_peer_are_never_sealed(harness: Harness) -> None:
    """A client that closed its connection may have reused the private block meanwhile."""
    harness.is_open = False
    assert harness.publish(harness.lease(), full(1)) == ([], kv.PEER_GONE)
    assert not harness.is_sealed(full(1))
    assert harness.pool.usage()[0]["sealed"] == 0


def test_peer_that_leaves_in_the_middle_keeps_what_was_sealed_before(harness: Harness) -> None:
    """The blocks acknowledged so far stand, the one being copied does not."""
    answers = iter([True, False])
    chain = [harness.element(full(1)), harness.element(full(1, 2))]
    source = Source(harness.fd, SLOT_BYTES, lambda: next(answers))
    sealed, refused = harness.store.publish(harness.lease(), chain, source, is_root=True)
    assert ([block.key for block in sealed], refused) == (keys_of(full(1)), kv.PEER_GONE)
    # One content was in place for both, so the general check of contents does not apply here.
    harness.store.evict(lambda _: True)
    for lease in list(harness.store._leases):
        harness.store.release(lease)
    harness.store.evict(lambda _: True)


def test_requests_out_of_bounds_are_errors(harness: Harness) -> None:
    """Sizes are checked before a byte is copied; the message says what is allowed."""
    good = harness.element(full(1))
    lease = harness.lease()
    for bad in (
        replace(good, key=b"short"),
        replace(good, parent_key=b""),
        replace(good, num_tokens=0),
        replace(good, num_tokens=B + 1),
        replace(good, private_offset=1),
    ):
        with pytest.raises(InvalidRequestError):
            harness.store.publish(lease, [bad], harness.source(), is_root=True)
    with pytest.raises(NotFoundError):
        harness.store.publish(lease + 1, [good], harness.source(), is_root=True)
    with pytest.raises(NotFoundError):
        harness.store.release(lease + 1)


def test_stamp_can_not_change_its_sizes(harness: Harness) -> None:
    """Registering is idempotent; other sizes, sizes that can't be and too many are errors."""
    assert harness.store.register(b"s" * 32, SLOT_BYTES, B, "again", b"") is harness.info
    for sizes in ((SLOT_BYTES + 1, B), (SLOT_BYTES, B + 1)):
        with pytest.raises(InvalidRequestError, match="known with"):
            harness.store.register(b"s" * 32, *sizes, "test", b"")
    for block_bytes, block_size in ((0, B), (EXTENT_BYTES + 1, B), (SLOT_BYTES, 0)):
        with pytest.raises(InvalidRequestError, match="is not allowed"):
            harness.store.register(b"n" * 32, block_bytes, block_size, "test", b"")
    with pytest.raises(InvalidRequestError, match="32 bytes are expected"):
        harness.store.register(b"short", SLOT_BYTES, B, "test", b"")
    for number in range(1, kv.MAX_STAMPS):
        harness.store.register(number.to_bytes(32, "big"), SLOT_BYTES, B, "test", b"")
    with pytest.raises(LimitError):
        harness.new_stamp()


# -- eviction -------------------------------------------------------------------------------------


def test_one_lease_keeps_every_ancestor(harness: Harness) -> None:
    """Under pressure the unleased go; a lease on the last block protects its whole chain."""
    harness.seal_free(full(1, 2, 3))
    lease, _ = harness.store.lookup(harness.info, keys_of(full(1, 2, 3)), [])
    for label in range(10, 10 + 2 * CAPACITY):
        harness.seal_free(full(label))
    assert harness.peek(keys_of(full(1, 2, 3))) == 3
    harness.store.release(lease)
    for label in range(40, 40 + CAPACITY):
        harness.seal_free(full(label))
    assert harness.peek(keys_of(full(1, 2, 3))) == 0


def test_chains_are_evicted_from_their_end(harness: Harness) -> None:
    """Prefix-closed: no block goes before its children."""
    harness.seal_free(full(*range(CAPACITY)))
    harness.seal_free(full(90))
    assert harness.peek(keys_of(full(*range(CAPACITY)))) == CAPACITY - 1


def test_least_recently_used_chain_goes_first(harness: Harness) -> None:
    """A lookup counts as a use."""
    for label in range(CAPACITY):
        harness.seal_free(full(label))
    harness.store.release(harness.store.lookup(harness.info, keys_of(full(0)), [])[0])
    harness.seal_free(full(90))
    harness.seal_free(full(91))
    assert harness.is_sealed(full(0))
    assert not harness.is_sealed(full(1))
    assert not harness.is_sealed(full(2))


def test_short_blocks_go_first(harness: Harness) -> None:
    """Even the youngest short block goes before the oldest full one."""
    for label in range(CAPACITY - 1):
        harness.seal_free(full(label))
    harness.seal_free(((90, 90),))
    harness.seal_free(full(91))
    assert not harness.is_sealed(((90, 90),))
    assert harness.is_sealed(full(0))


def test_publish_is_refused_when_everything_is_leased(harness: Harness) -> None:
    """NO_SPACE, and what is leased stays."""
    lease = harness.lease()
    path = full(*range(CAPACITY + 1))
    sealed, refused = harness.publish(lease, path)
    assert (len(sealed), refused) == (CAPACITY, kv.NO_SPACE)
    assert harness.peek(keys_of(path)) == CAPACITY
    harness.store.release(lease)
    harness.seal_free(full(90))


def test_parent_is_not_evicted_for_its_own_child(harness: Harness) -> None:
    """A parent that no lease names is safe while its child is being sealed."""
    for label in range(CAPACITY):
        harness.seal_free(full(label))
    assert harness.publish(harness.lease(), full(0, 9), start=1)[1] == ""
    assert harness.peek(keys_of(full(0, 9))) == 2
    assert not harness.is_sealed(full(1))


def test_reuse_of_a_slot_shows_in_its_generation_and_the_change_word(harness: Harness) -> None:
    """A reader that still has the old handle can tell that it is void."""
    harness.seal_free(full(1))
    old = harness.block(key_of(full(1)))
    word = int(harness.pool.header["change_word"][0])
    assert harness.store.evict(lambda _: True) == (1, SLOT_BYTES, 0)
    assert harness.pool.records["generation"][old.slot] > old.generation
    assert harness.pool.header["change_word"][0] > word
    for label in range(CAPACITY):
        harness.seal_free(full(label))
    slots = {harness.block(key_of(full(label))).slot for label in range(CAPACITY)}
    assert old.slot in slots
    generations = harness.pool.records["generation"][[*slots]]
    assert harness.pool.records["generation"][old.slot] > old.generation
    assert (generations >= 1).sum() == 1


def test_evict_keeps_leased_chains_and_other_stamps(harness: Harness) -> None:
    """What is asked for goes, except leased blocks and their ancestors; counts are told."""
    harness.seal_free(full(1, 2, 3))
    harness.seal_free(full(1, 9))
    other = harness.new_stamp()
    lease = harness.lease(other)
    harness.store.publish(lease, [harness.element(full(5))], harness.source(), is_root=True)
    harness.store.release(lease)
    harness.store.lookup(harness.info, keys_of(full(1, 2)), [])
    got = harness.store.evict(lambda stamp: stamp is harness.info)
    assert got == (2, 2 * SLOT_BYTES, 2)
    assert harness.peek(keys_of(full(1, 2, 3))) == 2
    assert harness.is_sealed(full(5))


def test_eviction_order_does_not_grow_with_lookups(harness: Harness) -> None:
    """Thousands of leases without any pressure leave no trace behind."""
    for label in range(CAPACITY):
        harness.seal_free(full(label))
    for number in range(5000):
        path = full(number % CAPACITY)
        harness.store.release(harness.store.lookup(harness.info, keys_of(path), [])[0])
    assert len(harness.store._order._by_size[SLOT_BYTES].heaps[0]) < 500
    harness.seal_free(full(90))
    assert not harness.is_sealed(full(5000 % CAPACITY))


def test_usage_counts_every_slot_and_byte(harness: Harness) -> None:
    """By state, and the bytes add up to the pool."""
    harness.seal_free(full(1, 2))
    blocks, sizes = harness.pool.usage()
    assert (blocks["sealed"], blocks["free"]) == (2, CAPACITY - 2)
    assert sizes["sealed"] == 2 * SLOT_BYTES
    assert sum(sizes.values()) == harness.pool.pool_bytes
    assert harness.store.num_blocks(harness.info) == 2


# -- the checker ----------------------------------------------------------------------------------


def spoil_lease_count(harness: Harness) -> None:
    harness.block(key_of(full(1))).num_holds += 1


def spoil_children_count(harness: Harness) -> None:
    harness.block(key_of(full(1))).children.clear()


def spoil_generation(harness: Harness) -> None:
    harness.pool.records["generation"][harness.block(key_of(full(1))).slot] += 1


def spoil_state(harness: Harness) -> None:
    harness.pool.records["state"][harness.block(key_of(full(1))).slot] = BlockState.FREE


def spoil_parent(harness: Harness) -> None:
    del harness.store._index[key_of(full(1))]


def spoil_eviction_order(harness: Harness) -> None:
    harness.store._order._by_size[SLOT_BYTES].heaps[0].clear()


def spoil_slots_held(harness: Harness) -> None:
    harness.pool.extents[0].num_held += 1


def spoil_stamps_of_an_extent(harness: Harness) -> None:
    harness.pool.extents[0].stamp_ids[harness.info.stamp_id] += 1


def spoil_extents_of_a_size(harness: Harness) -> None:
    harness.pool.num_extents_of[SLOT_BYTES] += 1


def spoil_last_use(harness: Harness) -> None:
    harness.pool.extents[0].last_used = 0


def spoil_free_slots(harness: Harness) -> None:
    harness.pool.extents[0].free_slots.pop()


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_lease_count,
        spoil_children_count,
        spoil_generation,
        spoil_state,
        spoil_parent,
        spoil_eviction_order,
        spoil_slots_held,
        spoil_stamps_of_an_extent,
        spoil_extents_of_a_size,
        spoil_last_use,
        spoil_free_slots,
    ],
)
def test_invariant_check_sees_each_kind_of_damage(spoil: object) -> None:
    """The checker that other tests rely on can fail."""
    with make_harness() as harness:
        harness.seal_free(full(1, 2))
        harness.store.check_invariants()
        assert callable(spoil)
        spoil(harness)
        with pytest.raises(AssertionError):
            harness.store.check_invariants()


# -- random histories against a plain model -------------------------------------------------------


@dataclass
class ModelBlock:
    path: Chain
    used: int
    leases: int = 0

    @property
    def is_short(self) -> bool:
        return len(self.path[-1]) < B


class Model:
    """The same rules, written with plain dicts and full scans."""

    def __init__(self) -> None:
        self.blocks: dict[Chain, ModelBlock] = {}
        self.leases: dict[int, Chain | None] = {}
        self.is_superseded = False
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def move(self, lease: int, path: Chain | None) -> None:
        before = self.leases.get(lease)
        self.leases[lease] = path
        if path is not None:
            self.blocks[path].leases += 1
            self.blocks[path].used = self.tick()
        if before is not None:
            self.blocks[before].leases -= 1
            self.blocks[before].used = self.tick()

    def lookup(self, lease: int, path: Chain) -> list[Chain]:
        found = []
        for end in range(1, len(path) + 1):
            if path[:end] not in self.blocks:
                break
            found.append(path[:end])
        self.move(lease, found[-1] if found else None)
        return found

    def has_children(self, path: Chain) -> bool:
        return any(other[:-1] == path for other in self.blocks)

    def drop(self, path: Chain) -> None:
        used = self.blocks.pop(path).used
        if path[:-1]:
            parent = self.blocks[path[:-1]]
            parent.used = max(parent.used, used)

    def publish(self, lease: int, path: Chain, start: int, is_open: bool) -> tuple[int, str]:
        sealed = 0
        for end in range(start + 1, len(path) + 1):
            node, parent = path[:end], path[: end - 1]
            if node not in self.blocks:
                if parent and (parent not in self.blocks or self.blocks[parent].is_short):
                    return sealed, kv.NO_PARENT
                if len(self.blocks) == CAPACITY and not self.make_room(parent):
                    return sealed, kv.NO_SPACE
                if not is_open:
                    return sealed, kv.PEER_GONE
                self.blocks[node] = ModelBlock(node, 0)
            sealed += 1
            self.move(lease, node)
        return sealed, ""

    def make_room(self, keep: Chain) -> bool:
        free = [
            block
            for path, block in self.blocks.items()
            if not block.leases and path != keep and not self.has_children(path)
        ]
        if not free:
            return False

        def rank(block: ModelBlock) -> tuple[bool, int]:
            return not (self.is_superseded or block.is_short), block.used

        self.drop(min(free, key=rank).path)
        return True

    def evict(self) -> int:
        kept = {p[:end] for p in self.leases.values() if p for end in range(1, len(p) + 1)}
        doomed = sorted(set(self.blocks) - kept, key=len, reverse=True)
        for path in doomed:
            self.drop(path)
        return len(doomed)


BLOCKS = st.tuples(st.integers(0, 2), st.sampled_from([1, 2, B, B, B])).map(
    lambda drawn: (drawn[0],) * drawn[1]
)
PATHS: st.SearchStrategy[Chain] = st.lists(BLOCKS, min_size=1, max_size=4).map(tuple)


PIN_BLOCKS = 4


def ends(path: Chain) -> range:
    return range(1, len(path) + 1)


class RandomHistory(RuleBasedStateMachine):
    """Publishes, lookups, releases and evictions in any order: store and model agree throughout."""

    leases: Bundle[int] = Bundle("leases")
    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.pins = Pins(self.harness.store, PIN_BLOCKS * SLOT_BYTES)
        self.harness.store.supersede(set())
        self.harness.store.evict(lambda _: True)

    @rule(target=leases, path=PATHS)
    def lookup(self, path: Chain) -> int:
        """Tails can only be the last block, so a short one in the middle ends the question."""
        end = next((i for i, block in enumerate(path) if len(block) < B), len(path))
        asked = path[: end + 1]
        lease, found = self.harness.store.lookup(
            self.harness.info, keys_of(asked[:end]), keys_of(asked)[end:]
        )
        expected = self.model.lookup(lease, asked)
        assert [block.key for block in found] == [key_of(part) for part in expected]
        return lease

    @rule(lease=leases, path=PATHS, start=st.integers(0, 1), is_open=st.integers(0, 5))
    def publish(self, lease: int, path: Chain, start: int, is_open: int) -> None:
        self.harness.is_open = is_open > 0
        start = min(start, len(path) - 1)
        sealed, refused = self.harness.publish(lease, path, start)
        assert (len(sealed), refused) == self.model.publish(lease, path, start, is_open > 0)

    @rule(lease=consumes(leases))
    def release(self, lease: int) -> None:
        self.harness.store.release(lease)
        self.model.move(lease, None)
        del self.model.leases[lease]

    @rule(number=st.integers(0, CAPACITY - 1))
    def pin(self, number: int) -> None:
        """In the model it is a lease with a number below 0."""
        for path in sorted(self.model.blocks)[number : number + 1]:
            if all(self.model.leases[-pin.pin_id] != path for pin in self.pins):
                self.pin_chain(path)

    def pin_chain(self, path: Chain) -> None:
        block = self.harness.block(key_of(path))
        pinned = {p[:end] for n, p in self.model.leases.items() if n < 0 and p for end in ends(p)}
        if len(pinned | {path[:end] for end in ends(path)}) > PIN_BLOCKS:
            with pytest.raises(LimitError):
                self.pins.add(block)
            return
        made, num_bytes = self.pins.add(block)
        self.model.move(-made.pin_id, path)
        assert num_bytes == SLOT_BYTES * len({path[:end] for end in ends(path)} - pinned)

    @rule(number=st.integers(0, 3))
    def unpin(self, number: int) -> None:
        for pin in list(self.pins)[number : number + 1]:
            assert self.pins.end(lambda known, pin=pin: known is pin) == 1
            self.model.move(-pin.pin_id, None)
            del self.model.leases[-pin.pin_id]

    @rule(is_superseded=st.booleans())
    def supersede(self, is_superseded: bool) -> None:
        self.harness.store.supersede({WEIGHTS} if is_superseded else set())
        self.model.is_superseded = is_superseded

    @rule()
    def evict(self) -> None:
        assert self.harness.store.evict(lambda _: True)[0] == self.model.evict()

    @invariant()
    def agree(self) -> None:
        """Same blocks, same leases, sound memory."""
        assert set(self.harness.store._index) == set(map(key_of, self.model.blocks))
        assert self.harness.store.num_leases == len(self.model.leases)
        self.harness.check()

    def teardown(self) -> None:
        """Everything can be given back: nothing is pinned by a history that is over."""
        self.pins.end(lambda _: True)
        for lease in self.model.leases:
            if lease > 0:
                self.harness.store.release(lease)
        self.harness.store.evict(lambda _: True)
        blocks, _ = self.harness.pool.usage()
        assert sum(blocks.values()) == blocks["free"]


def test_random_histories_agree_with_a_plain_model(harness: Harness) -> None:
    """Fifty random histories of up to thirty steps; the pool is the same for all of them."""

    class OnThisPool(RandomHistory):
        pass

    OnThisPool.harness = harness
    run_state_machine_as_test(
        OnThisPool,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            # Shrinking a failure takes minutes here; add Phase.shrink when there is one.
            phases=[Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_layout_has_the_size_that_the_records_file_has(harness: Harness) -> None:
    """One record for each smallest slot, behind one page of header."""
    expected = layout.records_bytes(1)
    assert os.fstat(harness.pool.memfds.records).st_size == expected
