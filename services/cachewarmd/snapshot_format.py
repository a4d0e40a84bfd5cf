"""Snapshot files: what stands where, and the parser that believes nothing.

    0         +------------------------------+
              | header, 256 B                |
    256       +------------------------------+
              | stamp 0, STAMP.size B        |
              ...  num_stamps
              +------------------------------+
              | block 0, BLOCK.size B        |   most recently used chains first, and in a chain
              ...  num_blocks of table_rows  |   parents before children
    content   +------------------------------+
              | content of block 0           |
              ...
              +------------------------------+

Header and each row carry a check of their own and each block its content's xxh3-128, so damage
costs only what it lies in, with what hangs on that; a file cut short has lost its coldest chains.
Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from cachewarmd.errors import InvalidRequestError
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.protocol import KEY_BYTES

MAGIC = b"CWSNAP\x00\x01"
FORMAT_VERSION = 1
MAX_STAMPS = 4096
MAX_DESCRIPTION_BYTES = 1024
_CHECK = struct.Struct("<I")
# magic, header bytes, format version, stamps, table rows, blocks, file bytes, created, salt mark
_HEADER = struct.Struct("<8sIIIIIQQ32s")
HEADER_BYTES = 256
# stamp, weights, block bytes, block size, length of the description, description, check
STAMP = struct.Struct(f"<32s32sQII{MAX_DESCRIPTION_BYTES}sI")
# key, parent key, tokens, stamp row, offset in the file, bytes, xxh3 of the content, is root, check
BLOCK = struct.Struct("<32s32sIIQQ16sII")
_ROWS_AT_ONCE = 4096

# Reads so many bytes from an offset on; fewer at the end of the file.
Read = Callable[[int, int], bytes]


def salt_mark(salt: bytes) -> bytes:
    """Tells salts apart and gives none away."""
    return hashlib.sha256(b"cachewarm snapshot" + salt).digest()


@dataclass(frozen=True)
class SavedStamp:
    """As it was registered."""

    stamp: bytes
    weights_sha256: bytes
    block_bytes: int
    block_size: int  # tokens
    description: str

    def pack(self) -> bytes:
        """Its row."""
        text = self.description.encode()[:MAX_DESCRIPTION_BYTES]
        numbers = (self.block_bytes, self.block_size, len(text))
        return _checked(STAMP.pack(self.stamp, self.weights_sha256, *numbers, text, 0))


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A row of the table; `stamp` is the number of a stamp's row."""

    key: bytes
    parent_key: bytes
    num_tokens: int
    stamp: int
    offset: int
    num_bytes: int
    xxh3: bytes
    is_root: bool

    def pack(self) -> bytes:
        """Its row."""
        row = BLOCK.pack(
            self.key,
            self.parent_key,
            self.num_tokens,
            self.stamp,
            self.offset,
            self.num_bytes,
            self.xxh3,
            self.is_root,
            0,
        )
        return _checked(row)


@dataclass(frozen=True)
class Header:
    """`table_rows` is the room of the table, of which `num_blocks` rows are used."""

    num_stamps: int
    table_rows: int
    num_blocks: int
    file_bytes: int
    created_unix_ms: int
    salt_mark: bytes

    @property
    def table_offset(self) -> int:
        return HEADER_BYTES + self.num_stamps * STAMP.size

    @property
    def content_offset(self) -> int:
        return self.table_offset + self.table_rows * BLOCK.size

    def pack(self) -> bytes:
        """HEADER_BYTES of it."""
        raw = _HEADER.pack(
            MAGIC,
            HEADER_BYTES,
            FORMAT_VERSION,
            self.num_stamps,
            self.table_rows,
            self.num_blocks,
            self.file_bytes,
            self.created_unix_ms,
            self.salt_mark,
        )
        return _checked(raw.ljust(HEADER_BYTES, b"\0"))


