"""Private and shared blocks of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_table import (
    BlockTable,
    OutOfBlocksError,
    PrivateBlock,
    PrivatePool,
    SharedBlock,
)

SIZE = 4  # tokens
BYTES = 8  # of a block: two of each position


def make_pool(num_blocks: int = 4) -> PrivatePool:
    return PrivatePool(np.zeros(num_blocks * BYTES, dtype=np.uint8), BYTES)


def shared(fill: int, num_tokens: int = SIZE) -> SharedBlock:
    memory = np.full(BYTES, fill, dtype=np.uint8)
    memory.flags.writeable = False
    return SharedBlock(memory, slot=fill, generation=0, num_tokens=num_tokens)


def test_a_block_is_free_again_when_its_last_holder_lets_go() -> None:
    """A publish under way holds it beyond the table."""
    pool = make_pool()
    block = pool.allocate()
    pool.hold(block)
    assert pool.num_free == 3
    pool.drop(block)
    assert pool.num_free == 3
    pool.drop(block)
    assert pool.num_free == 4


def test_a_free_block_can_be_neither_dropped_nor_held() -> None:
    """One drop too many is loud, at once."""
    pool = make_pool()
    block = pool.allocate()
    pool.drop(block)
    with pytest.raises(AssertionError, match="drop of a free block"):
        pool.drop(block)
    with pytest.raises(AssertionError, match="hold of a free block"):
        pool.hold(block)


def test_blocks_lie_apart_and_carry_no_leftovers() -> None:
    """Each has its own bytes at its own offset; one that is used again is zeroed."""
    pool = make_pool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        block.memory.fill(number + 1)
    assert sorted(block.offset for block in blocks) == [0, BYTES, 2 * BYTES]
    assert [block.memory.tolist() for block in blocks] == [[n + 1] * BYTES for n in range(3)]
    with pytest.raises(OutOfBlocksError):
        pool.allocate()
    pool.drop(blocks[1])
    again = pool.allocate()
    assert again.offset == blocks[1].offset
    assert not again.memory.any()


def test_positions_get_blocks_as_they_are_written() -> None:
    """A block is taken when its first position is written, not before."""
    pool = make_pool()
    table = BlockTable(pool, SIZE)
    for end, num_blocks in ((1, 1), (4, 1), (5, 2), (8, 2), (12, 3)):
        table.make_writable(end - 1, end)
        assert len(table.blocks) == num_blocks
        assert pool.num_free == 4 - num_blocks
    table.make_writable(12, 12)
    assert len(table.blocks) == 3, "an empty range needs no block"
    assert table.num_tail_copies == 0


def test_full_shared_blocks_are_read_where_they_are() -> None:
    """Writing behind a whole prefix takes one new block and copies nothing."""
    pool = make_pool()
    table = BlockTable(pool, SIZE)
    prefix = [shared(1), shared(2)]
    table.start_with(prefix)
    table.make_writable(8, 9)
    assert table.blocks[:2] == prefix
    assert table.shared_blocks == prefix
    assert (pool.num_free, table.num_tail_copies) == (3, 0)


def test_a_short_tail_is_copied_once_before_it_is_written() -> None:
    """The private copy begins with the shared bytes; the shared block stays as it was."""
    pool = make_pool()
    table = BlockTable(pool, SIZE)
    tail = shared(9, num_tokens=2)
    table.start_with([shared(1), tail])
    table.make_writable(6, 7)
    copy = table.blocks[1]
    assert isinstance(copy, PrivateBlock)
    assert copy.memory.tolist() == [9] * BYTES
    copy.memory[:] = 5
    assert tail.memory.tolist() == [9] * BYTES
    table.make_writable(7, 9)
    assert table.blocks[1] is copy
    assert (table.num_tail_copies, pool.num_free) == (1, 2)


def test_a_published_block_takes_the_private_ones_place_only_while_that_is_there() -> None:
    """An acknowledgement that comes after the request has let go changes nothing."""
    pool = make_pool()
    table = BlockTable(pool, SIZE)
    table.make_writable(0, 8)
    private = table.blocks[0]
    assert isinstance(private, PrivateBlock)
    sealed = shared(3)
    table.replace(0, private, sealed)
    assert table.blocks[0] is sealed
    assert pool.num_free == 3
    table.replace(0, private, shared(4))
    assert table.blocks[0] is sealed, "replaced twice"
    table.replace(7, private, shared(4))
    table.clear()
    table.replace(0, private, sealed)
    assert (table.blocks, pool.num_free) == ([], 4)


def test_running_out_leaves_everything_countable() -> None:
    """After OutOfBlocksError the table keeps what it has, and clear gives all of it back."""
    pool = make_pool(3)
    table = BlockTable(pool, SIZE)
    table.start_with([shared(1), shared(2, num_tokens=1)])
    with pytest.raises(OutOfBlocksError):
        table.make_writable(5, 17)
    assert pool.num_free == 0
    table.clear()
    assert (pool.num_free, table.blocks) == (3, [])


def test_a_table_in_use_takes_no_other_prefix() -> None:
    """Starting twice would lose blocks."""
    table = BlockTable(make_pool(), SIZE)
    table.make_writable(0, 1)
    with pytest.raises(AssertionError, match="in use"):
        table.start_with([shared(1)])


# -- forks --------------------------------------------------------------------------------------


def fill(table: BlockTable, tokens: list[int], start: int = 0) -> None:
    """Positions from `start` on get private blocks, with these tokens written to them."""
    table.make_writable(start, len(tokens))
    for position in range(start, len(tokens)):
        place = position % SIZE
        block = table.blocks[position // SIZE]
        assert isinstance(block, PrivateBlock)
        block.memory[2 * place : 2 * place + 2] = tokens[position]


def read(table: BlockTable, num_positions: int) -> list[int]:
    """What stands in the blocks, as an executor sees them."""
    whole = np.concatenate([*table.memories, np.zeros(0, dtype=np.uint8)])
    return [int(value) for value in whole[: 2 * num_positions : 2]]


def sealed(tokens: list[int]) -> SharedBlock:
    """A shared block that holds up to SIZE tokens."""
    memory = np.zeros(BYTES, dtype=np.uint8)
    memory[: 2 * len(tokens)] = np.repeat(tokens, 2)
    memory.flags.writeable = False
    return SharedBlock(memory, slot=0, generation=0, num_tokens=len(tokens))


TOKENS = list(range(11, 25))


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    """Both go on behind, each in its own block; the full ones are free when both let go."""
    pool = make_pool(8)
    first, second = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    fill(first, TOKENS[:10])
    assert second.fork(first, 10) == 10
    assert second.blocks[:2] == first.blocks[:2]
    assert pool.num_free == 8 - 3 - 1
    fill(first, [*TOKENS[:10], 1, 2, 3], 10)
    fill(second, [*TOKENS[:10], 4, 5, 6], 10)
    assert read(first, 13) == [*TOKENS[:10], 1, 2, 3]
    assert read(second, 13) == [*TOKENS[:10], 4, 5, 6]
    first.clear()
    assert pool.num_free == 8 - 4
    assert read(second, 10) == TOKENS[:10]
    second.clear()
    assert pool.num_free == 8


def test_a_fork_stops_at_a_shared_block() -> None:
    """That one is under the other's lease, which may end first."""
    pool = make_pool(8)
    first, second = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    fill(first, TOKENS)
    block = first.blocks[1]
    assert isinstance(block, PrivateBlock)
    first.replace(1, block, sealed(TOKENS[4:8]))
    assert second.fork(first, 14) == 4
    assert (second.blocks, second.shared_blocks) == (first.blocks[:1], [])


