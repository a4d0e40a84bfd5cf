"""Where a request's KV lies: private blocks of its worker, shared blocks of the daemon's pool.

A table is a list of blocks in position order; block i holds positions i*B … i*B + B - 1.

    position   0 …        B …        2B …       3B …
    table    [ shared ] [ shared ] [ shared* ] [ private ]
               read in place         * a short tail: copied to a private block before a write

Requests of one worker whose tokens begin alike share full private blocks by reference; a block is
written to by one table only, because only positions behind the common ones are.

Plain data and numpy; no torch, no clock, no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class OutOfBlocksError(Exception):
    """The private pool has no free block."""


class PrivatePool:
    """Blocks of one worker. A block is free again when tables and publishes have let go of it."""

    def __init__(self, memory: Bytes, block_bytes: int) -> None:
        """`memory` [n * block_bytes] is writable and stays the caller's."""
        self.block_bytes = block_bytes
        self.num_blocks = len(memory) // block_bytes
        self._memory = memory
        self._references = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> PrivateBlock:
        """A zeroed block with one reference. Raises OutOfBlocksError.

        Zeroed, so that no published block carries another request's leftovers.
        """
        if not self._free:
            raise OutOfBlocksError
        number = self._free.pop()
        self._references[number] = 1
        block = PrivateBlock(self, number)
        block.memory.fill(0)
        return block

    def hold(self, block: PrivateBlock) -> None:
        """One more reference: a publish that is under way, or another table."""
        assert self._references[block.number] > 0, "hold of a free block"
        self._references[block.number] += 1

    def drop(self, block: PrivateBlock) -> None:
        """One reference less."""
        assert self._references[block.number] > 0, "drop of a free block"
        self._references[block.number] -= 1
        if not self._references[block.number]:
            self._free.append(block.number)

    def memory_of(self, number: int) -> Bytes:
        return self._memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def check_invariants(self) -> None:
        """Every block is free or referenced, never both. Raises AssertionError."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        referenced = sum(1 for count in self._references if count)
        assert all(count >= 0 for count in self._references), "a negative reference count"
        assert referenced + len(self._free) == self.num_blocks, "a block is lost"
        assert not any(self._references[number] for number in self._free), "a free block is in use"


@dataclass(frozen=True, eq=False)
class PrivateBlock:
    """Writable by this worker."""

    pool: PrivatePool
    number: int

    @property
    def memory(self) -> Bytes:
        return self.pool.memory_of(self.number)

    @property
    def offset(self) -> int:
        """Of its first byte in the private pool."""
        return self.number * self.pool.block_bytes


@dataclass(frozen=True, eq=False)
class SharedBlock:
    """Sealed, leased, read-only: the first `num_tokens` positions hold KV."""

    memory: Bytes
    slot: int
    generation: int
    num_tokens: int


Block = PrivateBlock | SharedBlock


class BlockTable:
    """One request's blocks; counts what had to be copied.

    `memories` and `addresses` are where the bytes of `blocks` lie, kept beside them because every
    step needs all of them.
    """

    def __init__(self, pool: PrivatePool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.blocks: list[Block] = []
        self.memories: list[Bytes] = []
        self.addresses = array("Q")
        self.num_shared = 0
        self.num_tail_copies = 0

    @property
    def shared_blocks(self) -> list[SharedBlock]:
        return [block for block in self.blocks if isinstance(block, SharedBlock)]

    def start_with(self, shared: Sequence[SharedBlock]) -> None:
        """Begin with a leased prefix."""
        assert not self.blocks, "the table is in use"
        for block in shared:
            self._append(block)

    def alias(self, num_positions: int) -> None:
        """All positions in one private block, for a run whose results nobody reads.

        Raises OutOfBlocksError.
        """
        block = self._pool.allocate()
        self._append(block)
        while len(self.blocks) * self.block_size < num_positions:
            self._pool.hold(block)
            self._append(block)

    def fork(self, other: BlockTable, num_positions: int) -> int:
        """Go on, behind the own blocks, with private ones of `other` that hold the same tokens.

        Full blocks are shared by reference, the short rest up to `num_positions` is copied. Stops
        at a shared block, which is under the other's lease. Returns the positions covered.
        """
        if self.blocks and isinstance(last := self.blocks[-1], SharedBlock):
            start = (len(self.blocks) - 1) * self.block_size
            if last.num_tokens < self.block_size:
                source = other.blocks[len(self.blocks) - 1]
                if not isinstance(source, PrivateBlock) or not self._pool.num_free:
                    return start + last.num_tokens
                self._pop()  # the other's block holds more
                self.num_shared -= 1
        while (index := len(self.blocks)) < num_positions // self.block_size:
            block = other.blocks[index]
            if not isinstance(block, PrivateBlock):
                return index * self.block_size
            self._pool.hold(block)
            self._append(block)
        covered = len(self.blocks) * self.block_size
        if covered >= num_positions or not self._pool.num_free:
            return min(covered, num_positions)
        tail = other.blocks[len(self.blocks)]
        if not isinstance(tail, PrivateBlock):
            return covered
        copy = self._pool.allocate()
        copy.memory[:] = tail.memory
        self._append(copy)
        return num_positions

    def num_needed(self, start: int, end: int) -> int:
        """Private blocks that `make_writable` would allocate."""
        if start >= end:
            return 0
        first, last = start // self.block_size, (end - 1) // self.block_size
        new = max(0, last + 1 - max(first, len(self.blocks)))
        known = range(first, min(last + 1, len(self.blocks)))
        return new + sum(1 for i in known if isinstance(self.blocks[i], SharedBlock))

    def make_writable(self, start: int, end: int) -> list[SharedBlock]:
        """Positions start … end-1 get private blocks. Raises OutOfBlocksError.

        Blocks before stay as they are; a short shared tail that is written to is copied first.
        Returns what was copied from: those bytes were read too.
        """
        copied: list[SharedBlock] = []
        if start >= end:
            return copied
        for index in range(start // self.block_size, (end - 1) // self.block_size + 1):
            if index == len(self.blocks):
                self._append(self._pool.allocate())
                continue
            block = self.blocks[index]
            if isinstance(block, SharedBlock):
                private = self._pool.allocate()
                private.memory[:] = block.memory
                self._put(index, private)
                self.num_tail_copies += 1
                self.num_shared -= 1
                copied.append(block)
        return copied

    def replace(self, index: int, private: PrivateBlock, shared: SharedBlock) -> None:
        """The published block takes the private one's place, if that is still there."""
        if index < len(self.blocks) and self.blocks[index] is private:
            self._put(index, shared)
            self.num_shared += 1
            self._pool.drop(private)

    def clear(self) -> None:
        """Let go of everything."""
        for block in self.blocks:
            if isinstance(block, PrivateBlock):
                self._pool.drop(block)
        self.blocks, self.memories, self.num_shared = [], [], 0
        self.addresses = array("Q")

    def _append(self, block: Block) -> None:
        self.blocks.append(block)
        self.memories.append(block.memory)
        self.addresses.append(_address(block.memory))
        self.num_shared += isinstance(block, SharedBlock)

    def _put(self, index: int, block: Block) -> None:
        self.blocks[index], self.memories[index] = block, block.memory
        self.addresses[index] = _address(block.memory)

    def _pop(self) -> None:
        del self.blocks[-1], self.memories[-1], self.addresses[-1]


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])
