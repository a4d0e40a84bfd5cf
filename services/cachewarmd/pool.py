"""The L2 pool's memory: extents, slots of registered sizes, and the records that describe them.

Mechanism only: who may be evicted is decided in `kv`. One writer, the daemon's event loop.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from cachewarmd import layout, memory_lock, segment
from cachewarmd.errors import InvalidRequestError
from cachewarmd.failpoints import hit, may_fail
from cachewarmd.huge_pages import Huge, populate
from cachewarmd.layout import EXTENT_BYTES, RECORDS_PER_EXTENT, BlockState

_STATE_NAMES = {int(state): state.name.lower() for state in BlockState}
_AHEAD_BYTES = 16 << 20


@dataclass(eq=False)
class Extent:
    """64 MiB of the pool; all its slots have one size while it is in use (0 = free)."""

    number: int
    slot_bytes: int = 0
    free_slots: list[int] = field(default_factory=list)
    # Kept by `kv`, which chooses by them what another slot size may have:
    num_held: int = 0  # slots that a lease keeps
    last_used: int = 0  # tick; nothing in it that no lease keeps was used later
    stamp_ids: Counter[int] = field(default_factory=Counter)  # of what is sealed in it
    populated_bytes: int = 0  # up to there it is in this process's page table, or soon will be

    @property
    def num_slots(self) -> int:
        return EXTENT_BYTES // self.slot_bytes if self.slot_bytes else 0

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self.free_slots)


@dataclass(frozen=True)
class Memfds:
    """The two that make a pool, see `layout`; both outlive the daemon."""

    records: int
    pool: int


class Pool:
    """Slots in shared memory.

    `pool_bytes` is rounded down to whole extents. Extents are usable once `commit_next` has
    allocated their pages; the daemon does that in the background while it already serves.
    With `adopted` memfds, which become the pool's own, nothing is written but the epoch, and
    `recovery` says what is in the committed extents.
    Raises InvalidRequestError for a size below one extent.
    """

    def __init__(
        self, pool_bytes: int, epoch: int, salt: bytes, adopted: Memfds | None = None
    ) -> None:
        num_extents = pool_bytes // EXTENT_BYTES
        if num_extents < 1:
            raise InvalidRequestError(
                f"pool-bytes {pool_bytes} is not allowed: at least {EXTENT_BYTES} (one extent)"
            )
        self.pool_bytes = num_extents * EXTENT_BYTES
        self.num_extents = num_extents
        self.extents: list[Extent] = []
        self.huge = Huge()  # of what is committed
        self.num_locked = 0  # extents, the first ones
        self.num_extents_of: Counter[int] = Counter()  # by slot size, without the draining one
        self.draining: Extent | None = None
        # Called with what should be run in a thread soon; who sets it calls `populate_next` once.
        self.in_background: Callable[[Callable[[], None]], object] | None = None
        self._free: deque[Extent] = deque()
        # By slot size: extents that have free slots, the last one in use.
        self._open: dict[int, list[Extent]] = {}
        records_size = layout.records_bytes(num_extents)
        self.memfds = adopted or Memfds(
            segment.create_memfd("cachewarm-records", records_size),
            segment.create_memfd("cachewarm-pool", self.pool_bytes),
        )
        mapped = segment.map_memory(self.memfds.records, records_size, writable=True)
        self.shared = layout.RecordsMap.of(mapped, num_extents)
        self.header, self.records = self.shared.header, self.shared.records
        self.memory = segment.map_memory(self.memfds.pool, self.pool_bytes, writable=True)
        if adopted is None:
            self._write_header(salt)
        self.header["epoch"] = epoch

    def _write_header(self, salt: bytes) -> None:
        header = self.header
        header["header_bytes"] = layout.HEADER.itemsize
        header["format_version"] = layout.FORMAT_VERSION
        header["layout_hash"] = np.void(layout.layout_hash())
        header["num_records"] = len(self.records)
        header["extent_bytes"] = EXTENT_BYTES
        header["pool_bytes"] = self.pool_bytes
        header["salt"] = np.void(salt)
        header["pool_inode"] = os.fstat(self.memfds.pool).st_ino
        header["pool_id"] = np.void(os.urandom(16))
        # Last: a reader that sees the magic sees the rest.
        header["magic"] = np.void(layout.MAGIC)

    @property
    def pool_id(self) -> bytes:
        """Of this memory, whichever daemon serves it."""
        return bytes(self.header["pool_id"][0])

    @property
    def salt(self) -> bytes:
        return bytes(self.header["salt"][0])

    def commit_next(self, *, is_patient: bool = False) -> bool:
        """Allocate the next extent's pages (about 40 ms; thread-safe towards the event loop).

        False when all are; `is_patient` as in `segment.reserve`. Raises NoSpaceError; the pool then
        stays as large as it is.
        """
        number = len(self.extents)
        if number == self.num_extents:
            return False
        may_fail("commit.before")
        huge = segment.reserve(
            self.memfds.pool, number * EXTENT_BYTES, EXTENT_BYTES, is_patient=is_patient
        )
        self.huge = self.huge.plus(huge)
        self.header["num_committed"] = max(number + 1, int(self.header["num_committed"][0]))
        hit("commit.after")
        extent = Extent(number)
        self.extents.append(extent)
        self._free.append(extent)
        return True

    @property
    def committed(self) -> npt.NDArray[np.uint8]:
        """The bytes whose pages are there."""
        return self.memory[: len(self.extents) * EXTENT_BYTES]

    def lock_committed(self) -> str:
        """Keep what is committed from being swapped out; empty, or why not all of it is."""
        while self.num_locked < len(self.extents):
            start = self.num_locked * EXTENT_BYTES
            if why := memory_lock.lock(self.memory[start : start + EXTENT_BYTES]):
                return why
            self.num_locked += 1
        return ""

    def take_over(self, slot_bytes: int, used: Iterable[int]) -> Extent:
        """The next extent of an adopted pool, whose pages are there; 0 bytes = it is free.

        `used` are the slots that hold something, at least one unless it is free.
        """
        extent = Extent(len(self.extents), slot_bytes)
        self.extents.append(extent)
        if not slot_bytes:
            self._free.append(extent)
            return extent
        first, taken = extent.number * RECORDS_PER_EXTENT, set(used)
        slots = range(first + extent.num_slots - 1, first - 1, -1)
        extent.free_slots = [slot for slot in slots if slot not in taken]
        self._join(extent)
        return extent

    @property
    def num_free(self) -> int:
        """Extents of no size."""
        return len(self._free)

    def take_slot(self, slot_bytes: int) -> int | None:
        """A free slot in an extent of that size; None when there is none."""
        extents = self._open.get(slot_bytes)
        if not extents:
            return None
        slot = extents[-1].free_slots.pop()
        self._populate_ahead(extents[-1], slot % RECORDS_PER_EXTENT * slot_bytes)
        if not extents[-1].free_slots:
            extents.pop()
        return slot

    def open_extent(self, slot_bytes: int) -> bool:
        """Give a free extent to that size; False when none is free."""
        if not self._free:
            return False
        self.stop_draining()  # whoever waited for that has one now
        extent = self._free.popleft()
        extent.slot_bytes = slot_bytes
        first = extent.number * RECORDS_PER_EXTENT
        extent.free_slots = list(range(first + extent.num_slots - 1, first - 1, -1))
        self._join(extent)
        self.populate_next()
        return True

    def populate_next(self) -> None:
        """As `_populate_ahead`, for the extent that is opened next."""
        if self._free:
            self._populate_ahead(self._free[0], 0)

    def _populate_ahead(self, extent: Extent, start: int) -> None:
        """So that what is written behind `start` of the extent does not wait for page faults.

        Not all at once: what is mapped and not used yet counts as this process's memory.
        """
        done = max(extent.populated_bytes, start)
        if self.in_background is None or done - start > _AHEAD_BYTES // 2 or done == EXTENT_BYTES:
            return
        extent.populated_bytes = min(done + _AHEAD_BYTES, EXTENT_BYTES)
        base = extent.number * EXTENT_BYTES
        memory = self.memory[base + done : base + extent.populated_bytes]
        self.in_background(lambda: populate(memory))

    def drain(self, extent: Extent) -> None:
        """Hand out no more slots of an extent, until there is a free one: it or any other."""
        self.draining = extent
        self._leave(extent)

    def stop_draining(self) -> None:
        """Hand out its slots again. Idempotent."""
        if self.draining is not None:
            extent, self.draining = self.draining, None
            self._join(extent)

    def _join(self, extent: Extent) -> None:
        self.num_extents_of[extent.slot_bytes] += 1
        extents = self._open.setdefault(extent.slot_bytes, [])
        if extent.free_slots:
            extents.append(extent)

    def _leave(self, extent: Extent) -> None:
        self.num_extents_of[extent.slot_bytes] -= 1
        if extent in self._open[extent.slot_bytes]:
            self._open[extent.slot_bytes].remove(extent)

    def give_back(self, slot: int) -> None:
        """FREE the slot: the generation first, so that no reader can ever match it again.

        A daemon that dies between leaves a record whose check fails, which is no block either.
        """
        record = self.records[slot]
        hit("free.before")
        record["generation"] += 1
        hit("free.generation")
        record["state"] = BlockState.FREE
        self.header["change_word"] += 1
        hit("free.after")
        extent = self.extent_of(slot)
        extent.free_slots.append(slot)
        if not extent.num_used:
            self._free_extent(extent)
        elif len(extent.free_slots) == 1 and extent is not self.draining:
            self._open[extent.slot_bytes].append(extent)

    def _free_extent(self, extent: Extent) -> None:
        if extent is self.draining:
            self.draining = None
        else:
            self._leave(extent)
            self.stop_draining()
        extent.slot_bytes, extent.free_slots, extent.last_used = 0, [], 0
        self._free.append(extent)

    def sealed_slots(self, extent: Extent) -> list[int]:
        """Numbers of the extent's slots that hold a sealed block."""
        first = extent.number * RECORDS_PER_EXTENT
        states = self.records["state"][first : first + extent.num_slots]
        slots: list[int] = (first + np.flatnonzero(states == BlockState.SEALED)).tolist()
        return slots

    def extent_of(self, slot: int) -> Extent:
        return self.extents[slot // RECORDS_PER_EXTENT]

    def offset_of(self, slot: int) -> int:
        """Of the slot's first byte in the pool."""
        extent = self.extent_of(slot)
        return extent.number * EXTENT_BYTES + (slot % RECORDS_PER_EXTENT) * extent.slot_bytes

    def fill(self, slot: int, source_fd: int, source_offset: int, num_bytes: int) -> bool:
        """Copy `num_bytes` from a client's private pool into the slot; False if unreadable."""
        hit("reserve.before")
        self.records[slot]["state"] = BlockState.RESERVED
        hit("reserve.after")
        start = self.offset_of(slot)
        target = self.memory[start : start + num_bytes].data
        done = 0
        while done < num_bytes:
            try:
                got = os.preadv(source_fd, [target[done:]], source_offset + done)
            except OSError:
                got = 0
            if got == 0:
                return False
            done += got
        return True

    def seal(
        self,
        slot: int,
        key: bytes,
        parent_key: bytes,
        num_tokens: int,
        stamp_id: int,
        size: int,
        *,
        is_root: bool,
    ) -> int:
        """Write the record over the daemon's own copy; returns the slot's generation."""
        start = self.offset_of(slot)
        record = self.records[slot]
        hit("seal.before")
        record["key"] = np.void(key)
        record["parent_key"] = np.void(parent_key)
        record["num_tokens"] = num_tokens
        record["stamp_id"] = stamp_id
        record["offset"] = start
        record["num_bytes"] = size
        record["xxh3"] = np.void(self._digest(start, size))
        record["is_root"] = is_root
        record["check"] = layout.record_checks(self.records[slot : slot + 1])[0]
        hit("seal.record")
        record["state"] = BlockState.SEALED
        hit("seal.after")
        return int(record["generation"])

    def is_content_intact(self, slot: int) -> bool:
        """Does the slot still hold what was sealed?"""
        record = self.records[slot]
        return self.holds(slot, int(record["num_bytes"]), bytes(record["xxh3"]))

    def holds(self, slot: int, num_bytes: int, xxh3: bytes) -> bool:
        """Is that the digest of the slot's first `num_bytes`?"""
        return self._digest(self.offset_of(slot), num_bytes) == xxh3

    def _digest(self, start: int, size: int) -> bytes:
        return xxhash.xxh3_128_digest(self.memory[start : start + size].data)

    def usage(self) -> tuple[Counter[str], Counter[str]]:
        """Blocks and bytes by state, from the records themselves."""
        blocks = Counter(dict.fromkeys(_STATE_NAMES.values(), 0))
        sizes = Counter(blocks)
        for extent in self.extents:
            sizes["free"] += EXTENT_BYTES
            if not extent.slot_bytes:
                continue
            first = extent.number * RECORDS_PER_EXTENT
            states = self.records["state"][first : first + extent.num_slots]
            for state, name in _STATE_NAMES.items():
                count = int(np.count_nonzero(states == state))
                blocks[name] += count
                if state:
                    sizes[name] += count * extent.slot_bytes
                    sizes["free"] -= count * extent.slot_bytes
        return blocks, sizes

    def close(self) -> None:
        """Give the descriptors back; mapped memory goes with its last view."""
        os.close(self.memfds.records)
        os.close(self.memfds.pool)