def test_a_fork_goes_on_behind_the_own_shared_blocks() -> None:
    """What a lookup found stays; from there the other's private blocks follow."""
    pool = make_pool(8)
    first, second = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    fill(first, TOKENS)
    own = sealed(TOKENS[:4])
    second.start_with([own])
    assert second.fork(first, 13) == 13
    assert second.blocks[0] is own
    assert second.blocks[1:3] == first.blocks[1:3]
    assert second.num_shared == 1
    assert read(second, 13) == TOKENS[:13]


@pytest.mark.parametrize(("num_positions", "num_new"), [(7, 1), (8, 0), (13, 1)])
def test_a_short_shared_tail_gives_way_to_a_block_that_holds_more(
    num_positions: int, num_new: int
) -> None:
    """By reference when it is full, else as a copy."""
    pool = make_pool(8)
    first, second = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    fill(first, TOKENS)
    second.start_with([sealed(TOKENS[:4]), sealed(TOKENS[4:6])])
    assert second.fork(first, num_positions) == num_positions
    assert read(second, num_positions) == TOKENS[:num_positions]
    assert (second.num_shared, pool.num_free) == (1, 4 - num_new)


def test_a_fork_without_room_for_a_copy_takes_what_is_whole() -> None:
    """A short shared tail stays; full blocks need no room."""
    pool = make_pool(4)
    first, second, third = (BlockTable(pool, SIZE) for _ in range(3))
    fill(first, TOKENS)
    assert pool.num_free == 0
    assert second.fork(first, 14) == 12
    third.start_with([sealed(TOKENS[:4]), sealed(TOKENS[4:6])])
    assert third.fork(first, 14) == 6
    assert (third.num_shared, len(third.blocks)) == (2, 2)


