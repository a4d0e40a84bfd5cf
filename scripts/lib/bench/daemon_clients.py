"""Clients of cachewarmd for the modes that measure it, and a crowd of them in a process of its own.

    python -m scripts.lib.bench.daemon_clients SOCKET NUM_CONNECTIONS NUM_BUSY

says `ready` on stdout once all are connected and ends with its stdin. Busy ones look up and release
NUM_KEYS keys every PAUSE_S; the others say nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachewarmd.client import Client, create_private_pool
from cachewarmd.keys import chain_keys, root_key
from cachewarmd.protocol import close_all
from cachewarmd.v1 import control_pb2 as pb
from scripts.lib.bench.errors import BenchError

TIMEOUT_S = 30.0
NUM_KEYS = 64
PAUSE_S = 0.010
BLOCK_SIZE = 16  # tokens
_SMALL_BYTES = 4096


class BlockClient:
    """A worker's connection with one stamp; all calls raise CachewarmError."""

    def __init__(self, client: Client, name: str, block_bytes: int) -> None:
        self._client = client
        self.block_bytes = block_bytes
        stamp = hashlib.sha256(name.encode()).digest()
        request = pb.Register(
            stamp=stamp, slot_bytes=block_bytes, block_size=BLOCK_SIZE, description=f"bench {name}"
        )
        self.stamp_id = self._call(pb.Envelope(register=request)).register_reply.stamp_id
        self._root = root_key(client.hello.salt, stamp)

    def _call(self, envelope: pb.Envelope) -> pb.Envelope:
        return self._client.call(envelope, TIMEOUT_S)[0]

    def chain(self, name: int, count: int) -> list[bytes]:
        """Keys of a chain from the root on; another one for each name."""
        return chain_keys(self._root, [name] * (BLOCK_SIZE * count), BLOCK_SIZE)

    def lookup(self, keys: Sequence[bytes]) -> pb.LookupReply:
        """Longest sealed prefix, leased."""
        request = pb.Lookup(stamp_id=self.stamp_id, keys=b"".join(keys))
        return self._call(pb.Envelope(lookup=request)).lookup_reply

    def release(self, lease: int) -> None:
        self._call(pb.Envelope(release=pb.Release(lease=lease)))

    def publish(self, lease: int, keys: Sequence[bytes], offset: int = 0) -> None:
        """A chain from the root on, every block with the bytes at `offset` of the private pool."""
        parents = [self._root, *keys]
        chain = [
            pb.PublishBlock(
                parent_key=parent, key=key, num_tokens=BLOCK_SIZE, private_offset=offset
            )
            for parent, key in zip(parents, keys, strict=False)
        ]
        request = pb.Publish(lease=lease, chain=chain, is_root=True)
        reply = self._call(pb.Envelope(publish=request)).publish_reply
        if reply.refused:
            raise BenchError(f"cachewarmd refused a publish: {reply.refused}")


@contextlib.contextmanager
def connect(socket: Path, pool_bytes: int = _SMALL_BYTES) -> Iterator[Client]:
    """As a worker connects, with a private pool of so many bytes, all of them written once."""
    fd, memory = create_private_pool(pool_bytes)
    memory[:] = 1
    try:
        with Client.connect(
            socket, pb.ROLE_ENGINE, "bench", private_pool=(fd, pool_bytes), timeout=TIMEOUT_S
        ) as client:
            yield client
    finally:
        close_all([fd])


def small_blocks(client: Client) -> BlockClient:
    """Of so few bytes that thousands are published quickly."""
    return BlockClient(client, "small", _SMALL_BYTES)


@contextlib.contextmanager
def crowd(socket: Path, num_connections: int, num_busy: int) -> Iterator[None]:
    """So many connections of another process, while `with` lasts."""
    command = [sys.executable, "-P", "-m", __spec__.name, str(socket)]
    command += [str(num_connections), str(num_busy)]
    # In a session of its own: Ctrl-C is ours to handle, and its end follows from ours.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise BenchError("the other connections could not be made")
            yield
        finally:
            process.stdin.close()


def _be_busy(client: Client, is_over: threading.Event) -> None:
    blocks = small_blocks(client)
    keys = blocks.chain(0, NUM_KEYS)
    while not is_over.wait(PAUSE_S):
        blocks.release(blocks.lookup(keys).lease)


def _main() -> None:
    socket, num_connections, num_busy = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(socket)) for _ in range(num_connections)]
        threads = [
            threading.Thread(target=_be_busy, args=(client, is_over))
            for client in clients[:num_busy]
        ]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        is_over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    _main()
