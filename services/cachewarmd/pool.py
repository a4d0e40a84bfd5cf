"""The L2 pool's memory: extents, slots of registered sizes, and the records that describe them.

Mechanism only: who may be evicted is decided in `kv`. One writer, the daemon's event loop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import xxhash

from cachewarmd import layout, segment
from cachewarmd.errors import InvalidRequestError
from cachewarmd.layout import EXTENT_BYTES, RECORDS_PER_EXTENT, BlockState


@dataclass(eq=False)
class Extent:
    """64 MiB of the pool; all its slots have one size while it is in use (0 = free)."""

    number: int
    slot_bytes: int = 0
    free_slots: list[int] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return EXTENT_BYTES // self.slot_bytes if self.slot_bytes else 0

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self.free_slots)


class Pool:
    """Slots in shared memory.

    `pool_bytes` is rounded down to whole extents. Extents are usable once `commit_next` has
    allocated their pages; the daemon does that in the background while it already serves.
    Raises InvalidRequestError for a size below one extent.
    """

    def __init__(self, pool_bytes: int, epoch: int, salt: bytes) -> None:
        num_extents = pool_bytes // EXTENT_BYTES
        if num_extents < 1:
            raise InvalidRequestError(
                f"pool-bytes {pool_bytes} is not allowed: at least {EXTENT_BYTES} (one extent)"
            )
        self.pool_bytes = num_extents * EXTENT_BYTES
        self.num_extents = num_extents
        self.extents: list[Extent] = []
        records_size = layout.records_bytes(num_extents)
        self.records_fd = segment.create_memfd("cachewarm-records", records_size)
        self.pool_fd = segment.create_memfd("cachewarm-pool", self.pool_bytes)
        header_and_records = segment.map_memory(self.records_fd, records_size, writable=True)
        self.header = header_and_records[: layout.HEADER.itemsize].view(layout.HEADER)
        self.records = header_and_records[layout.RECORDS_OFFSET :].view(layout.RECORD)
        self.memory = segment.map_memory(self.pool_fd, self.pool_bytes, writable=True)
        self._write_header(epoch, salt)

    def _write_header(self, epoch: int, salt: bytes) -> None:
        header = self.header
        header["header_bytes"] = layout.HEADER.itemsize
        header["format_version"] = layout.FORMAT_VERSION
        header["layout_hash"] = np.void(layout.layout_hash())
        header["epoch"] = epoch
        header["num_records"] = len(self.records)
        header["extent_bytes"] = EXTENT_BYTES
        header["pool_bytes"] = self.pool_bytes
        header["salt"] = np.void(salt)
        # Last: a reader that sees the magic sees the rest.
        header["magic"] = np.void(layout.MAGIC)

    def commit_next(self) -> bool:
        """Allocate the next extent's pages (about 40 ms; thread-safe towards the event loop).

        False when all are. Raises NoSpaceError; the pool then stays as large as it is.
        """
        number = len(self.extents)
        if number == self.num_extents:
            return False
        segment.reserve(self.pool_fd, number * EXTENT_BYTES, EXTENT_BYTES)
        self.extents.append(Extent(number))
        return True

    def take_slot(self, slot_bytes: int) -> int | None:
        """A free slot of that size, opening a free extent if needed; None when there is none."""
        candidate = None
        for extent in self.extents:
            if extent.slot_bytes == slot_bytes and extent.free_slots:
                return extent.free_slots.pop()
            if extent.slot_bytes == 0 and candidate is None:
                candidate = extent
        if candidate is None:
            return None
        candidate.slot_bytes = slot_bytes
        first = candidate.number * RECORDS_PER_EXTENT
        candidate.free_slots = list(range(first + candidate.num_slots - 1, first - 1, -1))
        return candidate.free_slots.pop()

    def give_back(self, slot: int) -> None:
        """FREE the slot: state first, then the generation, so no reader can match it again."""
        record = self.records[slot]
        record["state"] = BlockState.FREE
        record["generation"] += 1
        self.header["change_word"] += 1
        extent = self.extent_of(slot)
        extent.free_slots.append(slot)
        if not extent.num_used:
            # Any slot size may have an empty extent next.
            extent.slot_bytes, extent.free_slots = 0, []

    def extent_of(self, slot: int) -> Extent:
        return self.extents[slot // RECORDS_PER_EXTENT]

    def offset_of(self, slot: int) -> int:
        """Of the slot's first byte in the pool."""
        extent = self.extent_of(slot)
        return extent.number * EXTENT_BYTES + (slot % RECORDS_PER_EXTENT) * extent.slot_bytes

    def fill(self, slot: int, source_fd: int, source_offset: int, num_bytes: int) -> bool:
        """Copy `num_bytes` from a client's private pool into the slot; False if unreadable."""
        self.records[slot]["state"] = BlockState.RESERVED
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
        self, slot: int, key: bytes, parent_key: bytes, num_tokens: int, stamp_id: int, size: int
    ) -> int:
        """Write the record over the daemon's own copy; returns the slot's generation."""
        start = self.offset_of(slot)
        record = self.records[slot]
        record["key"] = np.void(key)
        record["parent_key"] = np.void(parent_key)
        record["num_tokens"] = num_tokens
        record["stamp_id"] = stamp_id
        record["offset"] = start
        record["num_bytes"] = size
        record["xxh3"] = np.void(self._digest(start, size))
        record["state"] = BlockState.SEALED
        return int(record["generation"])

    def is_content_intact(self, slot: int) -> bool:
        """Does the slot still hold what was sealed?"""
        record = self.records[slot]
        start, size = int(record["offset"]), int(record["num_bytes"])
        return bytes(record["xxh3"]) == self._digest(start, size)

    def _digest(self, start: int, size: int) -> bytes:
        return xxhash.xxh3_128_digest(self.memory[start : start + size].data)

    def close(self) -> None:
        """Give the descriptors back; mapped memory goes with its last view."""
        os.close(self.records_fd)
        os.close(self.pool_fd)
