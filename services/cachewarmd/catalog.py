"""What the daemon knows beside block records and must not forget: stamps and weights, as JSON.

    0        +------------------------------------------+
             | number u64 | bytes u64 | SHA-256 | JSON  |   half 0: even numbers
    8 MiB    +------------------------------------------+
             | number u64 | bytes u64 | SHA-256 | JSON  |   half 1: odd numbers
             +------------------------------------------+

The valid half with the higher number counts: a daemon that dies while it writes one leaves the
other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import Any

from cachewarmd import segment
from cachewarmd.errors import NoSpaceError
from cachewarmd.failpoints import hit, may_fail

FORMAT = 1
_HALF_BYTES = 8 << 20
_HEAD = struct.Struct("<QQ32s")


class Catalog:
    """One memfd; `adopted` is one of an earlier daemon, which becomes the catalog's own.

    Raises ValueError for an adopted one that is not a catalog.
    """

    def __init__(self, adopted: int | None = None) -> None:
        if adopted is not None and os.fstat(adopted).st_size != 2 * _HALF_BYTES:
            raise ValueError("a catalog has another size")
        if adopted is None:
            adopted = segment.create_memfd("cachewarm-catalog", 2 * _HALF_BYTES)
        self.fd = adopted
        found = [half for half in map(self._read_half, (0, 1)) if half is not None]
        self._number, self._content = max(found, key=lambda half: half[0], default=(0, {}))

    @property
    def content(self) -> dict[str, Any]:
        """What was written last; empty when nothing was, or in a format we don't know."""
        return self._content if self._content.get("format") == FORMAT else {}

    def write(self, content: dict[str, Any]) -> None:
        """Replace all of it. Raises NoSpaceError; what was written before stays then."""
        payload = json.dumps({**content, "format": FORMAT}).encode()
        if len(payload) + _HEAD.size > _HALF_BYTES:
            raise NoSpaceError(f"the catalog has {_HALF_BYTES} bytes, {len(payload)} are needed")
        number = self._number + 1
        offset = number % 2 * _HALF_BYTES
        may_fail("catalog.before")
        os.pwrite(self.fd, payload, offset + _HEAD.size)
        hit("catalog.payload")
        head = _HEAD.pack(number, len(payload), _digest(number, payload))
        os.pwrite(self.fd, head, offset)
        hit("catalog.after")
        self._number, self._content = number, {**content, "format": FORMAT}

    def _read_half(self, which: int) -> tuple[int, dict[str, Any]] | None:
        offset = which * _HALF_BYTES
        number, size, digest = _HEAD.unpack(os.pread(self.fd, _HEAD.size, offset))
        if not number or size > _HALF_BYTES - _HEAD.size:
            return None
        payload = os.pread(self.fd, size, offset + _HEAD.size)
        if digest != _digest(number, payload):
            return None
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            return None
        return (number, content) if isinstance(content, dict) else None

    def close(self) -> None:
        os.close(self.fd)


def _digest(number: int, payload: bytes) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little") + payload).digest()
