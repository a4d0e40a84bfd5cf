"""A chaos client: the engine's own code over the pool; a block's bytes follow from its key.

    python -m tests.chaos.client SOCKET STATS SEED [--no-check] [--pause S]

It looks up random chains, reads what it leased at every step, computes and publishes the rest, and
compares every byte that it read and was told is intact. What it sees stands in a mapped file of
counters, so that it survives its own death by SIGKILL.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from cachewarmd import failpoints
from cachewarmd.client import create_private_pool
from cachewarmd.keys import block_key
from cachewarmd.v1 import control_pb2 as pb
from engine.block_table import BlockTable, OutOfBlocksError, PrivatePool, SharedBlock
from engine.daemon_link import DaemonLink
from engine.shared_cache import CachedPrefix, SharedCache

B = 4  # tokens of a full block
BLOCK_BYTES = 512 << 10
NUM_PRIVATE = 64
MAX_LIVE = 6
MAX_DEPTH = 8
NUM_BRANCHES = 5  # at each depth: chains share their beginnings, and the pool is too small for all
STAMP = b"chaos".ljust(32, b"!")
COUNTERS = ("reads", "wrong", "stale", "lost", "published", "reattached", "hits")


class Stats:
    """Counters in a file that others map; `path` is made when it is missing."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, 8 * len(COUNTERS))
            self._values = np.frombuffer(mmap.mmap(fd, 8 * len(COUNTERS)), "<u8")
        finally:
            os.close(fd)

    def add(self, name: str, count: int = 1) -> None:
        self._values[COUNTERS.index(name)] += count

    def __getitem__(self, name: str) -> int:
        return int(self._values[COUNTERS.index(name)])


def content(key: bytes) -> npt.NDArray[np.uint64]:
    """What the block of that key holds: no word of it stands anywhere else."""
    words = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    start = hashlib.sha256(key).digest()[:8]
    return words + np.uint64(int.from_bytes(start, "little"))


@dataclass(eq=False)
class Request:
    """A chain that is being read and made longer; what `SharedCache` needs of a sequence."""

    tokens: list[int]
    table: BlockTable
    root: bytes
    num_computed: int = 0
    prefix: CachedPrefix | None = None
    steps_left: int = 0


class ChaosClient:
    """The loop. `checks` = compare generations, as a worker must."""

    def __init__(self, socket: Path, stats: Stats, seed: int, *, checks: bool) -> None:
        self._chance = random.Random(seed)
        self._stats = stats
        self._checks = checks
        size = NUM_PRIVATE * BLOCK_BYTES
        fd, memory = create_private_pool(size)
        self._pool = PrivatePool(memory, BLOCK_BYTES)
        self._link = DaemonLink(socket, (fd, size), lambda: None)
        self._link.start(pb.Register(stamp=STAMP, slot_bytes=BLOCK_BYTES, block_size=B), None)
        self.cache = SharedCache(self._link, self._pool, B, lambda: None)
        self._live: list[Request] = []
        self._root = b""

    def step(self) -> None:
        """One turn: the daemon's answers, a request more or less, one of them a block further."""
        self.cache.poll()
        link = self._link.current
        if link is not None:
            self._root = link.root()
        if self._root and len(self._live) < MAX_LIVE and self._chance.random() < 0.5:
            self._begin()
        if self._live:
            self._advance(self._chance.choice(self._live))
        time.sleep(self._chance.uniform(0, 0.004))

    def close(self) -> None:
        """Give everything back."""
        for request in list(self._live):
            self._end(request)
        self.cache.close()

    def _begin(self) -> None:
        depth = self._chance.randint(1, MAX_DEPTH)
        tokens = [
            100 * level + branch
            for level in range(depth)
            for branch in [self._chance.randrange(NUM_BRANCHES)] * B
        ]
        tokens = tokens[: len(tokens) - self._chance.choice([0, 0, 0, 1, 2])]
        request = Request(tokens, BlockTable(self._pool, B), self._root)
        request.steps_left = self._chance.randint(1, 30)
        lookup = self.cache.ask(tokens, 0.5, 0.5)
        found = None if lookup is None else self.cache.answer(lookup, is_waiting=True)
        request.prefix, shared = found or (None, [])
        request.table.start_with(shared)
        if request.prefix is not None:
            request.num_computed = request.prefix.num_tokens
            request.root = request.prefix.root
            self._stats.add("hits", len(shared))
        self._live.append(request)

    def _advance(self, request: Request) -> None:
        if not self._read(request):
            return
        request.steps_left -= 1
        if request.num_computed < len(request.tokens):
            self._compute(request)
        elif request.steps_left <= 0:
            self._end(request)

    def _compute(self, request: Request) -> None:
        start = request.num_computed
        end = min((start // B + 1) * B, len(request.tokens))
        try:
            copied = request.table.make_writable(start, end)
        except OutOfBlocksError:
            self._end(request)
            return
        del copied  # its bytes are not used: the whole block is written
        request.num_computed = end
        index = start // B
        request.table.memories[index].view(np.uint64)[:] = content(self._key(request, index))
        if request.prefix is not None:
            before = request.prefix.num_sealed_blocks
            self.cache.publish(request, request.prefix, with_tail=True)  # type: ignore[arg-type]
            self._stats.add("published", max(0, request.prefix.num_sealed_blocks - before))

    def _key(self, request: Request, index: int) -> bytes:
        key = request.root
        for number in range(index + 1):
            end = min((number + 1) * B, request.num_computed)
            key = block_key(key, request.tokens[number * B : end])
        return key

    def _read(self, request: Request) -> bool:
        """Every byte of every block; False = it had to be given up."""
        wrong = 0
        for index, block in enumerate(request.table.blocks):
            key = self._key(request, index)
            if isinstance(block, SharedBlock) and block.num_tokens < B:
                key = self._short_key(request, index, block.num_tokens)
            wrong += not np.array_equal(block.memory.view(np.uint64), content(key))
        self._stats.add("reads")
        prefix, shared = request.prefix, request.table.shared_blocks
        if prefix is not None and self._checks and not self.cache.is_intact(prefix, shared):
            self._stats.add("stale")
            self._end(request)
            return False
        self._stats.add("wrong", wrong)
        return True

    def _short_key(self, request: Request, index: int, num_tokens: int) -> bytes:
        parent = self._key(request, index - 1) if index else request.root
        return block_key(parent, request.tokens[index * B : index * B + num_tokens])

    def _end(self, request: Request) -> None:
        self._live.remove(request)
        if request.prefix is not None:
            self.cache.release(request.prefix)
        request.table.clear()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("stats", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--no-check", action="store_true", help="the planted bug")
    parser.add_argument("--pause", type=float, default=0.0, help="before a daemon is told, seconds")
    flags = parser.parse_args()
    failpoints.arm(os.environ)
    stats = Stats(flags.stats)

    def count(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "reattached":
            stats.add("reattached", event["leases"])
            stats.add("lost", event["lost"])
        raise structlog.DropEvent

    structlog.configure(processors=[count])
    is_over = False

    def stop(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, stop)
    client = ChaosClient(flags.socket, stats, flags.seed, checks=not flags.no_check)
    if flags.pause:
        follow = client.cache._follow_daemon
        told = {"at": 0.0}

        def follow_late() -> None:
            link = client.cache._link.current
            if link is not None and link is not client.cache._followed:
                told["at"] = told["at"] or time.monotonic() + flags.pause
                if time.monotonic() < told["at"]:
                    return
                told["at"] = 0.0
            follow()

        client.cache._follow_daemon = follow_late  # type: ignore[method-assign]
    while not is_over:
        client.step()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
