"""Tier L1 in the daemon: token ids of pieces of prompts, by digests that only their engines know.

One memfd, in segments of 1 MiB; what a later daemon adopts is what a walk through them finds.

    segment  | magic, number u64 |  then records, each of this segment's number
    record   | num_bytes u64, number u64, key 32, check sum 16 | ids, padded to 8 |

A record is written at once and never changed, so a daemon that dies leaves at most one that its
check sum refuses when somebody asks for it. When all segments are full the oldest is written anew:
what was asked for twice since it came (a burst counts as one) is carried over, the rest is gone.
No text is here; ids tell a prompt, so this memory is as secret as KV blocks are.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cachewarmd import segment
from cachewarmd.failpoints import hit
from cachewarmd.lru2 import BURST_S

SEGMENT_BYTES = 1 << 20
MAX_IDS_BYTES = 64 << 10  # of one piece
KEY_BYTES = 32
_MAGIC = b"cwprmpt1"
_HEAD = struct.Struct("<8sQ")
_RECORD = struct.Struct("<QQ32s16s")
_MAX_CARRIED = SEGMENT_BYTES // 2


@dataclass(slots=True)
class _Piece:
    offset: int  # of its record
    num_bytes: int
    last: float
    again: bool = False


class Prompts:
    """Ids by key. `adopted` is a memfd of an earlier daemon, which becomes the cache's own.

    `may_take` tells whether so much memory can be had. Raises ValueError for an adopted memfd of
    another size.
    """

    def __init__(
        self, num_bytes: int, may_take: Callable[[int], bool], adopted: int | None = None
    ) -> None:
        self._num_segments = num_bytes // SEGMENT_BYTES
        size = self._num_segments * SEGMENT_BYTES
        if adopted is not None and os.fstat(adopted).st_size != size:
            raise ValueError(f"it has {os.fstat(adopted).st_size} bytes, not {size}")
        self.fd = adopted if adopted is not None else -1
        if adopted is None and size:
            self.fd = segment.create_memfd("cachewarm-prompts", size)
        self._may_take = may_take
        self._pieces: dict[bytes, _Piece] = {}
        self._numbers = [self._number_of(index) for index in range(self._num_segments)]
        self._unread = [index for index, number in enumerate(self._numbers) if number]
        self._current = -1  # no segment is written to; an adopted one never again
        self._end = 0
        self.num_hits = self.num_misses = self.num_doubtful = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, key: bytes, now: float) -> bytes:
        """The ids of a key, touched; empty when they are not here, or in doubt."""
        piece = self._pieces.get(key)
        ids = b"" if piece is None else self._read(key, piece)
        if piece is None or not ids:
            self.num_misses += 1
            return b""
        if now - piece.last >= BURST_S:
            piece.last, piece.again = now, True
        self.num_hits += 1
        return ids

    def put(self, key: bytes, ids: bytes, now: float) -> bool:
        """Keep ids; False where there is no room at all. Raises OSError (no memory)."""
        if key in self._pieces:
            return True
        room = _RECORD.size + _padded(len(ids))
        if (self._current < 0 or self._end + room > SEGMENT_BYTES) and not self._turn():
            return False
        hit("prompts.before")
        self._append(key, ids, now)
        hit("prompts.after")
        return True

    def close(self) -> None:
        """Let go of the memfd; whoever stored a duplicate has it still."""
        if self.fd >= 0:
            os.close(self.fd)

    def restore_some(self) -> bool:
        """Find what one segment of an earlier daemon holds; False when all were looked at."""
        if self._unread:
            self._restore(self._unread[-1])
        return bool(self._unread)

    # -- segments -------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Begin the next segment: one that was never used, while memory is there, or the oldest."""
        free = [index for index, number in enumerate(self._numbers) if not number]
        used = [index for index, number in enumerate(self._numbers) if number]
        if free and self._may_take(SEGMENT_BYTES):
            chosen = free[0]
        elif used:
            chosen = min(used, key=self._numbers.__getitem__)
        else:
            return False
        carried = list(self._leave(chosen))
        number = max(self._numbers) + 1
        hit("prompts.turn.before")
        os.pwrite(self.fd, _HEAD.pack(_MAGIC, number), chosen * SEGMENT_BYTES)
        hit("prompts.turn.after")
        self._numbers[chosen] = number
        self._current, self._end = chosen, _HEAD.size
        for key, ids, last in carried:
            # What is carried must be asked for again, or it goes the next time.
            self._append(key, ids, last)
        return True

    def _leave(self, index: int) -> Iterator[tuple[bytes, bytes, float]]:
        """Forget a segment's pieces; gives those that are carried over."""
        if index in self._unread:
            self._restore(index)
        room = _MAX_CARRIED
        inside = [k for k, p in self._pieces.items() if p.offset // SEGMENT_BYTES == index]
        for key in inside:
            piece = self._pieces[key]
            size = _RECORD.size + _padded(piece.num_bytes)
            ids = self._read(key, piece) if piece.again and size <= room else b""
            if ids:
                room -= size
                yield key, ids, piece.last
            self._pieces.pop(key, None)

    def _number_of(self, index: int) -> int:
        magic, number = _HEAD.unpack(os.pread(self.fd, _HEAD.size, index * SEGMENT_BYTES))
        return int(number) if magic == _MAGIC else 0

    def _restore(self, index: int) -> None:
        """Walk a segment's records. Their content is looked at when somebody asks for it."""
        self._unread.remove(index)
        start = index * SEGMENT_BYTES
        data = os.pread(self.fd, SEGMENT_BYTES, start)
        place = _HEAD.size
        while place + _RECORD.size <= len(data):
            num_bytes, number, key, _ = _RECORD.unpack_from(data, place)
            end = place + _RECORD.size + _padded(num_bytes)
            if number != self._numbers[index] or not 0 < num_bytes <= MAX_IDS_BYTES:
                break
            if end > len(data):
                break
            piece = _Piece(start + place, num_bytes, 0.0)
            self._pieces.setdefault(key, piece)
            place = end

    # -- records --------------------------------------------------------------------------------

    def _append(self, key: bytes, ids: bytes, now: float) -> None:
        head = (len(ids), self._numbers[self._current], key)
        record = _RECORD.pack(*head, _check_sum(*head, ids)) + ids
        offset = self._current * SEGMENT_BYTES + self._end
        if os.pwrite(self.fd, record, offset) != len(record):
            raise OSError("a piece of a prompt was written in part")
        self._end += _RECORD.size + _padded(len(ids))
        self._pieces[key] = _Piece(offset, len(ids), now)

    def _read(self, key: bytes, piece: _Piece) -> bytes:
        data = os.pread(self.fd, _RECORD.size + piece.num_bytes, piece.offset)
        num_bytes, number, own, check = _RECORD.unpack_from(data)
        ids = data[_RECORD.size :]
        if (num_bytes, own) == (piece.num_bytes, key) and check == _check_sum(
            num_bytes, number, own, ids
        ):
            return ids
        self.num_doubtful += 1
        del self._pieces[key]
        return b""


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _check_sum(num_bytes: int, number: int, key: bytes, ids: bytes) -> bytes:
    state = hashlib.blake2b(_RECORD.pack(num_bytes, number, key, bytes(16)), digest_size=16)
    state.update(ids)
    return state.digest()
