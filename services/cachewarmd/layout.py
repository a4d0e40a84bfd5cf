"""The ABI of the shared memory: header and block records.

Two memfds make the L2 pool. Both are written by cachewarmd only; engines map them read-only.

    records memfd                                pool memfd
    0      +---------------------------+         0        +------------------+
           | header, 256 bytes, frozen |                  | extent 0, 64 MiB |  slots of one size
    4096   +---------------------------+         64 MiB   +------------------+
           | record of slot 0, 128 B   |                  | extent 1         |
           | record of slot 1          |                  ...
           ...  RECORDS_PER_EXTENT for each extent
           +---------------------------+
           | client 0, 64 B            |   whose leases stand in the rows of the same number
           ...  MAX_CLIENTS
           +---------------------------+
           | leases of client 0, 4 B   |   slot + 1 of the chain's last block; 0 = no lease
           | leases of client 1        |
           ...  MAX_LEASES_PER_CLIENT for each client
           +---------------------------+
           | last use of slot 0, 8 B   |   2 * tick + 1 if it was used again, see `uses`
           ...
           +---------------------------+

Slot number s lies in extent s // RECORDS_PER_EXTENT, at place s % RECORDS_PER_EXTENT of it; its
bytes start at extent * EXTENT_BYTES + place * slot_bytes(extent). Slots too many for the extent's
slot size are never used, so a slot number never changes its record.

The header's first 256 bytes never change their meaning between versions: a reader can always tell
what it has before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"CWARMD\x00\x01"
FORMAT_VERSION = 2
EXTENT_BYTES = 64 << 20
PAGE_BYTES = 4096
MIN_SLOT_BYTES = 16 << 10
RECORDS_PER_EXTENT = EXTENT_BYTES // MIN_SLOT_BYTES
RECORDS_OFFSET = PAGE_BYTES
MAX_CLIENTS = 512
MAX_LEASES_PER_CLIENT = 4096


class BlockState(IntEnum):
    """State of a slot; zero so that untouched memory reads as FREE."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    QUARANTINED = 3
    POISONED = 4


HEADER = np.dtype(
    {
        "names": [
            "magic",
            "header_bytes",
            "format_version",
            "layout_hash",
            "epoch",
            "change_word",
            "num_records",
            "extent_bytes",
            "pool_bytes",
            "salt",
            "num_committed",  # extents whose pages are allocated
            "is_clean",  # the daemon ended in order; taken back by whoever adopts the pool
            "num_starts",  # since a daemon last served from it
            "pool_inode",  # of the memfd that belongs to these records
            "pool_id",  # random; tells clients whether it is still the pool they map
        ],
        "formats": ["V8", "<u4", "<u4", "V32", *["<u8"] * 5, "V32", *["<u8"] * 4, "V16"],
        "offsets": [0, 8, 12, 16, 48, 56, 64, 72, 80, 88, 120, 128, 136, 144, 152],
        "itemsize": 256,
    }
)

RECORD = np.dtype(
    {
        "names": [
            "state",  # BlockState; stored last, when a block is sealed and when it is freed
            "generation",  # grows at every reuse of the slot, never goes back; before the state
            "key",
            "parent_key",
            "num_tokens",
            "stamp_id",
            "offset",  # in the pool
            "num_bytes",
            "xxh3",  # of the daemon's own copy
            "is_root",  # has no parent block; else the parent is sealed too
            "check",  # over all but the state, see `record_checks`
        ],
        "formats": ["<u8", "<u8", "V32", "V32", "<u4", "<u4", "<u8", "<u8", "V16", "<u4", "<u4"],
        "offsets": [0, 8, 16, 48, 80, 84, 88, 96, 104, 120, 124],
        "itemsize": 128,
    }
)


CLIENT = np.dtype(
    {
        "names": ["is_used", "pid", "start_time", "client_id", "epoch"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8"],
        "offsets": [0, 4, 8, 16, 24],
        "itemsize": 64,
    }
)

_CHECK_WORDS = (RECORD.itemsize - 8) // 4  # all but the state
# Odd, so that a bit that flips anywhere changes the sum.
_CHECK_FACTORS = np.arange(1, _CHECK_WORDS, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
) | np.uint64(1)


def record_checks(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """What `check` must be, for contiguous records [n]. Against accidents, not against malice."""
    words = records.view("<u4").reshape(len(records), RECORD.itemsize // 4)[:, 2:-1]
    sums = (words.astype(np.uint64) * _CHECK_FACTORS).sum(axis=1, dtype=np.uint64)
    return ((sums >> np.uint64(32)) ^ (sums & np.uint64(0xFFFFFFFF))).astype(np.uint32)


def layout_hash() -> bytes:
    """SHA-256 over everything that decides where a byte stands; differs = do not read."""
    dtypes = [*(repr(dtype.descr) for dtype in (HEADER, RECORD, CLIENT)), "uses"]
    numbers = [EXTENT_BYTES, MIN_SLOT_BYTES, RECORDS_OFFSET, MAX_CLIENTS, MAX_LEASES_PER_CLIENT]
    return hashlib.sha256(repr([*dtypes, *numbers]).encode()).digest()


@dataclass(frozen=True)
class RecordsMap:
    """Views of a mapped records memfd; each has the writability of the map."""

    header: npt.NDArray[Any]  # HEADER [1]
    records: npt.NDArray[Any]  # RECORD [n]
    clients: npt.NDArray[Any]  # CLIENT [MAX_CLIENTS]
    leases: npt.NDArray[np.uint32]  # [MAX_CLIENTS, MAX_LEASES_PER_CLIENT]
    # [n], for the eviction order of a later daemon: nothing depends on their being right.
    uses: npt.NDArray[np.int64]

    @classmethod
    def of(cls, memory: npt.NDArray[np.uint8], num_extents: int) -> RecordsMap:
        """`memory` has `records_bytes(num_extents)` bytes."""
        clients = RECORDS_OFFSET + num_extents * RECORDS_PER_EXTENT * RECORD.itemsize
        leases = clients + MAX_CLIENTS * CLIENT.itemsize
        uses = leases + MAX_CLIENTS * MAX_LEASES_PER_CLIENT * 4
        return cls(
            memory[: HEADER.itemsize].view(HEADER),
            memory[RECORDS_OFFSET:clients].view(RECORD),
            memory[clients:leases].view(CLIENT),
            memory[leases:uses].view("<u4").reshape(MAX_CLIENTS, MAX_LEASES_PER_CLIENT),
            memory[uses:].view("<i8"),
        )


def records_bytes(num_extents: int) -> int:
    """Size of the records memfd for a pool of `num_extents`."""
    records = num_extents * RECORDS_PER_EXTENT * (RECORD.itemsize + 8)
    return RECORDS_OFFSET + records + MAX_CLIENTS * (CLIENT.itemsize + 4 * MAX_LEASES_PER_CLIENT)


def round_slot_bytes(num_bytes: int) -> int:
    """Slot size for blocks of `num_bytes`: whole pages, at least MIN_SLOT_BYTES."""
    pages = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return max(MIN_SLOT_BYTES, pages)
