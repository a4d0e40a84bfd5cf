"""A daemon's pool in this process, behind what `SharedCache` uses of a connection.

It answers lookups at once unless told to be slow, publishes when told to; bytes are copied when a
publish is answered. What no lease holds can be evicted, and is overwritten then: whoever still
reads it reads something else.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cachewarmd import protocol
from cachewarmd.errors import CachewarmError, UnreachableError
from cachewarmd.v1 import control_pb2 as pb
from engine.block_table import Bytes
from engine.daemon_link import Link

ROOT = b"r" * 32

Reply = Future[tuple[pb.Envelope, list[int]]]


@dataclass
class _Slot:
    key: bytes = b""
    parent: bytes = b""
    num_tokens: int = 0
    generation: int = 0


@dataclass(eq=False)
class ScriptedDaemon:
    """One daemon with one connection; it is client and pool of a Link at once."""

    private: Bytes
    block_bytes: int
    num_slots: int = 32
    is_slow: bool = False  # lookups are answered too late
    is_lost: bool = False
    num_evicted: int = 0
    leases: dict[int, set[int]] = field(default_factory=dict)
    before: ScriptedDaemon | None = None  # it died; this one has its memory
    # Of daemons before: what their clients held, by the client id each had.
    quarantined: dict[int, set[int]] = field(default_factory=dict)
    _queue: deque[tuple[pb.Envelope, Reply]] = field(default_factory=deque)
    _num_leases: int = 0

    def __post_init__(self) -> None:
        before = self.before
        if before is None:
            self._memory = np.zeros(self.num_slots * self.block_bytes, dtype=np.uint8)
            self._slots = [_Slot() for _ in range(self.num_slots)]
            self._index: dict[bytes, int] = {}
            self.pool_id = random.randbytes(16)
            self._num_freed = [0]
        else:
            self._memory, self._slots, self._index = before._memory, before._slots, before._index
            self.pool_id, self._num_freed = before.pool_id, before._num_freed
        self.memory = self._memory[:]
        self.memory.flags.writeable = False  # as the worker's map
        epoch = before.link.epoch + 1 if before is not None else 1
        self.link = Link(self, self, 1, b"s" * 32, ROOT, epoch, 100 + epoch)  # type: ignore[arg-type]

    def succeed(self) -> ScriptedDaemon:
        """Die; whoever comes next adopts the memory and quarantines what was leased."""
        held = {self.link.client_id: set().union(*self.leases.values()), **self.quarantined}
        self.close()
        return ScriptedDaemon(
            self.private, self.block_bytes, self.num_slots, before=self, quarantined=held
        )

    # -- what SharedCache uses ------------------------------------------------------------------

    def submit(self, envelope: pb.Envelope) -> Reply:
        """As `Client.submit`."""
        if self.is_lost:
            raise UnreachableError("the connection is lost")
        future: Reply = Future()
        self._queue.append((envelope, future))
        if envelope.HasField("lookup") and not self.is_slow:
            self.answer()
        return future

    def ask(self, envelope: pb.Envelope, wait_s: float) -> Reply:
        """As `Client.ask`; what is not answered at once is not there in time."""
        return self.submit(envelope)

    def close(self) -> None:
        """As `Client.close`: leases end, and nothing that is under way is done."""
        self.is_lost = True
        self.leases.clear()
        while self._queue:
            self._queue.popleft()[1].set_exception(UnreachableError("the connection is lost"))

    def is_intact(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> bool:
        """As `SharedPool.is_intact`."""
        pairs = zip(slots.tolist(), generations.tolist(), strict=True)
        return all(self._slots[slot].generation == generation for slot, generation in pairs)

    @property
    def change_word(self) -> int:
        """As `SharedPool.change_word`."""
        return self._num_freed[0]

    # -- what a test does -----------------------------------------------------------------------

    @property
    def num_owed(self) -> int:
        return len(self._queue)

    def answer(self, limit: int | None = None) -> None:
        """The oldest messages, in order; all unless there is a limit."""
        while self._queue and limit != 0:
            envelope, future = self._queue.popleft()
            limit = None if limit is None else limit - 1
            try:
                future.set_result((self._answer(envelope), []))
            except CachewarmError as exc:
                future.set_exception(exc)

    def evict(self, chance: random.Random, share: float = 1.0) -> None:
        """Slots that no lease holds are used for something else."""
        for number in self._unleased():
            if self._slots[number].key and chance.random() < share:
                self._free(number)
                self.num_evicted += 1

    # -- calls ----------------------------------------------------------------------------------

    def _answer(self, envelope: pb.Envelope) -> pb.Envelope:
        match envelope.WhichOneof("body"):
            case "lookup":
                return pb.Envelope(lookup_reply=self._lookup(envelope.lookup))
            case "publish":
                return pb.Envelope(publish_reply=self._publish(envelope.publish))
            case "release":
                del self.leases[envelope.release.lease]
                return pb.Envelope()
            case "reattach":
                return pb.Envelope(reattach_reply=self._reattach(envelope.reattach))
        raise AssertionError(f"no data-plane call: {envelope}")

    def _lookup(self, lookup: pb.Lookup) -> pb.LookupReply:
        found = []
        keys, tail_keys = map(protocol.split_keys, (lookup.keys, lookup.tail_keys))
        for key in keys:
            if key not in self._index:
                break
            found.append(self._index[key])
        if len(found) == len(keys):
            found += [self._index[key] for key in tail_keys if key in self._index][:1]
        self._num_leases += 1
        self.leases[self._num_leases] = set(found)
        blocks = map(self._block, found)
        packed = [protocol.BLOCK.pack(b.slot, b.num_tokens, b.generation, b.offset) for b in blocks]
        return pb.LookupReply(lease=self._num_leases, blocks=b"".join(packed))

    def _reattach(self, reattach: pb.Reattach) -> pb.ReattachReply:
        reply = pb.ReattachReply()
        for claim in reattach.claims:
            block = claim.block
            found: set[int] = set()
            if claim.HasField("block"):
                slot = self._slots[block.slot]
                if slot.generation != block.generation or not slot.key:
                    reply.leases.append(0)
                    continue
                key = slot.key
                while key in self._index:  # a chain is sealed as a whole
                    found.add(self._index[key])
                    key = self._slots[self._index[key]].parent
            self._num_leases += 1
            self.leases[self._num_leases] = found
            reply.leases.append(self._num_leases)
        self.quarantined.pop(reattach.client_id, None)
        return reply

    def _publish(self, publish: pb.Publish) -> pb.PublishReply:
        reply = pb.PublishReply()
        lease = self.leases[publish.lease]
        for number, element in enumerate(publish.chain):
            is_root = publish.is_root and number == 0
            if element.parent_key not in self._index and not is_root:
                reply.refused = "NO_PARENT"
                break
            slot = self._index.get(element.key)
            if slot is None and (slot := self._seal(element)) is None:
                reply.refused = "NO_SPACE"
                break
            lease.add(slot)
            reply.blocks.append(self._block(slot))
        return reply

    def _seal(self, element: pb.PublishBlock) -> int | None:
        number = next(self._unleased(), None)
        if number is None:
            return None
        self._free(number)
        start = element.private_offset
        self._memory_of(number)[:] = self.private[start : start + self.block_bytes]
        slot = self._slots[number]
        slot.key, slot.num_tokens = element.key, element.num_tokens
        slot.parent = element.parent_key
        self._index[element.key] = number
        return number

    # -- slots ----------------------------------------------------------------------------------

    def _unleased(self) -> Iterator[int]:
        """Free ones first."""
        leased = set().union(*self.leases.values(), *self.quarantined.values())
        numbers = [number for number in range(self.num_slots) if number not in leased]
        yield from sorted(numbers, key=lambda number: bool(self._slots[number].key))

    def _free(self, number: int) -> None:
        slot = self._slots[number]
        self._index.pop(slot.key, None)
        self._num_freed[0] += 1
        self._slots[number] = _Slot(generation=slot.generation + 1)
        self._memory_of(number)[:] = 0xEE

    def _memory_of(self, number: int) -> Bytes:
        return self._memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def _block(self, number: int) -> pb.Block:
        slot = self._slots[number]
        offset = number * self.block_bytes
        return pb.Block(
            slot=number, generation=slot.generation, offset=offset, num_tokens=slot.num_tokens
        )


@dataclass
class ScriptedLink:
    """As `DaemonLink`: the daemon that is connected, if one is."""

    daemon: ScriptedDaemon | None

    @property
    def current(self) -> Link | None:
        return self.daemon.link if self.daemon is not None and not self.daemon.is_lost else None

    def close(self) -> None:
        if self.daemon is not None:
            self.daemon.close()