@dataclass
class Contents:
    """What of a file can be believed. `refused` counts what can't, by reason."""

    header: Header
    stamps: list[SavedStamp | None] = field(default_factory=list)
    blocks: deque[SavedBlock] = field(default_factory=deque)
    num_bytes: int = 0  # of these blocks
    refused: Counter[str] = field(default_factory=Counter)


def _checked(row: bytes) -> bytes:
    """The row with the check of what stands before it as its last 4 bytes."""
    body = row[: -_CHECK.size]
    return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def _is_checked(row: bytes) -> bool:
    return row == _checked(row)


def parse_header(raw: bytes) -> Header:
    """From a file's first HEADER_BYTES. Raises InvalidRequestError; says so of other formats."""
    if raw[: len(MAGIC)] != MAGIC or len(raw) < HEADER_BYTES:
        raise InvalidRequestError("not a snapshot of ours")
    fields = _HEADER.unpack_from(raw)
    header_bytes, version = fields[1:3]
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        raise InvalidRequestError(f"the snapshot's format is {version}, ours {FORMAT_VERSION}")
    if not _is_checked(raw[:HEADER_BYTES]):
        raise InvalidRequestError("the snapshot's header is damaged")
    header = Header(*fields[3:])
    if header.num_stamps > MAX_STAMPS or header.num_blocks > header.table_rows:
        raise InvalidRequestError("the snapshot's header says what can't be")
    return header


def parse(read: Read, size: int, max_blocks: int) -> Contents:
    """A file of `size` bytes; at most `max_blocks` rows are looked at, the first ones.

    Nothing is allocated by what the file says, only by what of it is there. Content is not read.
    Raises InvalidRequestError when nothing of it is of use, and what `read` raises.
    """
    header = parse_header(read(0, HEADER_BYTES))
    found = Contents(header)
    raw = read(HEADER_BYTES, header.num_stamps * STAMP.size)
    found.stamps = [_stamp(raw[at : at + STAMP.size]) for at in range(0, len(raw), STAMP.size)]
    wanted = min(header.num_blocks, max_blocks)
    found.refused["no_space"] += header.num_blocks - wanted
    for first in range(0, wanted, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, wanted - first)
        raw = read(header.table_offset + first * BLOCK.size, count * BLOCK.size)
        for at in range(0, count * BLOCK.size, BLOCK.size):
            block = _block(found, raw[at : at + BLOCK.size], size)
            if isinstance(block, str):
                found.refused[block] += 1
            else:
                found.blocks.append(block)
                found.num_bytes += block.num_bytes
        if len(raw) < count * BLOCK.size:
            found.refused["truncated"] += wanted - first - count
            break
    return found


def _stamp(row: bytes) -> SavedStamp | None:
    if len(row) < STAMP.size or not _is_checked(row):
        return None
    stamp, weights, block_bytes, block_size, length, text, _ = STAMP.unpack(row)
    if not 0 < block_bytes <= EXTENT_BYTES or not block_size or length > len(text):
        return None
    description = text[:length].decode(errors="replace")
    return SavedStamp(stamp, weights, block_bytes, block_size, description)


def _block(found: Contents, row: bytes, size: int) -> SavedBlock | str:
    """The row's block, or why there is none."""
    if len(row) < BLOCK.size:
        return "truncated"
    if not _is_checked(row):
        return "damaged"
    key, parent_key, num_tokens, number, offset, num_bytes, xxh3, is_root, _ = BLOCK.unpack(row)
    block = SavedBlock(
        key, parent_key, num_tokens, number, offset, num_bytes, xxh3, is_root=bool(is_root)
    )
    stamp = found.stamps[block.stamp] if block.stamp < len(found.stamps) else None
    if stamp is None:
        return "stamp"
    if block.num_bytes != stamp.block_bytes or not 0 < block.num_tokens <= stamp.block_size:
        return "damaged"
    if block.offset < found.header.content_offset:
        return "damaged"
    if block.offset + block.num_bytes > size:
        return "truncated"
    return block


assert STAMP.size % 4 == BLOCK.size % 4 == 0
assert KEY_BYTES == 32  # as in the rows
