"""A minimal engine worker for tests: a private pool, a stamp, and the data-plane calls.

Blocks are `BLOCK_BYTES` long and begin with their own key, so that a test can tell what it reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cachewarmd import protocol
from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, private_pool

BLOCK_BYTES = 1 << 20
ROOT = b"r" * 32


def key(label: str) -> bytes:
    """A key that no real chain has: the label, padded."""
    return label.encode().ljust(32, b"\0")


@dataclass(frozen=True)
class Found:
    """What a lookup gave."""

    lease: int
    blocks: list[pb.Block]

    @classmethod
    def of(cls, reply: pb.LookupReply) -> Found:
        return cls(
            reply.lease,
            [
                pb.Block(slot=slot, num_tokens=num_tokens, generation=generation, offset=offset)
                for slot, num_tokens, generation, offset in protocol.blocks_of(reply)
            ],
        )


class Worker:
    """One worker's connection, with its stamp registered."""

    def __init__(self, client: Client, pool_fd: int, weights_sha256: bytes = b"w" * 32) -> None:
        self.client = client
        self.pool_fd = pool_fd
        register = pb.Register(
            stamp=b"stamp".ljust(32, b"!"),
            slot_bytes=BLOCK_BYTES,
            block_size=4,
            description="test stamp",
            weights_sha256=weights_sha256,
        )
        reply = self.call(pb.Envelope(register=register))
        self.stamp_id = reply.register_reply.stamp_id

    def call(self, envelope: pb.Envelope) -> pb.Envelope:
        return self.client.call(envelope, PATIENCE_S)[0]

    def lookup(self, *labels: str) -> Found:
        """Longest sealed prefix of the chain, leased."""
        lookup = pb.Lookup(stamp_id=self.stamp_id, keys=b"".join(map(key, labels)))
        return Found.of(self.call(pb.Envelope(lookup=lookup)).lookup_reply)

    def publish(self, lease: int, *labels: str) -> pb.PublishReply:
        """A chain from the root on."""
        chain = []
        parent = ROOT
        for number, label in enumerate(labels):
            os.pwrite(self.pool_fd, key(label), number * BLOCK_BYTES)
            chain.append(
                pb.PublishBlock(
                    parent_key=parent,
                    key=key(label),
                    num_tokens=4,
                    private_offset=number * BLOCK_BYTES,
                )
            )
            parent = key(label)
        publish = pb.Publish(lease=lease, chain=chain, is_root=True)
        return self.call(pb.Envelope(publish=publish)).publish_reply

    def release(self, lease: int) -> None:
        self.call(pb.Envelope(release=pb.Release(lease=lease)))

    def read(self, block: pb.Block) -> bytes:
        """The key that the block begins with, from the shared pool."""
        assert self.client.pool is not None
        return bytes(self.client.pool.memory[block.offset : block.offset + 32])


@contextlib.contextmanager
def connect_worker(socket: Path, num_blocks: int = 8) -> Iterator[Worker]:
    """A worker; its connection is closed at the end, though this process lives on."""
    size = num_blocks * BLOCK_BYTES
    with (
        private_pool(size) as fd,
        Client.connect(
            socket, pb.ROLE_ENGINE, "worker", private_pool=(fd, size), timeout=PATIENCE_S
        ) as client,
    ):
        yield Worker(client, fd)
