"""A block store on a real pool, for tests: chains are named by their tokens.

Content of a block is its key, so that a test can tell what it reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from cachewarmd.block import Block, StampInfo
from cachewarmd.keys import block_key
from cachewarmd.kv import BlockStore, NewBlock, Source
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.pool import Pool
from tests.daemon import private_pool

B = 4  # tokens of a full block
ROOT = b"r" * 32
WEIGHTS = b"w" * 32
# Large slots fill a pool of one extent at once; content is a tag and, for the rest, a hole.
SLOT_BYTES = 8 << 20
CAPACITY = EXTENT_BYTES // SLOT_BYTES
Chain = tuple[tuple[int, ...], ...]  # a chain: the tokens of each of its blocks


def key_of(path: Chain) -> bytes:
    """Key of the last block of a chain; the root's for an empty one."""
    key = ROOT
    for tokens in path:
        key = block_key(key, tokens)
    return key


def keys_of(path: Chain) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def full(*labels: int) -> Chain:
    """A chain of full blocks."""
    return tuple((label,) * B for label in labels)


@dataclass
class Harness:
    """A store over a pool whose extents are all committed, and a client's private pool."""

    pool: Pool
    fd: int
    store: BlockStore
    info: StampInfo
    is_open: bool = True
    source_bytes: int = SLOT_BYTES

    def new_stamp(
        self, block_bytes: int = SLOT_BYTES, name: bytes = b"o", weights: bytes = WEIGHTS
    ) -> StampInfo:
        return self.store.register(name * 32, block_bytes, B, "test", weights)

    def lease(self, info: StampInfo | None = None) -> int:
        """A lease of nothing, to publish under."""
        return self.store.lookup(info or self.info, [], [])[0]

    def publish(self, lease: int, path: Chain, start: int = 0) -> tuple[list[Block], str]:
        """Publish the blocks of `path` from number `start` on, one at a time as content differs."""
        sealed: list[Block] = []
        for index in range(start, len(path)):
            chain = [self.element(path[: index + 1])]
            blocks, refused = self.store.publish(lease, chain, self.source(), is_root=index == 0)
            sealed += blocks
            if refused:
                return sealed, refused
        return sealed, ""

    def element(self, path: Chain) -> NewBlock:
        """The last block of `path`, with its key as content."""
        key = key_of(path)
        os.pwrite(self.fd, key, 0)
        return NewBlock(key_of(path[:-1]), key, len(path[-1]), 0)

    def source(self) -> Source:
        return Source(self.fd, self.source_bytes, lambda: self.is_open)

    def seal_free(self, path: Chain, info: StampInfo | None = None) -> None:
        """Publish a chain and keep no lease on it."""
        lease = self.lease(info)
        assert self.publish(lease, path) == ([self.block(key) for key in keys_of(path)], "")
        self.store.release(lease)

    def seal_held(self, path: Chain, info: StampInfo | None = None) -> int:
        """Publish a chain; the lease that keeps it."""
        lease = self.lease(info)
        assert self.publish(lease, path)[1] == ""
        return lease

    def block(self, key: bytes) -> Block:
        return self.store._index[key]

    def peek(self, keys: list[bytes]) -> int:
        return self.store.peek(self.info, keys)

    def is_sealed(self, path: Chain) -> bool:
        return key_of(path) in self.store._index

    def check(self) -> None:
        """All invariants, and every sealed block holds its own bytes."""
        self.store.check_invariants()
        for key, block in self.store._index.items():
            assert bytes(self.pool.memory[block.offset : block.offset + 32]) == key


@contextlib.contextmanager
def make_harness(
    num_extents: int = 1,
    sizes_in_use: Callable[[], Set[int]] | None = None,
    num_later: int = 0,
    policy: str = "lru",
) -> Iterator[Harness]:
    """`num_later` more extents are part of the pool and not committed."""
    pool = Pool((num_extents + num_later) * EXTENT_BYTES, 1, b"s" * 32)
    for _ in range(num_extents):
        pool.commit_next()
    store = BlockStore(pool, sizes_in_use, policy)
    with private_pool(SLOT_BYTES) as fd, contextlib.closing(pool):
        info = store.register(b"s" * 32, SLOT_BYTES, B, "test", WEIGHTS)
        yield Harness(pool, fd, store, info)
