"""Snapshot files, as far as they are parsed before any content is read.

An input is one byte and a file. Where the byte is odd, header and rows get right checks first:
else nearly all that a fuzzer changes is refused for its check, and nothing behind that is seen.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from cachewarmd import snapshot_format as snapshots
from cachewarmd.errors import InvalidRequestError
from cachewarmd.snapshot_format import (
    BLOCK,
    HEADER_BYTES,
    STAMP,
    Contents,
    Header,
    SavedBlock,
    SavedStamp,
)
from cachewarmd.v1 import control_pb2 as pb
from tests.fuzz.target import Target, replaced

_MAX_BLOCKS = 64
_BYTES = 16  # of a block


def _with_checks(file: bytes) -> bytes:
    if len(file) < HEADER_BYTES:
        return file
    raw = bytearray(file)
    raw[:HEADER_BYTES] = snapshots._checked(bytes(raw[:HEADER_BYTES]))
    try:
        header = snapshots.parse_header(bytes(raw[:HEADER_BYTES]))
    except InvalidRequestError:
        return bytes(raw)
    rows = [(HEADER_BYTES, STAMP.size, header.num_stamps)]
    rows.append((header.table_offset, BLOCK.size, min(header.num_blocks, _MAX_BLOCKS)))
    for start, size, count in rows:
        for at in range(start, min(start + size * count, len(raw) - size + 1), size):
            raw[at : at + size] = snapshots._checked(bytes(raw[at : at + size]))
    return bytes(raw)


def check(data: bytes) -> None:
    """What is believed lies in the file, behind the table, and is of a stamp that is believed."""
    file = _with_checks(data[1:]) if data[:1] and data[0] % 2 else data[1:]

    def read(offset: int, size: int) -> bytes:
        return file[offset : offset + size]

    try:
        found = snapshots.parse(read, len(file), _MAX_BLOCKS)
    except InvalidRequestError as exc:
        pb.ErrorReply(code=exc.code, message=str(exc))
        return
    assert len(found.blocks) <= _MAX_BLOCKS, "more than was asked for"
    assert found.num_bytes == sum(block.num_bytes for block in found.blocks), "bytes"
    for block in found.blocks:
        stamp = found.stamps[block.stamp]
        assert stamp is not None, "a block of no stamp"
        assert block.num_bytes == stamp.block_bytes, "a block's size"
        assert 0 < block.num_tokens <= stamp.block_size, "a block's tokens"
        assert found.header.content_offset <= block.offset, "content in the table"
        assert block.offset + block.num_bytes <= len(file), "beyond the file"


def plant() -> AbstractContextManager[object]:
    """An unchecked length: of the file."""
    real = snapshots._block

    def believing(found: Contents, row: bytes, size: int) -> SavedBlock | str:
        return real(found, row, 1 << 64)

    return replaced(snapshots, "_block", believing)


def _file(num_stamps: int, num_blocks: int) -> bytes:
    header = Header(num_stamps, num_blocks, num_blocks, 0, 1, b"m" * 32)
    rows = [SavedStamp(b"s" * 32, b"w" * 32, _BYTES, 4, "x").pack() for _ in range(num_stamps)]
    for number in range(num_blocks):
        place = header.content_offset + number * _BYTES
        block = SavedBlock(
            bytes([number]) * 32, b"p" * 32, 4, 0, place, _BYTES, b"x" * 16, is_root=not number
        )
        rows.append(block.pack())
    return header.pack() + b"".join(rows) + bytes(num_blocks * _BYTES)


def make() -> Target:
    """Files with and without stamps and blocks, with checks as they are and made right."""
    files = [_file(1, 2), _file(2, 1), _file(0, 0)]
    for file in files:
        snapshots.parse(lambda offset, size, file=file: file[offset : offset + size], len(file), 9)
    return Target(check, [bytes([odd]) + file for file in files for odd in (0, 1)], plant)
