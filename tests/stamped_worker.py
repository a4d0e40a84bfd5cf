"""An engine worker as far as the daemon sees one: real stamps, real keys, content to check.

A block's bytes follow from the stamp and all tokens up to its end, as KV does, and not from its
key: reading the wrong block can't go unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachewarmd.client import Client
from cachewarmd.keys import Stamp, chain_keys, root_key
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, private_pool
from tests.worker import Found


@dataclass(frozen=True)
class Kind:
    """What decides whether two engines share: a stamp, and the size of its blocks."""

    weights_sha256: bytes = b"w" * 32
    kv_dtype: str = "f32"
    block_size: int = 16
    block_bytes: int = 1 << 20

    @property
    def stamp(self) -> Stamp:
        return Stamp(
            version=self.weights_sha256.hex()[:12],
            weights_sha256=self.weights_sha256.hex(),
            config_sha256="0" * 64,
            compute_dtype="f32",
            weight_quantisation="none",
            kv_layout=f"{self.kv_dtype};bs={self.block_size}",
            numerics="test",
        )

    def content(self, tokens: Sequence[int]) -> bytes:
        """Of the block that ends with the last of these tokens."""
        seed = self.stamp.digest() + b"".join(token.to_bytes(4, "little") for token in tokens)
        return hashlib.shake_128(seed).digest(4096)


class StampedWorker:
    """One worker's connection; its private pool holds one block."""

    def __init__(self, client: Client, pool_fd: int, kind: Kind) -> None:
        self.client = client
        self.kind = kind
        self._pool_fd = pool_fd
        digest = kind.stamp.digest()
        self.root = root_key(client.hello.salt, digest)
        register = pb.Register(
            stamp=digest,
            slot_bytes=kind.block_bytes,
            block_size=kind.block_size,
            description=kind.stamp.kv_layout,
            weights_sha256=kind.weights_sha256,
        )
        self.stamp_id = self.call(register=register).register_reply.stamp_id

    def call(self, **body: Any) -> pb.Envelope:
        return self.client.call(pb.Envelope(**body), PATIENCE_S)[0]

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the full blocks of `tokens`."""
        return chain_keys(self.root, tokens, self.kind.block_size)

    def lookup(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(lease, number of blocks found); every byte found is checked."""
        lookup = pb.Lookup(stamp_id=self.stamp_id, keys=b"".join(self.keys(tokens)))
        found = Found.of(self.call(lookup=lookup).lookup_reply)
        self.check(tokens, found.blocks)
        return found.lease, len(found.blocks)

    def check(self, tokens: Sequence[int], blocks: Sequence[pb.Block]) -> None:
        """Each block in the shared pool is that of these tokens under this stamp."""
        assert self.client.pool is not None
        for number, block in enumerate(blocks):
            expected = self.kind.content(tokens[: (number + 1) * self.kind.block_size])
            start = block.offset
            assert bytes(self.client.pool.memory[start : start + len(expected)]) == expected

    def publish(self, lease: int, tokens: Sequence[int], first: int = 0) -> tuple[int, str]:
        """The full blocks of `tokens` from number `first` on: (how many were sealed, refusal)."""
        keys = [self.root, *self.keys(tokens)]
        sealed = 0
        for number in range(first, len(keys) - 1):
            end = (number + 1) * self.kind.block_size
            os.pwrite(self._pool_fd, self.kind.content(tokens[:end]), 0)
            block = pb.PublishBlock(
                parent_key=keys[number], key=keys[number + 1], num_tokens=self.kind.block_size
            )
            publish = pb.Publish(lease=lease, chain=[block], is_root=number == 0)
            reply = self.call(publish=publish).publish_reply
            if reply.refused:
                return sealed, reply.refused
            sealed += 1
        return sealed, ""

    def release(self, lease: int) -> None:
        self.call(release=pb.Release(lease=lease))

    def request(self, tokens: Sequence[int]) -> int:
        """As an engine does it: look up, publish what is missing, release; the blocks found."""
        lease, found = self.lookup(tokens)
        _, refused = self.publish(lease, tokens, found)
        assert not refused, refused
        self.release(lease)
        return found


@contextlib.contextmanager
def connect(socket: Path, kind: Kind) -> Iterator[StampedWorker]:
    """A worker; its connection is closed at the end, though this process lives on."""
    with (
        private_pool(kind.block_bytes) as fd,
        Client.connect(
            socket,
            pb.ROLE_ENGINE,
            "worker",
            private_pool=(fd, kind.block_bytes),
            timeout=PATIENCE_S,
        ) as client,
    ):
        yield StampedWorker(client, fd, kind)
