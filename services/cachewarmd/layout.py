"""The ABI of the shared memory: header and block records.

Two memfds make the L2 pool. Both are written by cachewarmd only; engines map them read-only.

    records memfd                                pool memfd
    0      +---------------------------+         0        +------------------+
           | header, 256 bytes, frozen |                  | extent 0, 64 MiB |  slots of one size
    4096   +---------------------------+         64 MiB   +------------------+
           | record of slot 0, 128 B   |                  | extent 1         |
           | record of slot 1          |                  ...
           ...  RECORDS_PER_EXTENT for each extent

Slot number s lies in extent s // RECORDS_PER_EXTENT, at place s % RECORDS_PER_EXTENT of it; its
bytes start at extent * EXTENT_BYTES + place * slot_bytes(extent). Slots too many for the extent's
slot size are never used, so a slot number never changes its record.

The header's first 256 bytes never change their meaning between versions: a reader can always tell
what it has before it.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np

MAGIC = b"CWARMD\x00\x01"
FORMAT_VERSION = 1
EXTENT_BYTES = 64 << 20
PAGE_BYTES = 4096
MIN_SLOT_BYTES = 16 << 10
RECORDS_PER_EXTENT = EXTENT_BYTES // MIN_SLOT_BYTES
RECORDS_OFFSET = PAGE_BYTES
KEY_BYTES = 32


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
        ],
        "formats": ["V8", "<u4", "<u4", "V32", "<u8", "<u8", "<u8", "<u8", "<u8", "V32"],
        "offsets": [0, 8, 12, 16, 48, 56, 64, 72, 80, 88],
        "itemsize": 256,
    }
)

RECORD = np.dtype(
    {
        "names": [
            "state",  # BlockState; stored last when a block is sealed, first when it is freed
            "generation",  # grows at every reuse of the slot, never goes back
            "key",
            "parent_key",
            "num_tokens",
            "stamp_id",
            "offset",  # in the pool
            "num_bytes",
            "xxh3",  # of the daemon's own copy
        ],
        "formats": ["<u8", "<u8", "V32", "V32", "<u4", "<u4", "<u8", "<u8", "V16"],
        "offsets": [0, 8, 16, 48, 80, 84, 88, 96, 104],
        "itemsize": 128,
    }
)


def layout_hash() -> bytes:
    """SHA-256 over everything that decides where a byte stands; differs = do not read."""
    parts = [repr(HEADER.descr), repr(RECORD.descr), EXTENT_BYTES, MIN_SLOT_BYTES, RECORDS_OFFSET]
    return hashlib.sha256(repr(parts).encode()).digest()


def records_bytes(num_extents: int) -> int:
    """Size of the records memfd for a pool of `num_extents`."""
    return RECORDS_OFFSET + num_extents * RECORDS_PER_EXTENT * RECORD.itemsize


def round_slot_bytes(num_bytes: int) -> int:
    """Slot size for blocks of `num_bytes`: whole pages, at least MIN_SLOT_BYTES."""
    pages = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return max(MIN_SLOT_BYTES, pages)
