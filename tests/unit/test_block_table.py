"""Private and shared blocks of a request."""

from __future__ import annotations

import numpy as np
import pytest

from engine.block_table import (
    BlockTable,
    OutOfBlocksError,
    PrivateBlock,
    PrivatePool,
    SharedBlock,
)

SIZE = 4  # tokens
BYTES = 8


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
