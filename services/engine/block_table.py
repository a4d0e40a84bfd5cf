"""Where a request's KV lies: private blocks of its worker, shared blocks of the daemon's pool.

A table is a list of blocks in position order; block i holds positions i*B … i*B + B - 1.

    position   0 …        B …        2B …       3B …
    table    [ shared ] [ shared ] [ shared* ] [ private ]
               read in place         * a short tail: copied to a private block before a write

Plain data and numpy; no torch, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class OutOfBlocksError(Exception):
    """The private pool has no free block."""


class PrivatePool:
    """Blocks of one worker. A block is free again when table and publishes have let go of it."""

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
        """One more reference: a publish that is under way."""
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
    """One request's blocks; counts what had to be copied."""

    def __init__(self, pool: PrivatePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.blocks: list[Block] = []
        self.num_tail_copies = 0

    @property
    def shared_blocks(self) -> list[SharedBlock]:
        return [block for block in self.blocks if isinstance(block, SharedBlock)]

    def start_with(self, shared: Sequence[SharedBlock]) -> None:
        """Begin with a leased prefix."""
        assert not self.blocks, "the table is in use"
        self.blocks = list(shared)

    def make_writable(self, start: int, end: int) -> None:
        """Positions start … end-1 get private blocks. Raises OutOfBlocksError.

        Blocks before stay as they are; a short shared tail that is written to is copied first.
        """
        if start >= end:
            return
        for index in range(start // self._block_size, (end - 1) // self._block_size + 1):
            if index == len(self.blocks):
                self.blocks.append(self._pool.allocate())
                continue
            block = self.blocks[index]
            if isinstance(block, SharedBlock):
                private = self._pool.allocate()
                private.memory[:] = block.memory
                self.blocks[index] = private
                self.num_tail_copies += 1

    def replace(self, index: int, private: PrivateBlock, shared: SharedBlock) -> None:
        """The published block takes the private one's place, if that is still there."""
        if index < len(self.blocks) and self.blocks[index] is private:
            self.blocks[index] = shared
            self._pool.drop(private)

    def clear(self) -> None:
        """Let go of everything."""
        for block in self.blocks:
            if isinstance(block, PrivateBlock):
                self._pool.drop(block)
        self.blocks = []