# -- any sequence of operations -----------------------------------------------------------------


@dataclass
class Owner:
    """A table, and the tokens that must stand in it."""

    table: BlockTable
    tokens: list[int] = field(default_factory=list)


@dataclass
class Model:
    """Four tables of one pool that write, fork, publish and let go."""

    pool: PrivatePool
    owners: list[Owner]
    held: list[tuple[Owner, int, PrivateBlock]] = field(default_factory=list)  # publishes under way
    next_token: int = 0

    def write(self, owner: Owner, count: int) -> None:
        start, end = len(owner.tokens), len(owner.tokens) + count
        needed, free = owner.table.num_needed(start, end), self.pool.num_free
        if needed > free:
            return
        new = [(self.next_token + i) % 251 for i in range(count)]
        self.next_token += count
        owner.tokens += new
        fill(owner.table, owner.tokens, start)
        assert free - self.pool.num_free == needed, "num_needed says what is taken"
        assert owner.table.num_needed(start, end) == 0

    def fork(self, owner: Owner, other: Owner, num_found: int, num_positions: int) -> None:
        """Anew, from leased blocks of the same tokens, then from the other's private ones."""
        if owner is other:
            return
        owner.table.clear()
        num_positions = min(num_positions, len(other.tokens))
        owner.tokens = other.tokens[: min(num_found, num_positions)]
        parts = range(0, len(owner.tokens), SIZE)
        owner.table.start_with([sealed(owner.tokens[i : i + SIZE]) for i in parts])
        if num_positions > len(owner.tokens):
            covered = owner.table.fork(other.table, num_positions)
            assert len(owner.tokens) <= covered <= num_positions
            owner.tokens = other.tokens[:covered]

    def publish(self, owner: Owner, index: int) -> None:
        """A full block is on its way to the daemon."""
        full = owner.table.blocks[: len(owner.tokens) // SIZE]
        if full and isinstance(block := full[index % len(full)], PrivateBlock):
            self.pool.hold(block)
            self.held.append((owner, index % len(full), block))

    def acknowledge(self) -> None:
        """The oldest publish is sealed; its table may have let go of it meanwhile."""
        if self.held:
            owner, index, block = self.held.pop(0)
            copy = block.memory.copy()
            shared = SharedBlock(copy, slot=0, generation=0, num_tokens=SIZE)
            owner.table.replace(index, block, shared)
            self.pool.drop(block)

    def check(self) -> None:
        self.pool.check_invariants()
        counts: Counter[int] = Counter(block.number for _, _, block in self.held)
        for owner in self.owners:
            table = owner.table
            private = [block for block in table.blocks if isinstance(block, PrivateBlock)]
            counts.update(block.number for block in private)
            assert table.num_shared == len(table.shared_blocks) == len(table.blocks) - len(private)
            assert len(table.memories) == len(table.blocks)
            for memory, block in zip(table.memories, table.blocks, strict=True):
                assert (
                    memory.__array_interface__["data"] == block.memory.__array_interface__["data"]
                )
            assert len(table.blocks) == -(-len(owner.tokens) // SIZE)
            assert read(table, len(owner.tokens)) == owner.tokens, "another one's write, or stale"
        references = {n: count for n, count in enumerate(self.pool._references) if count}
        assert references == dict(counts)


steps = st.tuples(
    st.sampled_from(["write", "write", "fork", "fork", "publish", "acknowledge", "clear"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(0, 25),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40), st.integers(1, 14))
def test_whatever_tables_do_each_holds_its_own_tokens(
    operations: list[tuple[str, int, int, int, int]], num_blocks: int
) -> None:
    """Counts, memories and bytes are right after every step, and all blocks are free at the end."""
    pool = make_pool(num_blocks)
    model = Model(pool, [Owner(BlockTable(pool, SIZE)) for _ in range(4)])
    for kind, first, second, few, many in operations:
        owner, other = model.owners[first], model.owners[second]
        if kind == "write":
            model.write(owner, few)
        elif kind == "fork":
            model.fork(owner, other, few, many)
        elif kind == "publish":
            model.publish(owner, many)
        elif kind == "acknowledge":
            model.acknowledge()
        else:
            owner.table.clear()
            owner.tokens = []
        model.check()
    while model.held:
        model.acknowledge()
    for owner in model.owners:
        owner.table.clear()
    assert pool.num_free == num_blocks
